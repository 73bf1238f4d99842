"""The command for a first look: quickstart."""

from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

from foveate.cli import options
from foveate.cli.console import OUTPUT, progress
from foveate.cli.display import epoch_line

if TYPE_CHECKING:
    from foveate.evaluation.results import RunResult
    from foveate.training.checkpoint import Progress
    from foveate.training.config import TrainConfig


def quickstart(
    out: Annotated[Path, options.OUT_FOLDER()] = Path("quickstart"),
    seed: Annotated[int, options.SEED(min=0)] = 0,
) -> None:
    """Train three networks on digits of one size and test them at 17 scales, in minutes.

    ```
    foveate quickstart
    foveate quickstart --out second --seed 1
    ```

    Trains a CNN, FovAvg and FovMax on 3,500 digits that come with the package; nothing is
    downloaded. Prints the accuracy over scale, and writes report.html, accuracy.png, accuracy.svg,
    accuracy.csv, results.json and the run folders, which 'foveate demo' can open. If interrupted,
    the same command resumes.
    """
    from foveate.native.build import library

    Thread(target=library).start()  # compiles the C code on first use, while torch is imported
    from foveate.paper import quickstart as work
    from foveate.training.state import keep_freed_memory

    keep_freed_memory()  # a third of the system time of the tests
    runs = work.quick_runs(seed)
    with progress("training", sum(config.epochs for config in runs.values())) as advance:

        def show(name: str, config: "TrainConfig", at: "Progress") -> None:
            OUTPUT.print(f"{out / name}  {epoch_line(config, at)}")
            advance(1)

        work.train_runs(runs, out, show)
    with progress("testing", work.count_images(runs)) as advance:
        results = work.evaluate_runs(runs, out, advance=advance)
    _report(results, out)


def _report(results: "list[RunResult]", out: Path) -> None:
    from foveate.cli.evaluation import print_accuracy
    from foveate.evaluation.results import summarise
    from foveate.paper.quickstart import full_size_curves
    from foveate.report.plots import save_figure
    from foveate.report.quickstart import quick_figure, quick_page, quick_summary

    full = full_size_curves()
    written = [quick_page(results, full, out).save(out / "report.html")]
    written += save_figure(quick_figure(results, full), out, "accuracy")
    reference = [replace(curve, label=f"full size: {curve.label}", spread=()) for curve in full]
    print_accuracy([*summarise(results), *reference])
    written += [out / "accuracy.csv", out / "results.json"]
    OUTPUT.print(quick_summary(results), *written, sep="\n")
