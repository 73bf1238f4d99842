"""The command that measures the accuracy of runs: evaluate."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from foveate.cli import options
from foveate.cli.audit import parse_border
from foveate.cli.console import OUTPUT, print_table, progress
from foveate.cli.training import cached_loader, warn_of_skipped
from foveate.errors import ConfigError
from foveate.files import check_folder
from foveate.scales import as_scales

if TYPE_CHECKING:
    from torch import nn

    from foveate.data.splits import SplitName
    from foveate.evaluation.results import Curve, RunResult
    from foveate.evaluation.test_sets import TestSet
    from foveate.training.checkpoint import RunFolder

WITH_INTERVALS = 3  # curves whose intervals fit into a line of 80 characters


def evaluate(
    runs: Annotated[list[Path], options.RUNS],
    source: Annotated[str | None, options.SOURCE("the source of the run")] = None,
    split: Annotated[str, options.SPLIT()] = "test",
    scales: Annotated[str | None, options.SCALES(options.VIEWED_SCALES)] = None,
    view: Annotated[str, options.VIEW()] = "zoom",
    border: Annotated[str | None, options.BORDER("as in training")] = None,
    bad: options.BadOption = "stop",
    changed_data: options.ChangedDataOption = False,
    windows: Annotated[str | None, options.WINDOWS("as in training")] = None,
    pool: Annotated[str | None, options.POOL("as in training")] = None,
    lazy: Annotated[str | None, options.LAZY("all channels")] = None,
    trust: options.TrustOption = False,
    out: Annotated[
        Path | None, options.OUT_FOLDER("the folder of the run, if there is one run")
    ] = None,
    device: options.DeviceOption = "auto",
) -> None:
    """Measure the accuracy of finished runs and pretrained networks over scale.

    ```
    foveate evaluate runs/first --scales 0.5,1,2,4,8
    foveate evaluate runs/fovmax fovplus-tr2 --out runs/compared
    foveate evaluate runs/photos --scales 0.25:2:2 --pool logsumexp --trust
    ```

    Writes accuracy.csv (one line per run and scale), results.json (also the accuracy per class, the
    confusion matrix and the winning scale channels), accuracy.png and accuracy.svg. The table shows
    95 % Wilson intervals for up to three runs, and mean and standard deviation for runs that differ
    only in their seed.

    With --lazy, the winning channels are not recorded. --lazy auto chooses the tolerance from the
    validation images at the same scales, so that the class of at most 0.02 % of them differs from
    that of all channels. It prints the tolerance and the mean number of channels evaluated.
    """
    from foveate.evaluation.results import RunResult
    from foveate.evaluation.runs import PretrainedRun, open_run
    from foveate.evaluation.test_sets import open_test_set, with_channels
    from foveate.provenance import hardware
    from foveate.training.loop import find_device
    from foveate.training.state import keep_freed_memory

    if split not in ("val", "test"):
        raise ConfigError(f"split must be val or test, got {split!r}")
    folders = [open_run(path) for path in {path.resolve(): path for path in runs}.values()]
    count = len(folders)
    if out is None and (count > 1 or isinstance(folders[0], PretrainedRun)):
        what = f"{count} runs" if count > 1 else f"{runs[0]}, which has no folder"
        raise ConfigError(f"--out is required to evaluate {what}; name a folder for the results")
    target, place = out or runs[0], find_device(device)
    factors = _default_scales(folders, view) if scales is None else as_scales(scales)
    tolerance = _tolerance(lazy)
    keep_freed_memory()
    load = cached_loader()
    check_folder(target)
    made = [with_channels(f.net(trust), f.config(), windows, pool) for f in folders]
    shown: dict[str, Any] = {"source": source, "bad": bad, "changed_data": changed_data}
    shown |= {"view": view, "border": parse_border(border)}
    part = cast("SplitName", split)
    tests = [open_test_set(folder, load, split=part, **shown) for folder in folders]
    for test in tests:
        test.check_scales(factors)  # before hours at the first scales or of the first run
    tolerances = [
        _make_lazy(net.to(place), tolerance, factors, partial(open_test_set, folder, load, **shown))
        for folder, (net, _) in zip(folders, made, strict=True)
    ]
    with progress("images", len(factors) * sum(map(len, tests))) as advance:
        results = [
            RunResult(
                run=str(folder.path),
                config=config,
                scales=test.measure(net.to(place), factors, advance),
                made_with=folder.provenance(),
            )
            for folder, (net, config), test in zip(folders, made, tests, strict=True)
        ]
    checksums = {test.name: test.checksum for test in tests}
    about: dict[str, Any] = {
        "split": split,
        "view": view,
        "border": border,
        "windows": windows,
        "pool": pool,
        "sources": [{"name": n, "checksum": c} for n, c in sorted(checksums.items())],
        "hardware": hardware(place),
    }
    if tolerance not in (None, math.inf):  # infinity means all channels
        about["lazy"] = tolerances if tolerance == "auto" else tolerance
    skipped = {name: reason for test in tests for (_, name), reason in test.skipped.items()}
    if skipped:
        about["skipped"] = dict(sorted(skipped.items()))
    _write(results, target, about)
    warn_of_skipped(len(skipped), target / "results.json")


def _default_scales(folders: "Sequence[RunFolder]", view: str) -> tuple[float, ...]:
    """Return the default scales of all runs, which one table has in common."""
    from foveate.evaluation.curve import default_scales

    recipes = [folder.config().recipe for folder in folders]
    found = {default_scales(r.name if r else "mnist-large-scale", view) for r in recipes}
    if len(found) > 1:
        raise ConfigError("the runs have different default scales; pass --scales")
    return found.pop().values


def _make_lazy(
    net: "nn.Module",
    lazy: float | str | None,
    scales: tuple[float, ...],
    open_split: "Callable[..., TestSet]",
) -> float | None:
    """Set the tolerance of a network, for "auto" from validation images; return it."""
    from foveate.evaluation.test_sets import lazy_channels

    if lazy is None:
        return None
    channels = lazy_channels(net)
    if isinstance(lazy, float):
        channels.lazy = lazy
        return lazy
    images = open_split(split="val")
    with progress("calibration images", len(scales) * len(images)) as advance:
        found = images.calibrate(channels, scales, advance=advance)
    if math.isfinite(up := found.tolerance):
        up = math.ceil(1000 * up) / 1000  # as printed
    channels.lazy = up
    OUTPUT.print(
        f"tolerance {channels.lazy:.3f}: {found.channels:.1f} of {len(channels.scales)} channels; "
        f"the class differs for {100 * found.disagreement:.2f} % of {len(images):,} validation "
        "images, on average over the scales"
    )
    return channels.lazy


def _tolerance(text: str | None) -> float | str | None:
    try:
        return text if text in (None, "auto") else float(text)
    except ValueError:
        raise ConfigError(f"lazy must be a tolerance in logits or auto, got {text!r}") from None


def _write(results: "list[RunResult]", target: Path, about: dict[str, Any]) -> None:
    from foveate.evaluation.results import save_results, summarise
    from foveate.report.plots import accuracy_curves, save_figure

    curves = summarise(results)
    written = save_results(results, target, about)
    pictures = save_figure(accuracy_curves(curves), target, "accuracy")
    print_accuracy(curves)
    OUTPUT.print(*written, *pictures, sep="\n")


def print_accuracy(curves: "list[Curve]") -> None:
    """Print a table of the accuracy per scale, one column per curve; intervals if they fit."""
    if len(curves) > WITH_INTERVALS:
        curves = [replace(curve, intervals=()) for curve in curves]
    rows = [
        [f"{scale:.3f}", *(_cell(curve, row) for curve in curves)]
        for row, scale in enumerate(curves[0].scales)
    ]
    print_table(["scale", *(curve.title for curve in curves)], rows)


def _cell(curve: "Curve", row: int) -> str:
    spread = f" ± {100 * curve.spread[row]:.2f}" if curve.spread else ""
    if curve.intervals:
        low, high = (100 * end for end in curve.intervals[row])
        spread = f" ({low:.1f}–{high:.1f})"
    return f"{100 * curve.mean[row]:.2f}{spread}"
