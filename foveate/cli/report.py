"""The command about the paper's reproduction as a page: report."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.report.reproduction import Reproduction

KINDS = ("svg", "png")


def report(
    results: Annotated[
        Path | None,
        typer.Argument(help="Folder that 'foveate reproduce' wrote; else the published results."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the page and the figures.")] = Path(
        "report"
    ),
    update_docs: Annotated[
        bool,
        typer.Option(
            "--update-docs", help="Write the tables into README and docs of a checkout instead."
        ),
    ] = False,
) -> None:
    """Put the paper's reproduction on one page: claims, figures, tables, and how it was run.

    Example: foveate report --out report

    Writes report.html, which needs nothing else, and each figure as figures/*.svg and *.png.
    Results may be partial: the page says what is missing.
    """
    from foveate.files import check_folder
    from foveate.sweeps.records import published

    folder = results or published()
    if update_docs:
        _update(folder)
        return
    check_folder(out)
    found = _read(folder)
    for path in _write(found, str(results or "published with foveate"), out):
        OUTPUT.print(path, markup=False)
    OUTPUT.print(_table(found))
    OUTPUT.print(found.lead(), markup=False)


def _read(folder: Path | None) -> "Reproduction":
    from foveate.errors import DataError
    from foveate.report.reproduction import Reproduction

    if folder is None:
        raise DataError(
            "no results are published with this version; run 'foveate reproduce --out paper', then "
            "'foveate report paper'"
        )
    return Reproduction.read(folder)


def _write(found: "Reproduction", source: str, out: Path) -> list[Path]:
    from foveate.report.plots import save
    from foveate.report.reproduction import plates, reproduction_page

    drawn = plates(found)
    written = [reproduction_page(found, drawn, source).save(out / "report.html")]
    with progress("figures", len(drawn)) as advance:
        for name, plate in drawn.items():
            written += [save(plate.figure, out / "figures" / f"{name}.{kind}") for kind in KINDS]
            advance(1)
    return written


def _update(folder: Path | None) -> None:
    from foveate.report.markdown import update_docs
    from foveate.report.reproduction import Reproduction

    found = Reproduction.read(folder) if folder else Reproduction()
    for path in update_docs(found, Path(__file__).parents[2]):
        OUTPUT.print(path, markup=False)


def _table(found: "Reproduction") -> "Table":
    from rich.table import Table

    colours = {"holds": "green", "fails": "bold red", "not yet": "yellow"}
    table = Table("", "statement", "verdict", box=None, pad_edge=False, header_style="bold")
    for finding in found.findings:
        verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
        table.add_row(finding.name, finding.statement.replace("[", r"\["), verdict)
    return table
