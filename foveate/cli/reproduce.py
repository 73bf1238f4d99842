"""The command that repeats the paper: reproduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foveate.cli.sweep import AddressOption, EngineOption, run_study

if TYPE_CHECKING:
    from foveate.training.config import Precision

MAX_TOGETHER = 64


def reproduce(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="[TABLE...]", help="table1, table2, table3; all.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option("--rows", metavar="ROW", help="Only some rows, as fovavg or cnn-tr4."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each row, at most 1,000.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder of the runs and results.")] = Path("paper"),
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")
    ] = "auto",
    precision: Annotated[str, typer.Option(help="float32, bf16, or auto: bf16 on a GPU.")] = "auto",
    together: Annotated[
        int,
        typer.Option(
            min=0, max=MAX_TOGETHER, help="Runs side by side; 0 is 3 on a GPU, 1 on the CPU."
        ),
    ] = 0,
    engine: EngineOption = "local",
    address: AddressOption = None,
    plan_only: Annotated[
        bool, typer.Option("--plan", help="Print the planned runs and exit.")
    ] = False,
) -> None:
    """Repeat the paper's tables: every row, several seeds, tested at every scale.

    Example: foveate reproduce table1 --rows fovavg --rows cnn --seeds 1

    Stop it whenever you like: the same command goes on, and what is done is not done again.
    Results go to results.csv in the folder, a line per row, seed and scale. Several machines can
    share the work, each with rows of its own: copy their run folders into one folder, and the same
    command collects them.
    """
    from foveate.files import check_folder
    from foveate.paper.tables import TABLES, find_rows, paper_jobs
    from foveate.sweeps.runner import Study
    from foveate.training.loop import find_device

    place = str(find_device(device))
    chosen = find_rows(TABLES if tables in (None, [], ["all"]) else tables, rows or ())
    usual = "bf16" if place.startswith("cuda") else "float32"
    numbers = cast("Precision", usual if precision == "auto" else precision)
    check_folder(out)
    study = Study(paper_jobs(chosen, seeds, numbers), out)
    labels = {(row.table, row.name): f"{row.table[-1]}  {row.label}" for row in chosen}
    run_study(
        study, labels, dry_run=plan_only,
        name=engine, device=place, together=together, address=address,
    )  # fmt: skip
