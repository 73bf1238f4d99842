"""The commands about networks: train and evaluate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from foveate.cli.console import (
    OUTPUT,
    TrustOption,
    complain,
    interruptible,
    progress,
    tell,
)
from foveate.scales import SCALES_HELP, as_scales

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.data.splits import SplitName
    from foveate.evaluation.results import Curve
    from foveate.training.checkpoint import RunFolder
    from foveate.training.config import TrainConfig
    from foveate.training.data import Load
    from foveate.training.distributed import Team
    from foveate.training.session import Watch

DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, or auto: a GPU if there is one.")]
ChangedDataOption = Annotated[
    bool,
    typer.Option(
        "--changed-data", help="Use the run's source though it changed since the run started."
    ),
]
BadOption = Annotated[
    str,
    typer.Option(help="At a photograph that cannot be used: stop, or skip it and report it."),
]
PICTURES = ("png", "svg")


def train(
    model: Annotated[
        str, typer.Argument(help="cnn, fovmax, fovavg, fovconc or swmax, or a preset: fovavg-tr2.")
    ],
    source: Annotated[
        str | None,
        typer.Option(help="mnist (default), mnist-5k (embedded), folder:, shards:, file.h5 ..."),
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help=f"Training scales; 2 by default. {SCALES_HELP}")
    ] = None,
    samples: Annotated[int | None, typer.Option(help="Use only the first images.")] = None,
    epochs: Annotated[int | None, typer.Option(help="20 in the paper.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images in a step; 32, fovavg 16.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and dropout.")] = None,
    precision: Annotated[str | None, typer.Option(help="float32 or bf16.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(help="timm:NAME, torchvision:NAME or package.module:factory, in channels."),
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from the weights the library offers.")
    ] = False,
    weights: Annotated[
        str | None, typer.Option(help="Start from weights of the backbone: file.safetensors.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(
            help="Windows of the channels in pixels, two per octave, as 56-448; for a backbone on "
            "photographs by the pictures if not given."
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="photo (default for colour pictures) or mnist-large-scale."),
    ] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting, as model.dropout=0."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; runs/MODEL-... if not given.")
    ] = None,
    device: DeviceOption = "auto",
    stream: Annotated[
        bool,
        typer.Option(
            "--stream", help="Read a file.h5 or folder:DIR batch by batch; it need not fit."
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0, max=99, help="Processes that read photographs; by the cores if not given."
        ),
    ] = None,
    bad: BadOption = "stop",
    recompute: Annotated[
        int, typer.Option(help="Scale channels trained at a time, to save memory; 0 for all.")
    ] = 0,
    norms: Annotated[
        str, typer.Option(help="Batch norm over all processes of torchrun: shared, or local.")
    ] = "shared",
    changed_data: Annotated[
        bool,
        typer.Option("--changed-data", help="Go on though the data changed since the run started."),
    ] = False,
    deterministic: Annotated[
        bool, typer.Option(help="On a GPU, repeat to the bit; switched off, some backbones gain.")
    ] = True,
) -> None:
    """Train a network, or go on with a run that was interrupted.

    Example: foveate train fovavg --source mnist-5k --epochs 3 --out runs/first

    The same command continues where it stopped, whatever stopped it. What is finished is not done
    again. Without --out, each set of options has a folder of its own. On several GPUs or CPUs:
    torchrun --nproc-per-node=2 -m foveate train ...
    """
    from foveate.training.distributed import LostProcessError, joined

    changes = {
        "source": source,
        "scales": scales,
        "samples": samples,
        "epochs": epochs,
        "batch": batch,
        "seed": seed,
        "precision": precision,
        "backbone": backbone,
        "pretrained": True if pretrained else None,
        "weights": weights,
        "recipe": recipe,
        "windows": windows,
    }
    given = {key: str(value) for key, value in changes.items() if value is not None}
    options = {"device": device, "stream": stream, "recompute": recompute}
    options |= {"changed_data": changed_data, "deterministic": deterministic, "workers": workers}
    options |= {"bad": bad}
    with joined(device, norms) as team:
        try:
            _train(model, given | _settings(change or []), out, options, team)
        except typer.Exit:
            raise
        except LostProcessError as error:
            # Said here: when the team is left, torchrun's request to end comes before the words.
            if team.may_say():
                complain(str(error))
            raise typer.Exit(2) from None
        except Exception:
            if not team.may_say():  # another process did
                raise typer.Exit(2) from None
            raise


def _train(
    model: str,
    given: dict[str, str],
    out: Path | None,
    options: dict[str, Any],
    team: "Team",
) -> None:
    from foveate.training.checkpoint import RunFolder
    from foveate.training.data import is_photo
    from foveate.training.loop import train as run
    from foveate.training.photos import describe_photos
    from foveate.training.skipped import TABLE, check_bad, read_skipped

    load = _loader()
    config = team.in_turn(lambda: _configure(model, given, load, options["stream"]))
    check_bad(options["bad"], config, team.count)
    path = out or Path("runs") / f"{model}-{config.digest()}"
    folder = RunFolder(path)
    words = "is finished already" if folder.finished else "is finished"
    device = "cpu" if folder.finished else team.device(options["device"])
    if is_photo(config) and team.leads and not folder.finished:
        tell(describe_photos(config))
    with (
        interruptible(lambda: _kept(folder) if team.may_say() else ""),
        _shown(f"training {model} in {path}", team) as watch,
    ):
        run(config, path, load=load, watch=watch, team=team, **{**options, "device": device})
    if team.leads:
        OUTPUT.print(f"{path} {words}: {_score(folder)}", markup=False)
        _warn_of_skipped(len(read_skipped(path)), path / TABLE)


@contextmanager
def _shown(greeting: str, team: "Team") -> "Iterator[Watch]":
    """Show the run while the block runs; only one of several processes does."""
    from foveate.cli.display import Display

    if not team.leads:
        yield lambda config, progress, steps: None
        return
    with Display(greeting) as display:
        yield display


def evaluate(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; the run's own if there is one.")
    ] = None,
    split: Annotated[str, typer.Option(help="test or val.")] = "test",
    scales: Annotated[str, typer.Option(help=f"Test scales. {SCALES_HELP}")] = "all",
    source: Annotated[
        str | None, typer.Option(help="Other images than the ones the run was trained on.")
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(help="Other windows than in training, in pixels, two per octave, as 56-448."),
    ] = None,
    pool: Annotated[
        str | None, typer.Option(help="Another pool than in training: max, avg or logsumexp.")
    ] = None,
    device: DeviceOption = "auto",
    bad: BadOption = "stop",
    changed_data: ChangedDataOption = False,
    trust: TrustOption = False,
) -> None:
    """Measure the accuracy of finished runs over scale.

    Example: foveate evaluate runs/first --scales 0.5,1,2,4,8

    Writes accuracy.csv (a line per run and scale), results.json (also per class, the confusion
    matrix and the winning scales) and accuracy.png and .svg. Runs that differ in their seed alone
    give a mean and its spread.
    """
    from foveate.errors import ConfigError
    from foveate.evaluation.results import RunResult, save_results, summarise
    from foveate.evaluation.test_sets import open_test_set, with_channels
    from foveate.files import check_folder
    from foveate.report.plots import accuracy_curves, save
    from foveate.training.checkpoint import RunFolder, hardware
    from foveate.training.loop import find_device

    if split not in ("val", "test"):
        raise ConfigError(f"split must be val or test, got {split!r}")
    if out is None and len(runs) > 1:
        raise ConfigError(f"{len(runs)} runs: say with --out where their results go")
    target, place, factors, load = out or runs[0], find_device(device), as_scales(scales), _loader()
    check_folder(target)
    folders = [RunFolder(path) for path in dict.fromkeys(runs)]
    made = [with_channels(f.net(trust), f.config(), windows, pool) for f in folders]
    shown: dict[str, Any] = {"split": cast("SplitName", split), "source": source, "bad": bad}
    tests = [open_test_set(folder, load, changed_data=changed_data, **shown) for folder in folders]
    with progress("images", len(factors) * sum(map(len, tests))) as advance:
        results = [
            RunResult(
                run=str(folder.path),
                config=config,
                scales=test.measure(net.to(place), factors, advance),
                made_with=folder.about(),
            )
            for folder, (net, config), test in zip(folders, made, tests, strict=True)
        ]
    checksums = {test.name: test.checksum for test in tests}
    about: dict[str, Any] = {
        "split": split,
        "sources": [{"name": n, "checksum": c} for n, c in sorted(checksums.items())],
        "hardware": hardware(place),
    }
    skipped = {name: reason for test in tests for (_, name), reason in test.skipped.items()}
    if skipped:
        about["skipped"] = dict(sorted(skipped.items()))
    curves = summarise(results)
    written = save_results(results, target, about)
    pictures = [save(accuracy_curves(curves), target / f"accuracy.{kind}") for kind in PICTURES]
    OUTPUT.print(_table(curves))
    for path in (*written, *pictures):
        OUTPUT.print(path, markup=False)
    _warn_of_skipped(len(skipped), written[1])


def _warn_of_skipped(count: int, table: Path) -> None:
    if count:
        tell(f"warning: {count} pictures could not be used and were left out; {table} names them")


def _settings(texts: Sequence[str]) -> dict[str, str]:
    from foveate.errors import ConfigError

    for text in texts:
        if not text.partition("=")[1]:
            raise ConfigError(f"--set takes KEY=VALUE, as model.dropout=0, got {text!r}")
    return dict(text.split("=", 1) for text in texts)


def _configure(model: str, given: dict[str, str], load: "Load", stream: bool) -> "TrainConfig":
    """The preset or model, with what the user gave, made to fit the source."""
    from foveate.errors import ConfigError
    from foveate.scales import parse_windows
    from foveate.training.data import fitted, is_made, is_photo
    from foveate.training.presets import preset

    windows = given.pop("windows", None)
    if windows is not None and "model.scales" in given:
        raise ConfigError("set --windows or model.scales, not both")
    config = preset(model).changed(given)
    if windows is not None:
        scales = parse_windows(windows, config.model.size)
        config = replace(config, model=replace(config.model, scales=scales))
        given["model.scales"] = windows
    for key in ("scales", "size", "border"):
        if key in given and is_made(config.source):
            raise ConfigError(f"the images in {config.source} are made already: leave out {key}")
    config = fitted(config, load, given, stream)
    for key in ("scales", "size", "border"):
        if key in given and is_photo(config):
            raise ConfigError(f"the recipe photo has no {key}: set recipe.base, its short side")
    return config


def _loader() -> "Load":
    """Load a source once, telling of downloads."""
    from functools import lru_cache

    from foveate.data.sources import load_source

    return lru_cache(maxsize=None)(lambda name: load_source(name, report=tell))


def _score(folder: "RunFolder") -> str:
    found = folder.validation()
    words = "" if found is None else f"validation {100 * found:.2f} %; "
    return f"{words}next: foveate evaluate {folder.path}"


def _kept(folder: "RunFolder") -> str:
    found = folder.load()
    if found is None:
        return f"nothing was done yet in {folder.path}; run the same command to go on"
    return f"saved in {folder.path} at {found[0].reached}; run the same command to go on"


def _table(curves: "list[Curve]") -> "Table":
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scale", justify="right")
    for curve in curves:
        label = curve.label if curve.runs == 1 else f"{curve.label} ({curve.runs} runs)"
        table.add_column(escape(label), justify="right")
    for row, scale in enumerate(curves[0].scales):
        table.add_row(f"{scale:.3f}", *(_cell(curve, row) for curve in curves))
    return table


def _cell(curve: "Curve", row: int) -> str:
    spread = f" ± {100 * curve.spread[row]:.2f}" if curve.spread else ""
    return f"{100 * curve.mean[row]:.2f}{spread}"
