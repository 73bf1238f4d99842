"""The command sweep, and what it shares with reproduce: performing a study and showing it."""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption, interruptible
from foveate.cli.training import BadOption, _warn_of_skipped

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.sweeps.runner import Ended, Failure, Study
    from foveate.training.checkpoint import Progress
    from foveate.training.config import TrainConfig

SHOWN = 5  # scales in the printed table; results.csv has all
Labels = Mapping[tuple[str, str], str]
EngineOption = Annotated[str, typer.Option(help="local, or ray for a cluster.")]
AddressOption = Annotated[str | None, typer.Option(help="Of the Ray cluster; else one here.")]


def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML file of runs.")],
    engine: EngineOption = "local",
    address: AddressOption = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: what the study says, or a GPU if one is here.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs and results; runs/NAME if not given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the study, list its runs.")] = (
        False
    ),
    bad: BadOption = "stop",
    trust: TrustOption = False,
) -> None:
    """Train and test the runs of a study: your own list, or a grid of settings.

    Example: foveate sweep study.toml --dry-run

    The smallest study: name = "first", and below it [grid], preset = ["fovavg", "cnn"] and
    samples = [500, 2000]; examples/study.toml has all there is. A mistake in the file is reported
    with its key before anything starts. Stop it whenever you like: the same command goes on, and
    what is done is not done again.
    """
    from foveate.cli.training import _loader
    from foveate.files import check_folder
    from foveate.sweeps.runner import Study
    from foveate.sweeps.study import read_study
    from foveate.training.data import is_photo
    from foveate.training.loop import find_device
    from foveate.training.skipped import check_bad

    load = _loader()
    plan = read_study(study, load, trust=trust, dry_run=dry_run)
    check_bad(bad, max((job.config for job in plan.jobs), key=is_photo))  # skip needs photographs
    folder = out or Path("runs") / plan.name
    check_folder(folder)
    if device == "auto" and plan.gpus is not None:
        device = "cuda" if plan.gpus else "cpu"
    else:
        device = str(find_device(device))
    run_study(
        Study(plan.jobs, folder),
        {row: row[1] for job in plan.jobs for row in job.rows},
        dry_run=dry_run,
        name=engine, device=device, address=address, cpus=plan.cpus, gpus=plan.gpus or 0.0,
        load=load, bad=bad,
    )  # fmt: skip


def run_study(study: "Study", labels: Labels, *, dry_run: bool, **engine: Any) -> None:
    """Perform what is left of a study, report each run as it ends, and print the table.

    Args:
        study: The study.
        labels: What the table calls each row of it.
        dry_run: Print what is left, and perform nothing.
        engine: The arguments of `make_engine`.
    """
    from foveate.sweeps.runner import make_engine

    live = _Live(study)
    workers = make_engine(watch=live.watch, **engine)
    workers.check()
    total, left = len(study.jobs), len(study.left)
    OUTPUT.print(f"{total} runs, {total - left} done, {left} left", markup=False)
    if dry_run:
        OUTPUT.print(_table(study, labels))
        return
    again = "run the same command to go on"
    with (
        live.status if ERRORS.is_terminal else nullcontext(),
        interruptible(lambda: f"{len(study.left)} runs are left; {again}"),
    ):
        failures = live.follow(study.run(workers))
    OUTPUT.print(_table(study, labels))
    OUTPUT.print(study.folder / "results.csv", markup=False)
    if failures:
        names = ", ".join(f"{job.name} seed {job.config.seed}" for job, _ in failures)
        words = f"{len(failures)} runs failed: {names}; the same command tries them again"
        ERRORS.print(words, markup=False)
        raise typer.Exit(1)


class _Live:
    """A line for each run that ends, and on a terminal the progress of the running one."""

    def __init__(self, study: "Study") -> None:
        self.left = len(study.left)
        self.names = {job.config.digest(): job.folder for job in study.jobs}
        self.status, self.folder = ERRORS.status("training"), study.folder

    def watch(self, config: "TrainConfig", progress: "Progress", steps: int) -> None:
        """Show how far a run is."""
        if ERRORS.is_terminal and progress.step % 20 == 0:  # a step on a GPU takes a millisecond
            epoch = f"epoch {min(progress.epoch + 1, config.epochs)} of {config.epochs}"
            self.status.update(f"{self.left} runs left; {self.names[config.digest()]}, {epoch}")

    def follow(self, ended: "Iterator[Ended]") -> "list[Failure]":
        """Report every run as it ends; returns those that failed."""
        from foveate.sweeps.runner import Failure
        from foveate.training.skipped import TABLE, read_skipped

        failures = []
        for one in ended:
            self.left -= 1
            name = f"{one.job.name} seed {one.job.config.seed}"
            if isinstance(one, Failure):
                failures.append(one)
                ERRORS.print(f"{name} failed: {one.reason}", markup=False)
            else:
                at = one.outcome.scales
                mean = 100 * sum(found.accuracy for found in at) / len(at)
                taken = f"{one.outcome.seconds:.1f} s"
                OUTPUT.print(f"{name}: {mean:.2f} % over all scales, {taken}", markup=False)
                if count := len(read_skipped(self.folder / one.job.folder)):
                    _warn_of_skipped(count, self.folder / one.job.folder / TABLE)
        return failures


def _table(study: "Study", labels: Labels) -> "Table":
    """Each row with its seeds done, the mean accuracy in percent at some scales, and its time."""
    from rich.markup import escape
    from rich.table import Table

    tested = sorted({scale for job in study.jobs for scale in job.scales})
    last, count = len(tested) - 1, min(SHOWN, len(tested))
    scales = [tested[round(i * last / max(1, count - 1))] for i in range(count)]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    for head in ("seeds", *(f"{scale:.3g}" for scale in scales), "s per run"):
        table.add_column(head, justify="right")
    for row, label in labels.items():
        records = [r for r in study.records if (r.table, r.row) == row]
        seconds = {record.seed: record.seconds for record in records}
        cells = [[r.accuracy for r in records if r.scale == scale] for scale in scales]
        means = [f"{100 * sum(found) / len(found):.2f}" if found else "" for found in cells]
        taken = f"{sum(seconds.values()) / len(seconds):.1f}" if seconds else ""
        table.add_row(escape(label), str(len(seconds)), *means, taken)
    return table
