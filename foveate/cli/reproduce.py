"""The commands that repeat the paper: reproduce and merge."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foveate.cli.console import ERRORS, OUTPUT, interruptible

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.paper.tables import Row
    from foveate.sweeps.runner import Ended, Study
    from foveate.training.checkpoint import Progress
    from foveate.training.config import Precision, TrainConfig

MAX_TOGETHER = 64
SHOWN = (0.5, 1.0, 2.0, 4.0, 8.0)
"""The scales of the live table; results.csv has all."""


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
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; else one here.")] = None,
    plan_only: Annotated[bool, typer.Option("--plan", help="Say what is to do, and stop.")] = False,
) -> None:
    """Repeat the paper's tables: every row, several seeds, tested at every scale.

    Example: foveate reproduce table1 --rows fovavg --rows cnn --seeds 1

    Stop it whenever you like: the same command goes on, and what is done is not done again.
    Results go to results.csv in the folder, a line per row, seed and scale. Several machines can
    share the work, each with rows of its own: 'foveate merge' puts their results together.
    """
    from foveate.files import check_folder
    from foveate.paper.tables import TABLES, find_rows
    from foveate.sweeps.engines import make_engine
    from foveate.sweeps.jobs import plan
    from foveate.sweeps.runner import Study
    from foveate.training.loop import find_device

    place = str(find_device(device))
    chosen = find_rows(TABLES if tables in (None, [], ["all"]) else tables, rows or ())
    usual = "bf16" if place.startswith("cuda") else "float32"
    numbers = cast("Precision", usual if precision == "auto" else precision)
    check_folder(out)
    study = Study(plan(chosen, seeds, numbers), out)
    live = _Live(chosen, study)
    runs = make_engine(engine, device=place, together=together, address=address, watch=live.watch)
    OUTPUT.print(_outlook(study), markup=False)
    if plan_only or not study.left:
        OUTPUT.print(_table(chosen, study))
        return
    with (
        _shown(live),
        interruptible(lambda: f"{len(study.left)} runs are left; run the same command to go on"),
    ):
        for ended in study.run(runs):
            live.tell(ended)
    OUTPUT.print(_table(chosen, study))
    OUTPUT.print(out / "results.csv", markup=False)
    if live.failed:
        ERRORS.print(f"{live.failed} runs failed; the same command tries them again", markup=False)
        raise typer.Exit(1)


def merge(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of results.")],
    out: Annotated[Path, typer.Option(help="Folder for all of them together.")],
) -> None:
    """Put results from several machines together, each run once.

    Example: foveate merge here/paper there/paper --out results/paper
    """
    from foveate.sweeps.records import merge_folders

    count = merge_folders(folders, out)
    said = "1 result" if count == 1 else f"{count:,} results"
    OUTPUT.print(f"{said} in {out / 'results.csv'}", markup=False)


def _outlook(study: "Study") -> str:
    from foveate.sweeps.records import published, read_records
    from foveate.sweeps.runner import estimate

    left = study.left
    words = f"{len(study.jobs)} runs, {len(study.jobs) - len(left)} done, {len(left)} left"
    if not left:
        return words
    before = published()
    seconds = estimate(left, [*study.records, *(read_records(before) if before else [])])
    if seconds is None:
        return f"{words}; how long they take is not known yet"
    return f"{words}; about {seconds / 60:.0f} minutes where the known results were made"


class _Live:
    """What is going on, for people who watch and for log files."""

    def __init__(self, rows: Sequence["Row"], study: "Study") -> None:
        self.rows, self.study = rows, study
        self.failed = 0
        self.now: dict[str, str] = {}

    def watch(self, config: "TrainConfig", progress: "Progress", steps: int) -> None:
        """Keep in mind how far a run is."""
        if progress.epoch == config.epochs:
            self.now.pop(config.digest(), None)
        elif progress.step % 100 == 0:
            self.now[config.digest()] = f"epoch {progress.epoch + 1}/{config.epochs}"

    def tell(self, ended: "Ended") -> None:
        """Say how a run ended, where there is no live table, or where it failed."""
        from foveate.sweeps.runner import Failure

        name = f"{ended.job.name} seed {ended.job.config.seed}"
        if isinstance(ended, Failure):
            self.failed += 1
            ERRORS.print(f"{name} failed: {ended.reason}", markup=False)
        elif not OUTPUT.is_terminal:
            done = len(self.study.jobs) - len(self.study.left)
            mean = sum(at.accuracy for at in ended.outcome.scales) / len(ended.outcome.scales)
            taken = f"{ended.outcome.seconds:.1f} s, {done} of {len(self.study.jobs)}"
            OUTPUT.print(f"{name}: {100 * mean:.2f} % over all scales, {taken}", markup=False)

    def __rich__(self) -> "Table":
        table = _table(self.rows, self.study)
        table.caption = ", ".join(self.now.values())
        return table


def _shown(live: _Live) -> AbstractContextManager[object]:
    """The table, drawn again and again where somebody watches."""
    from rich.live import Live

    if not OUTPUT.is_terminal:
        return nullcontext()
    return Live(live, console=OUTPUT, refresh_per_second=1, transient=True)


def _table(rows: Sequence["Row"], study: "Study") -> "Table":
    """Each row with its seeds done and the mean accuracy, in percent, at a few scales."""
    from rich.table import Table

    table = Table("row", "seeds", *(f"{scale:g}" for scale in SHOWN), "s per run")
    for row in rows:
        records = [r for r in study.records if (r.table, r.row) == (row.table, row.name)]
        seeds = {record.seed: record.seconds for record in records}
        cells = []
        for scale in SHOWN:
            found = [r.accuracy for r in records if r.scale == scale]
            cells.append(f"{100 * sum(found) / len(found):.2f}" if found else "")
        taken = f"{sum(seeds.values()) / len(seeds):.1f}" if seeds else ""
        table.add_row(f"{row.table[-1]}  {row.label}", str(len(seeds)), *cells, taken)
    return table
