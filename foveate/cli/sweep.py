"""The command for a list of runs of one's own: sweep."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption, interruptible

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.sweeps.runner import Ended, Engine, Failure, Study
    from foveate.sweeps.study import StudyFile
    from foveate.training.checkpoint import Progress
    from foveate.training.config import TrainConfig

SHOWN = 6  # scales in the table that is printed; results.csv has all


def sweep(
    study: Annotated[Path, typer.Argument(metavar="STUDY", help="A TOML file of runs.")],
    engine: Annotated[str, typer.Option(help="local, or ray for a cluster.")] = "local",
    address: Annotated[str | None, typer.Option(help="Of the Ray cluster; else one here.")] = None,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or auto: what the study says, or a GPU if one is here.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(help="Folder of the runs and results; runs/NAME if not given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the study, list its runs.")] = (
        False
    ),
    trust: TrustOption = False,
) -> None:
    """Train and test the runs of a study: your own list, or a grid of settings.

    Example: foveate sweep study.toml --dry-run

    The smallest study: name = "first", and below it [grid], preset = ["fovavg", "cnn"] and
    samples = [500, 2000]; examples/study.toml has all there is. A mistake in the file is named
    with its line before anything starts. Stop it whenever you like: the same command goes on, and
    what is done is not done again.
    """
    from foveate.cli.training import _loader
    from foveate.files import check_folder
    from foveate.sweeps.engines import make_engine
    from foveate.sweeps.runner import Study
    from foveate.sweeps.study import read_study

    load = _loader()
    plan = read_study(study, load, trust=trust, dry_run=dry_run)
    folder = out or Path("runs") / plan.name
    check_folder(folder)
    runs = Study(plan.jobs, folder)
    with _shown(runs) as live:
        workers = make_engine(
            engine, device=_place(device, plan), address=address, cpus=plan.cpus,
            gpus=plan.gpus or 0.0, watch=live.watch, load=load,
        )  # fmt: skip
        _check(workers, plan)
        OUTPUT.print(_outlook(runs, dry_run), markup=False)
        if dry_run:
            return
        with interruptible(
            lambda: f"{len(runs.left)} runs are left; run the same command to go on"
        ):
            failures = live.follow(runs.run(workers))
    OUTPUT.print(_table(plan, runs))
    OUTPUT.print(runs.folder / "results.csv", markup=False)
    if failures:
        names = ", ".join(f"{job.name} seed {job.config.seed}" for job, _ in failures)
        again = "the same command tries them again"
        ERRORS.print(f"{len(failures)} runs failed: {names}; {again}", markup=False)
        raise typer.Exit(1)


def _check(workers: "Engine", plan: "StudyFile") -> None:
    from foveate.sweeps.runner import ResourceError

    try:
        workers.check()
    except ResourceError as error:
        at = ("resources", error.key)
        raise plan.file.error(at, str(error)) if at in plan.file.lines else error from None


def _place(device: str, plan: "StudyFile") -> str:
    """The device that the option says, or else the study, or else what is there."""
    from foveate.training.loop import find_device

    if device == "auto" and plan.gpus is not None:
        return "cuda" if plan.gpus else "cpu"
    return str(find_device(device))


def _outlook(study: "Study", dry_run: bool) -> str:
    left = study.left
    words = f"{len(study.jobs)} runs, {len(study.jobs) - len(left)} done, {len(left)} left"
    if not dry_run:
        return words
    return "\n".join([words, *(f"  {job.name} seed {job.config.seed}" for job in left)])


class _Live:
    """A line for each run that ends, and for people who watch where the running one is."""

    def __init__(self, study: "Study") -> None:
        self.left = len(study.left)
        self.names = {job.config.digest(): job.folder for job in study.jobs}
        self.status = ERRORS.status("training")

    def watch(self, config: "TrainConfig", progress: "Progress", steps: int) -> None:
        """Say how far a run is."""
        if ERRORS.is_terminal and progress.step % 20 == 0:  # a step on a GPU takes a millisecond
            epoch = f"epoch {min(progress.epoch + 1, config.epochs)} of {config.epochs}"
            self.status.update(f"{self.left} runs left; {self.names[config.digest()]}, {epoch}")

    def follow(self, ended: "Iterator[Ended]") -> "list[Failure]":
        """Tell of every run as it ends; give those that failed."""
        from foveate.sweeps.runner import Failure

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
        return failures


@contextmanager
def _shown(study: "Study") -> "Iterator[_Live]":
    live = _Live(study)
    if not ERRORS.is_terminal:
        yield live
        return
    with live.status:
        yield live


def _table(plan: "StudyFile", study: "Study") -> "Table":
    """Each run with its seeds done, the mean accuracy in percent at some scales, and its time."""
    from rich.markup import escape
    from rich.table import Table

    scales = _some(plan.scales)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("run")
    for head in ("seeds", *(f"{scale:.3g}" for scale in scales), "s per run"):
        table.add_column(head, justify="right")
    for name in dict.fromkeys(job.name for job in plan.jobs):
        records = [r for r in study.records if (r.table, r.row) == (plan.name, name)]
        seconds = {record.seed: record.seconds for record in records}
        cells = [[r.accuracy for r in records if r.scale == scale] for scale in scales]
        means = [f"{100 * sum(found) / len(found):.2f}" if found else "" for found in cells]
        taken = f"{sum(seconds.values()) / len(seconds):.1f}" if seconds else ""
        table.add_row(escape(name), str(len(seconds)), *means, taken)
    return table


def _some(scales: Sequence[float]) -> list[float]:
    """At most `SHOWN` of the scales, the first and the last among them, evenly spread."""
    last, count = len(scales) - 1, min(SHOWN, len(scales))
    return [scales[round(i * last / max(1, count - 1))] for i in range(count)]
