"""The command that repeats the experiments of the paper: reproduce."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from foveate.cli import options
from foveate.cli.sweep import open_study, run_study

if TYPE_CHECKING:
    from foveate.training.config import Precision

MAX_TOGETHER = 64


def reproduce(
    tables: Annotated[list[str] | None, options.TABLE] = None,
    rows: Annotated[list[str] | None, options.ROWS_OPTION("all rows")] = None,
    seeds: Annotated[int, options.SEEDS()] = 3,
    precision: Annotated[str, options.PRECISION("auto: bf16 on a GPU, float32 on a CPU")] = "auto",
    out: Annotated[Path, options.OUT_FOLDER()] = Path("paper"),
    device: options.DeviceOption = "auto",
    together: Annotated[int, options.TOGETHER(min=0, max=MAX_TOGETHER)] = 0,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    dry_run: options.DryRunOption = False,
) -> None:
    """Repeat the tables of the paper: train every row with several seeds, test at all scales.

    ```
    foveate reproduce --dry-run
    foveate reproduce table1 --rows fovavg --rows cnn --seeds 1
    ```

    If interrupted, the same command resumes; finished runs are not repeated. The results are in
    results.csv in the output folder, one line per row, seed and scale. Several machines can share
    the work: give each its own rows, then copy all run folders into one folder and run the same
    command there to collect the results.
    """
    from foveate.paper.tables import TABLES, find_rows, paper_jobs
    from foveate.training.loop import find_device

    place = str(find_device(device))
    chosen = find_rows(TABLES if tables in (None, [], ["all"]) else tables, rows or ())
    usual = "bf16" if place.startswith("cuda") else "float32"
    numbers = cast("Precision", usual if precision == "auto" else precision)
    study = open_study(paper_jobs(chosen, seeds, numbers), out)
    labels = {(row.table, row.name): f"{row.table[-1]}  {row.label}" for row in chosen}
    run_study(
        study, labels, dry_run=dry_run,
        name=engine, device=place, together=together, address=address,
    )  # fmt: skip
