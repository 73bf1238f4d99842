"""The commands that train and test many runs: sweep and reproduce; compare uses their functions."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from foveate.cli import options
from foveate.cli.console import ERRORS, OUTPUT, interruptible, print_message, print_table
from foveate.cli.training import cached_loader, warn_of_skipped
from foveate.files import check_folder

if TYPE_CHECKING:
    from foveate.sweeps.jobs import Job
    from foveate.sweeps.runner import Failure, JobResult, Study
    from foveate.training.checkpoint import Progress
    from foveate.training.config import Precision, TrainConfig

SHOWN = 5  # scales in the printed table; results.csv has all
Labels = Mapping[tuple[str, str], str]


def sweep(
    study: Annotated[Path, options.STUDY],
    bad: options.BadOption = "stop",
    trust: options.TrustOption = False,
    out: Annotated[Path | None, options.OUT_FOLDER("runs/NAME, the name of the study")] = None,
    device: options.DeviceOption = "auto",
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    dry_run: options.DryRunOption = False,
) -> None:
    """Train and test the runs of a study: a list of runs, a grid of settings, or both.

    ```
    foveate sweep study.toml --dry-run
    foveate sweep study.toml --engine ray --out runs/pooling
    ```

    The smallest study contains name = "first" and, below [grid], preset = ["fovavg", "cnn"] and
    samples = [500, 2000]; examples/study.toml explains every key. The whole file is checked before
    the first run starts, and an error names its key. With --device auto the resources in the study
    decide between CPU and GPU. If interrupted, the same command resumes; finished runs are not
    repeated.
    """
    from foveate.sweeps.study import read_study
    from foveate.training.loop import find_device

    load = cached_loader()
    plan = read_study(study, load, trust=trust, dry_run=dry_run)
    runs = open_study(plan.jobs, out or Path("runs") / plan.name, bad)
    if device == "auto" and plan.gpus is not None:
        device = "cuda" if plan.gpus else "cpu"
    else:
        device = str(find_device(device))
    run_study(
        runs,
        {row: row[1] for job in plan.jobs for row in job.rows},
        dry_run=dry_run,
        name=engine, device=device, address=address, cpus=plan.cpus, gpus=plan.gpus or 0.0,
        load=load, bad=bad,
    )  # fmt: skip


def reproduce(
    tables: Annotated[list[str] | None, options.TABLE] = None,
    rows: Annotated[list[str] | None, options.ROWS_OPTION("all rows")] = None,
    seeds: Annotated[int, options.SEEDS()] = 3,
    precision: Annotated[str, options.PRECISION("auto: bf16 on a GPU, float32 on a CPU")] = "auto",
    out: Annotated[Path, options.OUT_FOLDER()] = Path("paper"),
    device: options.DeviceOption = "auto",
    together: Annotated[int, options.TOGETHER()] = 0,
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
    study = open_study(paper_jobs(chosen, seeds, choose_precision(precision, place)), out)
    labels = {(row.table, row.name): f"{row.table[-1]}  {row.label}" for row in chosen}
    run_study(
        study, labels, dry_run=dry_run,
        name=engine, device=place, together=together, address=address,
    )  # fmt: skip


def choose_precision(precision: str, device: str) -> "Precision":
    """Return the precision of comparable runs on a device, unless one is given."""
    usual = "bf16" if device.startswith("cuda") else "float32"
    return cast("Precision", usual if precision == "auto" else precision)


def open_study(jobs: "Sequence[Job]", folder: Path, bad: str = "stop") -> "Study":
    """Return the study of these jobs, after checking its folder and the option --bad."""
    from foveate.sweeps.runner import Study
    from foveate.training.data import is_photo
    from foveate.training.skipped import check_bad

    check_bad(bad, max((job.config for job in jobs), key=is_photo))  # skip needs photographs
    check_folder(folder)
    return Study(jobs, folder)


def run_study(study: "Study", labels: Labels, *, dry_run: bool, **engine: Any) -> None:
    """Perform the remaining runs of a study unless `dry_run`, and print a table with `labels`."""
    from foveate.sweeps.runner import make_engine
    from foveate.training.state import keep_freed_memory

    live = _Live(study)
    workers = make_engine(callback=live.watch, **engine)
    workers.check()
    total, left = len(study.jobs), len(study.remaining)
    OUTPUT.print(f"{total} runs: {total - left} finished, {left} remaining")
    if dry_run:
        _print_runs(study, labels)
        return
    keep_freed_memory()
    again = "run the same command to resume"
    with (
        live.status if ERRORS.is_terminal else nullcontext(),
        interruptible(lambda: f"{len(study.remaining)} runs remain; {again}"),
    ):
        failures = live.follow(study.run(workers))
    _print_runs(study, labels)
    if study.records:
        OUTPUT.print(study.folder / "results.csv")
    if failures:
        names = ", ".join(f"{job.name} seed {job.config.seed}" for job, _ in failures)
        print_message(f"{len(failures)} runs failed: {names}; run the same command to retry them")
        raise typer.Exit(1)


class _Live:
    """Prints a line for each run that ends and, on a terminal, the progress of the current run."""

    def __init__(self, study: "Study") -> None:
        self.remaining = len(study.remaining)
        self.names = {job.config.digest(): job.folder for job in study.jobs}
        self.status, self.folder = ERRORS.status("training"), study.folder

    def watch(self, config: "TrainConfig", progress: "Progress", steps: int) -> None:
        if ERRORS.is_terminal and progress.step % 20 == 0:  # a step on a GPU takes a millisecond
            epoch = f"epoch {min(progress.epoch + 1, config.epochs)} of {config.epochs}"
            self.status.update(
                f"{self.remaining} runs remaining; {self.names[config.digest()]}, {epoch}"
            )

    def follow(self, ended: "Iterator[JobResult]") -> "list[Failure]":
        """Report every run as it ends, and return the failed ones."""
        from foveate.sweeps.runner import Failure
        from foveate.training.skipped import TABLE, read_skipped

        failures = []
        for one in ended:
            self.remaining -= 1
            name = f"{one.job.name} seed {one.job.config.seed}"
            if isinstance(one, Failure):
                failures.append(one)
                print_message(f"{name} failed: {one.reason}")
            else:
                at = one.outcome.scales
                mean = 100 * sum(found.accuracy for found in at) / len(at)
                taken = f"{one.outcome.seconds:.1f} s"
                OUTPUT.print(f"{name}: mean accuracy {mean:.2f} % over all scales, {taken}")
                run = self.folder / one.job.folder
                warn_of_skipped(len(read_skipped(run)), run / TABLE)
        return failures


def _print_runs(study: "Study", labels: Labels) -> None:
    """Print a table: finished seeds, mean accuracy in percent at some scales, time per run."""
    tested = sorted({scale for job in study.jobs for scale in job.scales})
    last, count = len(tested) - 1, min(SHOWN, len(tested))
    scales = [tested[round(i * last / max(1, count - 1))] for i in range(count)]
    rows = []
    for row, label in labels.items():
        records = [r for r in study.records if (r.table, r.row) == row]
        seconds = {record.seed: record.seconds for record in records}
        cells = [[r.accuracy for r in records if r.scale == scale] for scale in scales]
        means = [f"{100 * sum(found) / len(found):.2f}" if found else "" for found in cells]
        taken = f"{sum(seconds.values()) / len(seconds):.1f}" if seconds else ""
        rows.append([label, str(len(seconds)), *means, taken])
    headers = ["run", "seeds", *(f"{scale:.3g}" for scale in scales), "s per run"]
    print_table(headers, rows, left=["run"])
