"""The commands that use a network: predict, export and demo."""

from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.cells import cell_len, set_cell_size

from foveate.cli import options
from foveate.cli.console import OUTPUT, print_error, print_message, progress, status
from foveate.errors import ConfigError, DataError
from foveate.files import replacing

if TYPE_CHECKING:
    from foveate.evaluation.models import Model
    from foveate.evaluation.predict import Prediction

DEFAULT = "fovmax-mnist-tr2"


def predict(
    images: Annotated[list[Path], options.IMAGES],
    model: Annotated[str, options.MODEL_REF()] = DEFAULT,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    trust: options.TrustOption = False,
    invert: Annotated[bool | None, options.INVERT("detect dark on light")] = None,
    scale: Annotated[float | None, options.SCALE("the image fills the frame")] = None,
    search: Annotated[bool, options.SEARCH()] = False,
    step: Annotated[float | None, options.STEP("the smallest window")] = None,
    lazy: Annotated[float | None, options.LAZY("all channels")] = None,
    picture: Annotated[Path | None, options.PICTURE()] = None,
    json: options.JsonOption = False,
    device: options.DeviceOption = "auto",
) -> None:
    """Predict the class of images, its probability and the scale of the object.

    ```
    foveate predict digit.png
    foveate predict *.jpg --model runs/photos --json
    foveate predict scene.jpg --model runs/photos --search --picture found.png
    ```

    Images can have any size and mode. For digit networks each image is converted to light on dark,
    padded to a square and resized to the input frame; a channel of scale s sees 28 s pixels of that
    frame. Runs on photographs use their own recipe, as in 'foveate evaluate': in colour, with a
    short side of the base size times --scale.

    With --search an image keeps its aspect ratio, and is resized only if it is more than twice as
    large as the largest window. The class, the centre (y, x) and the window are those of the
    strongest response, in pixels of the image. Images that cannot be read are reported, and the
    exit code is then 1.

    With --lazy, no scale is printed, and the probability is that of the evaluated channels.
    """
    from foveate.evaluation.models import load_model
    from foveate.evaluation.predict import check_input
    from foveate.evaluation.predict import predict as classify
    from foveate.evaluation.test_sets import lazy_channels
    from foveate.models.search import no_progress
    from foveate.training.loop import find_device

    _check(images, search, step, picture, lazy)
    place = find_device(device)
    loaded = load_model(model, trust=trust, device=place, pretrained=pretrained, weights=weights)
    check_input(loaded, invert, scale, search)  # before a warning, and once for all images
    untrained_timm = model.startswith("timm:") and not loaded.weights
    if untrained_timm or (model in options.NETWORKS and not loaded.source):
        print_message(
            f"warning: {model} has random weights; choose a trained network "
            "(fovmax-mnist-tr2) or a run folder, or add --pretrained to a timm model"
        )
    if lazy is not None:
        lazy_channels(loaded.net).lazy = lazy
    made: list[tuple[Path, Prediction | DataError]] = []
    how: dict[str, Any] = {"invert": invert, "scale": scale, "search": search, "step": step}
    how["progress"] = progress
    # A search shows its positions, which can be a million per image.
    counted = no_progress if search else progress
    with counted("images", len(images)) as advance:
        for path in images:
            try:
                made.append((path, classify(loaded, path, **how)))
            except DataError as error:
                print_error(str(error))
                made.append((path, error))
            advance(1)
    found = [(path, result) for path, result in made if not isinstance(result, DataError)]
    if picture is not None and found:
        _draw(loaded, *found[0], picture)
    if json:
        about = {"model": loaded.name, "classes": loaded.classes, "scales": loaded.scales}
        entries = [
            {"image": str(path), **({"error": str(p)} if isinstance(p, DataError) else asdict(p))}
            for path, p in made
        ]
        print(dumps({**about, "images": entries}, indent=2, allow_nan=False))
    elif found:
        _print_table(loaded, found, search)
    if len(found) < len(images):
        raise typer.Exit(1)


def _check(
    images: list[Path], search: bool, step: float | None, picture: Path | None, lazy: float | None
) -> None:
    for path in images:
        if (path / "config.json").is_file():
            raise ConfigError(f"{path} is a run, not an image; pass it as --model {path}")
    if step is not None and not search:
        raise ConfigError(f"--step {step:g} requires --search; add it, or leave out --step")
    if lazy is not None and (search or picture is not None):
        given = "--search" if search else "--picture"
        raise ConfigError(f"{given} requires all channels; leave out --lazy {lazy:g} or {given}")
    if picture is None:
        return
    if len(images) > 1:
        raise ConfigError(
            f"--picture requires a single image, got {len(images)}; pass one at a time"
        )
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"--picture must end in .png, got {picture.name!r}")
    if picture.exists() and images[0].exists() and picture.samefile(images[0]):
        raise ConfigError(f"--picture would overwrite the image {picture}; choose another file")


def _draw(model: "Model", path: Path, prediction: "Prediction", out: Path) -> None:
    from foveate.data.pictures import read_picture
    from foveate.evaluation.predict import choose_background
    from foveate.report.boxes import draw_prediction

    drawn = draw_prediction(read_picture(path, choose_background(model)), prediction)
    with replacing(out) as temporary:
        drawn.save(temporary, format="png")


def _print_table(model: "Model", found: "list[tuple[Path, Prediction]]", search: bool) -> None:
    """Print one line per image, with the path last so that it is never truncated."""
    width = max(cell_len(label) for label in ("class", *(one.label for _, one in found)))
    names: tuple[str, ...] = ("y", "x", "window") if search else ("scale", "channel")
    lines = [("class", "confidence", names, "image")]
    for path, p in found:
        cells = ("",) * len(names)
        if search and p.centre is not None:
            cells = tuple(f"{value:.0f}" for value in (*p.centre, p.window))
        elif p.channel is not None:
            cells = (f"{p.scale:.2f}", f"{model.scales[p.channel]:.2f}")
        lines.append((p.label, f"{100 * p.confidence:.1f} %", cells, str(path)))
    for label, confidence, cells, image in lines:
        shown = "  ".join(f"{cell:>{room}}" for cell, room in zip(cells, (5, 7, 6), strict=False))
        OUTPUT.print(f"{set_cell_size(label, width)}  {confidence:>10}  {shown}  {image}")


def export(
    model: options.ModelArgument,
    out: Annotated[Path, options.OUT_FILE()],
    format: Annotated[str | None, options.FORMAT("from the file name")] = None,
    size: Annotated[
        int | None, options.SIZE("as trained; for photographs, any height and width", min=1)
    ] = None,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Export a network to ONNX (.onnx) or torch.export (.pt2), for any batch size.

    ```
    foveate export fovmax-mnist-tr2 --out fovmax.onnx
    foveate export runs/photos --out photos.pt2
    ```

    The exported model maps images to logits and, for a network with scale channels, to the logits
    of each channel. The file is loaded again and compared with the network on random batches of one
    and three images. The metadata entry foveate.json lists the classes and, for a run on
    photographs, the base size, mean and standard deviation of its recipe. ONNX requires
    foveate[onnx].
    """
    from foveate.data.large_scale import check_size
    from foveate.evaluation.models import load_model
    from foveate.models.export import Format
    from foveate.models.export import export as write

    found = load_model(model, trust=trust, pretrained=pretrained, weights=weights)
    channels, side = found.shape[1], size
    if side is None and found.photo is None:
        side = found.size
    check_size(side or 1)
    if channels is None or not found.trainable:
        raise ConfigError(f"cannot export {model}; use a network of foveate or timm")
    with status(f"exporting {model} ..."):
        made = write(
            cast(Any, found.net),
            out,
            shape=(channels, side, side),
            format=cast(Format | None, format),
            about=found.metadata(),
        )
    OUTPUT.print(f"{made.path} maps images to {' and '.join(made.outputs)}")
    OUTPUT.print(
        f"largest difference from the network: {made.difference:.1e} "
        f"(rounding allows {made.allowed:.1e})"
    )


def demo(
    model: Annotated[list[str] | None, options.MODEL_REF("trained digit networks")] = None,
    host: Annotated[str, options.HOST()] = "127.0.0.1",
    port: Annotated[int, options.PORT(min=0, max=65535)] = 7860,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    trust: options.TrustOption = False,
) -> None:
    """Open a web page that compares networks while you change the size of an object.

    ```
    foveate demo
    foveate demo --model quickstart/cnn --model quickstart/fovmax
    foveate demo --model timm:resnet18 --pretrained
    ```

    Repeat --model to compare up to four networks. For digit networks, draw, upload or choose a
    digit, and drag the zoom from 1/2 to 8; a second tab shows scenes with several digits. For runs
    on photographs and timm models, upload or choose a photograph, and change its size and position;
    a single network is compared with its backbone on the whole frame. By default, only this machine
    can open the page. The page works offline. Requires foveate[demo].
    """
    from foveate.demo.server import open_page, serve

    with status("loading ..."):
        page = open_page(model or (), trust=trust, pretrained=pretrained, weights=weights)
    serve(page, host, port, lambda address: OUTPUT.print(f"{address} (press Ctrl-C to stop)"))
