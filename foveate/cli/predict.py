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
        typer.Option(
            help="Pixels of the frame per pixel of the picture; fills it by default. For a run on "
            "photographs: a factor of the base size."
        ),
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search the pictures for off-centre objects.")
    ] = False,
    step: Annotated[
        float | None,
        typer.Option(help="With --search: pixels between centres; the smallest window by default."),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="PNG", help="Draw the winning window and the class into a copy."),
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
    With --search a picture keeps its shape, and is reduced only if it is more than twice as large
    as the largest window. The class, the centre (y, x) and the window are those of the strongest
    response, in pixels of the picture.
    A run on photographs sees a picture by its recipe, as 'foveate evaluate' does: in colour, with a
    short side of the base size times --scale.
    Pictures that cannot be read are reported, and the exit code is then 1.
    """
    from foveate.errors import DataError
    from foveate.evaluation.models import load_model
    from foveate.evaluation.predict import predict as classify
    from foveate.training.loop import find_device

    _check(images, search, step, picture)
    loaded = load_model(model, trust=trust, device=find_device(device), pretrained=pretrained)
    found: dict[int, Prediction] = {}
    errors: dict[int, str] = {}
    for i, path in enumerate(images):
        try:
            found[i] = classify(loaded, path, invert=invert, scale=scale, search=search, step=step)
        except DataError as error:
            errors[i] = str(error)
            ERRORS.print(f"error: {error}", markup=False)
    if picture is not None and found:
        _draw(loaded, images[0], found[0], picture)
    if json:
        _print_json(loaded, images, found, errors)
    elif found:
        rows = [(images[i], prediction) for i, prediction in found.items()]
        _print_table(loaded, rows, search)
    if errors:
        raise typer.Exit(1)


def _check(images: list[Path], search: bool, step: float | None, picture: Path | None) -> None:
    from foveate.errors import ConfigError

    if step is not None and not search:
        raise ConfigError(f"--step {step:g} is for --search: add it, or leave out --step")
    if picture is None:
        return
    if len(images) > 1:
        raise ConfigError(f"--picture draws one image, got {len(images)}: pass one at a time")
    if picture.suffix.lower() != ".png":
        raise ConfigError(f"--picture must end in .png, got {picture.name!r}")
    if picture.exists() and images[0].exists() and picture.samefile(images[0]):
        raise ConfigError(f"--picture would overwrite the image {picture}: name another file")


def _draw(model: "Model", path: Path, prediction: "Prediction", out: Path) -> None:
    from foveate.data.pictures import read_picture
    from foveate.evaluation.predict import background_of
    from foveate.files import replacing
    from foveate.report.boxes import draw_prediction

    drawn = draw_prediction(read_picture(path, background_of(model)), prediction)
    with replacing(out) as temporary:
        drawn.save(temporary, format="png")


def _print_table(model: "Model", found: "list[tuple[Path, Prediction]]", search: bool) -> None:
    """Print a line per picture, its path last and never cut."""
    width = max(len("class"), *(len(prediction.label) for _, prediction in found))
    names = ("y", "x", "window") if search else ("scale", "channel")
    _print_line("class", width, "confidence", names, "image")
    for path, p in found:
        cells = ("",) * len(names)
        if search and p.centre is not None:
            cells = tuple(f"{value:.0f}" for value in (*p.centre, p.window))
        elif p.channel is not None:
            cells = (f"{p.scale:.2f}", f"{model.scales[p.channel]:.2f}")
        _print_line(p.label, width, f"{100 * p.confidence:.1f} %", cells, str(path))


def _print_line(label: str, width: int, confidence: str, cells: tuple[str, ...], path: str) -> None:
    shown = "  ".join(f"{cell:>{room}}" for cell, room in zip(cells, (5, 7, 6), strict=False))
    OUTPUT.print(f"{label:<{width}}  {confidence:>10}  {shown}  {path}", markup=False)


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
