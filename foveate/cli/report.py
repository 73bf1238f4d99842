"""The command that writes the reproduction of the paper as a page: report."""

from pathlib import Path
from typing import Annotated

from foveate.cli import options
from foveate.cli.console import OUTPUT, print_table, progress
from foveate.files import check_folder

COLOURS = {"holds": "green", "fails": "bold red", "undecided": "yellow"}


def report(
    results: Annotated[Path | None, options.RESULTS] = None,
    out: Annotated[Path, options.OUT_FOLDER()] = Path("report"),
) -> None:
    """Write the reproduction of the paper as one page: claims, figures, tables, provenance.

    ```
    foveate report
    foveate report paper --out report
    ```

    Writes report.html, a self-contained page, and each figure as .svg and .png in figures/.
    Results can be partial: the page lists the missing ones.
    """
    from rich.text import Text

    from foveate.paper.tables import published_folder
    from foveate.report.plots import save_figure
    from foveate.report.reproduction import Reproduction, captioned_figures, reproduction_page

    folder = results or published_folder()
    check_folder(out)
    found = Reproduction.read(folder)
    drawn, source = captioned_figures(found), str(results or "published with foveate")
    written = [reproduction_page(found, drawn, source).save(out / "report.html")]
    with progress("figures", len(drawn)) as advance:
        for name, each in drawn.items():
            written += save_figure(each.figure, out / "figures", name)
            advance(1)
    OUTPUT.print(*written, sep="\n")
    rows = [(c.name, c.statement, Text(c.verdict, COLOURS[c.verdict])) for c in found.claims]
    header = ("", "statement", "verdict")
    print_table(header, rows, left=header)
    OUTPUT.print(found.summary())
