"""The command that writes the reproduction of the paper as a page: report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress
from foveate.cli.options import OUT_FOLDER

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.report.reproduction import Reproduction

KINDS = ("svg", "png")


def report(
    results: Annotated[
        Path | None,
        typer.Argument(
            metavar="RESULTS",
            help="Output folder of 'foveate reproduce'.",
            show_default="the published results",
        ),
    ] = None,
    out: Annotated[Path, OUT_FOLDER()] = Path("report"),
) -> None:
    """Write the reproduction of the paper as one page: claims, figures, tables, provenance.

    ```
    foveate report
    foveate report paper --out report
    ```

    Writes report.html, a self-contained page, and each figure as .svg and .png in figures/.
    Results can be partial: the page lists the missing ones.
    """
    from foveate.errors import DataError
    from foveate.files import check_folder
    from foveate.paper.tables import published_folder
    from foveate.report.reproduction import Reproduction

    folder = results or published_folder()
    if folder is None:
        raise DataError(
            "this version includes no published results; run 'foveate reproduce --out paper', then "
            "'foveate report paper'"
        )
    check_folder(out)
    found = Reproduction.read(folder)
    for path in _write(found, str(results or "published with foveate"), out):
        OUTPUT.print(path, markup=False)
    OUTPUT.print(_table(found))
    OUTPUT.print(found.summary(), markup=False)


def _write(found: "Reproduction", source: str, out: Path) -> list[Path]:
    from foveate.report.plots import save
    from foveate.report.reproduction import captioned_figures, reproduction_page

    drawn = captioned_figures(found)
    written = [reproduction_page(found, drawn, source).save(out / "report.html")]
    with progress("figures", len(drawn)) as advance:
        for name, each in drawn.items():
            written += [save(each.figure, out / "figures" / f"{name}.{kind}") for kind in KINDS]
            advance(1)
    return written


def _table(found: "Reproduction") -> "Table":
    from rich.table import Table

    colours = {"holds": "green", "fails": "bold red", "undecided": "yellow"}
    table = Table("", "statement", "verdict", box=None, pad_edge=False, header_style="bold")
    for claim in found.claims:
        verdict = f"[{colours[claim.verdict]}]{claim.verdict}[/]"
        table.add_row(claim.name, claim.statement.replace("[", r"\["), verdict)
    return table
