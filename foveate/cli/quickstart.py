"""The command for the first five minutes: quickstart."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress

if TYPE_CHECKING:
    from foveate.evaluation.results import RunResult
    from foveate.training.session import Watch


def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for the runs and the results.")] = Path(
        "quickstart"
    ),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, order and dropout.")] = 0,
) -> None:
    """Train three networks on digits of one size and test them on 17, in a few minutes.

    Example: foveate quickstart --out quickstart

    A CNN, FovAvg and FovMax learn 3,500 digits that come with the package; no network is needed.
    Prints accuracy over scale, and writes report.html, accuracy.png, .svg and .csv, results.json
    and the runs, for 'foveate demo'. What is finished is not done again.
    """
    from foveate.paper import quickstart as work

    runs = work.quick_runs(seed)
    work.train_runs(runs, out, lambda name: _shown(name, out / name))
    with progress("testing", work.images_to_score(runs)) as advance:
        results = work.score_runs(runs, out, advance=advance)
    _report(results, out)


@contextmanager
def _shown(name: str, path: Path) -> "Iterator[Watch]":
    from foveate.cli.display import Display

    display = Display(f"training {name} in {path}")
    with display:
        yield display
    OUTPUT.print(f"{path} is trained", markup=False)


def _report(results: "list[RunResult]", out: Path) -> None:
    from foveate.cli.training import PICTURES, _table
    from foveate.evaluation.results import summarise
    from foveate.paper.quickstart import full_size
    from foveate.report.plots import save
    from foveate.report.quickstart import quick_figure, quick_lead, quick_page

    full = full_size()
    figure = quick_figure(results, full)
    written = [quick_page(results, full, out).save(out / "report.html")]
    written += [save(figure, out / f"accuracy.{kind}") for kind in PICTURES]
    beside = [replace(curve, label=f"full size: {curve.label}", spread=()) for curve in full]
    OUTPUT.print(_table([*summarise(results), *beside]))
    OUTPUT.print(quick_lead(results), markup=False)
    for path in (*written, out / "accuracy.csv", out / "results.json"):
        OUTPUT.print(path, markup=False)
