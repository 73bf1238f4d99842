"""The command about pictures: predict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import ERRORS, OUTPUT, PretrainedOption, TrustOption
from foveate.cli.training import DeviceOption

if TYPE_CHECKING:
    from foveate.evaluation.models import Model
    from foveate.evaluation.predict import Prediction

DEFAULT = "fovmax-mnist-tr2"
MODELS = (
    "A name (fovmax, fovmax-mnist-tr2), a run folder, a model file, package.module:factory or "
    "timm:NAME."
)


def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures.")],
    model: Annotated[str, typer.Option(help=MODELS)] = DEFAULT,
    invert: Annotated[
        bool | None,
        typer.Option("--invert/--no-invert", help="Invert the pictures; detected by default."),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Pixels of the frame per pixel of the picture; fills it by default."),
    ] = None,
    device: DeviceOption = "auto",
    pretrained: PretrainedOption = False,
    trust: TrustOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Predict the class of pictures, with its probability and the estimated object scale.

    Example: foveate predict digit.png --model fovmax-mnist-tr2

    Pictures may have any size and mode. For the networks of foveate each is made light on dark and
    square, and fills the frame of the network. A channel of scale s sees 28 s pixels of that frame.
    Pictures that cannot be read are reported, and the exit code is then 1.
    """
    from foveate.errors import DataError
    from foveate.evaluation.models import load_model
    from foveate.evaluation.predict import predict as classify
    from foveate.training.loop import find_device

    loaded = load_model(model, trust=trust, device=find_device(device), pretrained=pretrained)
    found: dict[int, Prediction] = {}
    errors: dict[int, str] = {}
    for i, path in enumerate(images):
        try:
            found[i] = classify(loaded, path, invert=invert, scale=scale)
        except DataError as error:
            errors[i] = str(error)
            ERRORS.print(f"error: {error}", markup=False)
    if json:
        _print_json(loaded, images, found, errors)
    elif found:
        _print_table(loaded, [(images[i], prediction) for i, prediction in found.items()])
    if errors:
        raise typer.Exit(1)


def _print_table(model: "Model", found: "list[tuple[Path, Prediction]]") -> None:
    """Print a line per picture, its path last and never cut."""
    width = max(len("class"), *(len(prediction.label) for _, prediction in found))
    rows = [("class", "confidence", "scale", "channel", Path("image"))]
    for path, p in found:
        seen = ("", "")
        if p.channel is not None:
            seen = (f"{p.scale:.2f}", f"{model.scales[p.channel]:.2f}")
        rows.append((p.label, f"{100 * p.confidence:.1f} %", *seen, path))
    for label, confidence, scale, channel, path in rows:
        line = f"{label:<{width}}  {confidence:>10}  {scale:>5}  {channel:>7}  {path}"
        OUTPUT.print(line, markup=False)


def _print_json(
    model: "Model", images: list[Path], found: "dict[int, Prediction]", errors: dict[int, str]
) -> None:
    import json
    from dataclasses import asdict

    entries = [
        {"image": str(path), **(asdict(found[i]) if i in found else {"error": errors[i]})}
        for i, path in enumerate(images)
    ]
    about = {"model": model.name, "classes": model.classes, "scales": model.scales}
    print(json.dumps({**about, "images": entries}, indent=2, allow_nan=False))
