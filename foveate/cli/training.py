"""The command that trains a network: train."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foveate.cli import options
from foveate.cli.console import OUTPUT, interruptible, print_error, print_message
from foveate.cli.display import Display
from foveate.errors import ConfigError

if TYPE_CHECKING:
    from foveate.training.checkpoint import RunFolder
    from foveate.training.config import TrainConfig
    from foveate.training.data import Load
    from foveate.training.distributed import Team


def train(
    model: Annotated[str, options.NETWORK],
    source: Annotated[str | None, options.SOURCE("mnist")] = None,
    scales: Annotated[str | None, options.SCALES("2, or as in the preset")] = None,
    samples: Annotated[int | None, options.SAMPLES("all images, or as in the preset")] = None,
    recipe: Annotated[
        str | None,
        options.RECIPE("photo for photographs, mirrored for cifar10, else mnist-large-scale"),
    ] = None,
    stream: Annotated[bool, options.STREAM()] = False,
    workers: Annotated[
        int | None, options.WORKERS("one process per CPU core, at most 8", min=0, max=99)
    ] = None,
    bad: options.BadOption = "stop",
    changed_data: options.ChangedDataOption = False,
    backbone: Annotated[str | None, options.BACKBONE("as in the preset")] = None,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    windows: Annotated[
        str | None,
        options.WINDOWS("as in the preset; for a backbone on photographs, from the image sizes"),
    ] = None,
    epochs: Annotated[int | None, options.EPOCHS("20 epochs, or as in the preset")] = None,
    batch: Annotated[int | None, options.BATCH("32 images, or 16 for fovavg and fovmax")] = None,
    seed: Annotated[int | None, options.SEED("0", min=0)] = None,
    precision: Annotated[
        str | None, options.PRECISION("float32; on a GPU as in the preset")
    ] = None,
    freeze_norms: Annotated[bool, options.FREEZE_NORMS()] = False,
    change: Annotated[list[str] | None, options.SETTING()] = None,
    out: Annotated[
        Path | None, options.OUT_FOLDER("runs/NETWORK-DIGEST, per configuration")
    ] = None,
    device: options.DeviceOption = "auto",
    recompute: Annotated[int, options.RECOMPUTE()] = 0,
    norms: Annotated[str, options.NORMS()] = "shared",
    no_deterministic: Annotated[bool, options.DETERMINISTIC()] = False,
) -> None:
    """Train a network, or resume an interrupted run.

    ```
    foveate train fovavg --source mnist-5k --epochs 3 --out runs/first
    foveate train finetune --source folder:photos --pretrained --out runs/photos
    torchrun --nproc-per-node=2 -m foveate train fovmax --out runs/two
    ```

    To resume after an interruption, run the same command again. A finished run is not trained
    again. Training is deterministic, on a GPU too, unless --no-deterministic is given. The
    random seed determines the initial weights, the order of the images and dropout.
    """
    from foveate.training.distributed import LostProcessError, join_processes

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
        "freeze_norms": True if freeze_norms else None,
        "recipe": recipe,
        "windows": windows,
    }
    given = {key: str(value) for key, value in changes.items() if value is not None}
    how = {"device": device, "stream": stream, "recompute": recompute, "bad": bad}
    how |= {"changed_data": changed_data, "workers": workers}
    how |= {"deterministic": not no_deterministic}
    with join_processes(device, norms) as team:
        try:
            _train(model, given | parse_settings(change or []), out, how, team)
        except typer.Exit:
            raise
        except LostProcessError as error:
            # Printed here: when this process leaves the team, torchrun terminates it before
            # `run` can print the message.
            if team.may_print():
                print_error(str(error))
            raise typer.Exit(2) from None
        except Exception:
            if not team.may_print():  # another process printed the message
                raise typer.Exit(2) from None
            raise


def _train(
    model: str,
    given: dict[str, str],
    out: Path | None,
    how: dict[str, Any],
    team: "Team",
) -> None:
    from foveate.training.checkpoint import RunFolder
    from foveate.training.data import is_photo
    from foveate.training.loop import train as run
    from foveate.training.photos import describe_photos
    from foveate.training.skipped import TABLE, check_bad, read_skipped
    from foveate.training.state import keep_freed_memory

    keep_freed_memory()
    load = cached_loader()
    given = {"precision": _precision(model, out, how["device"]), **given}
    config = team.in_turn(lambda: _configure(model, given, load, how["stream"]))
    check_bad(how["bad"], config, team.count)
    path = out or Path("runs") / f"{model}-{config.digest()}"
    folder = RunFolder(path)
    state = "was already finished" if folder.finished else "is finished"
    device = "cpu" if folder.finished else team.device(how["device"])
    if team.is_main and not folder.finished:
        if is_photo(config):
            print_message(describe_photos(config))
            start = config.pretrained or config.weights
            if not start and (config.backbone or "").startswith(("timm:", "torchvision:")):
                print_message(
                    f"note: {config.backbone} starts from random weights; add --pretrained, or "
                    "--weights FILE"
                )
        elif config.recipe is None and config.source.startswith("folder:"):
            print_message(
                f"{config.source}: grey images; recipe mnist-large-scale, which stretches their "
                "contrast; use --recipe photo for photographs"
            )
    shown = Display(f"training {model} in {path}") if team.is_main else nullcontext(_show_nothing)
    with interruptible(lambda: _saved(folder) if team.may_print() else ""), shown as callback:
        run(config, path, load=load, callback=callback, team=team, **{**how, "device": device})
    if team.is_main:
        OUTPUT.print(f"{path} {state}: {_score(folder)}")
        warn_of_skipped(len(read_skipped(path)), path / TABLE)


def _show_nothing(config: object, progress: object, steps: int) -> None:
    """Replace `Display` in all processes but the first."""


def warn_of_skipped(count: int, table: Path) -> None:
    """Print a warning if images were skipped."""
    if count:
        images = "1 image" if count == 1 else f"{count} images"
        print_message(f"warning: skipped {images} that cannot be read; see {table}")


def parse_settings(texts: Sequence[str]) -> dict[str, str]:
    """Parse the values of --set, KEY=VALUE each."""
    return parse_pairs(texts, "--set must be KEY=VALUE, such as model.dropout=0")


def parse_pairs(texts: Sequence[str], rule: str) -> dict[str, str]:
    """Parse texts of the form NAME=VALUE; raise a ConfigError with the `rule` otherwise."""
    for text in texts:
        if not text.partition("=")[1]:
            raise ConfigError(f"{rule}, got {text!r}")
    return dict(text.split("=", 1) for text in texts)


def _precision(model: str, out: Path | None, device: str) -> str:
    """Return the precision of a run for which none was given.

    A run that has started keeps its precision. A CPU without bf16 instructions took 8 times as long
    for a step of EfficientNet-Lite0 in bf16, so new runs on a CPU use float32.
    """
    import torch

    from foveate.training.checkpoint import CONFIG, RunFolder
    from foveate.training.presets import preset

    if out and (out / CONFIG).is_file():
        return RunFolder(out).config().precision
    on_gpu = torch.cuda.is_available() if device == "auto" else device.startswith("cuda")
    return preset(model).precision if on_gpu else "float32"


def _configure(model: str, given: dict[str, str], load: "Load", stream: bool) -> "TrainConfig":
    """Return the configuration of a preset or network with the given changes, fitted to the source.

    The source determines, for example, the number of classes and of image channels.
    """
    from foveate.scales import parse_windows
    from foveate.training.data import adapt_to_source, unused_setting
    from foveate.training.presets import preset

    windows = given.pop("windows", None)
    if windows is not None and "model.scales" in given:
        raise ConfigError("set --windows or model.scales, not both")
    config = preset(model).changed(given)
    if windows is not None:
        scales = parse_windows(windows, config.model.size)
        config = replace(config, model=replace(config.model, scales=scales))
        given["model.scales"] = windows
    config = adapt_to_source(config, load, given, stream)
    if unused := unused_setting(config, given):
        raise ConfigError(unused[1])
    return config


def cached_loader() -> "Load":
    """Return a cached function that loads a source and reports downloads."""
    from foveate.data.sources import load_source

    return lru_cache(maxsize=None)(lambda name: load_source(name, report=print_message))


def _score(folder: "RunFolder") -> str:
    found = folder.validation()
    accuracy = "" if found is None else f"validation {100 * found:.2f} %; "
    return f"{accuracy}next: foveate evaluate {quote(str(folder.path))}"


def _saved(folder: "RunFolder") -> str:
    """Return the message for an interrupted run: the state that its checkpoint holds."""
    found = folder.load()
    if found is None:
        return f"{folder.path} has no checkpoint yet; run the same command to start again"
    return f"saved in {folder.path} at {found[0].position}; run the same command to resume"
