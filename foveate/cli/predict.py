"""The command about pictures: predict."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption
from foveate.cli.training import DeviceOption

if TYPE_CHECKING:
    from foveate.evaluation.predict import Network, Prediction

DEFAULT = "fovmax-mnist-tr2"


def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="Pictures.")],
    model: Annotated[
        str, typer.Option(help="A network that comes with foveate, or the folder of a run.")
    ] = DEFAULT,
    invert: Annotated[
        bool | None,
        typer.Option(
            "--invert/--no-invert", help="Light on dark or as it is; found out if not said."
        ),
    ] = None,
    scale: Annotated[
        float | None,
        typer.Option(help="Pixels of the frame per pixel of the picture; fills it if not said."),
    ] = None,
    device: DeviceOption = "auto",
    trust: TrustOption = False,
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what is on pictures: the class, how sure, and at which scale it was seen.

    Example: foveate predict digit.png --model fovmax-mnist-tr2

    Pictures may have any size and mode. Each is made light on dark and square, and fills the frame
    that the network was trained with. A channel of scale s looks at 28 s pixels of that frame.
    Pictures that cannot be read are named, the others answered, and the exit code is then 1.
    """
    from foveate.evaluation.predict import find_network
    from foveate.training.loop import find_device

    network = find_network(model, trust)
    network.net.to(find_device(device))
    found = [(path, _ask(network, path, invert, scale)) for path in images]
    answered = [(path, said) for path, said in found if not isinstance(said, str)]
    if json:
        _print_json(network, found)
    elif answered:
        _print_table(network, answered)
    if len(answered) < len(found):
        raise typer.Exit(1)


def _ask(
    network: "Network", path: Path, invert: bool | None, scale: float | None
) -> "Prediction | str":
    """The answer to one picture, or why there is none."""
    from foveate.errors import DataError
    from foveate.evaluation.predict import predict as ask

    try:
        return ask(network, path, invert=invert, scale=scale)
    except DataError as error:
        ERRORS.print(f"error: {error}", markup=False)
        return str(error)


def _print_table(network: "Network", answered: "list[tuple[Path, Prediction]]") -> None:
    """Print a line per picture, its path last and never cut."""
    width = max(len("class"), *(len(said.label) for _, said in answered))
    rows = [("class", "confidence", "scale", "channel", Path("image"))]
    for path, said in answered:
        seen = ("", "")
        if said.channel is not None:
            seen = (f"{said.scale:.2f}", f"{network.scales[said.channel]:.2f}")
        rows.append((said.label, f"{100 * said.confidence:.1f} %", *seen, path))
    for label, sure, scale, channel, path in rows:
        line = f"{label:<{width}}  {sure:>10}  {scale:>5}  {channel:>7}  {path}"
        OUTPUT.print(line, markup=False)


def _print_json(network: "Network", found: "list[tuple[Path, Prediction | str]]") -> None:
    import json

    def entry(path: Path, said: "Prediction | str") -> dict[str, object]:
        rest = {"error": said} if isinstance(said, str) else said.to_dict()
        return {"image": str(path), **rest}

    about = {"model": network.name, "classes": network.classes, "scales": network.scales}
    images = [entry(path, said) for path, said in found]
    print(json.dumps({**about, "images": images}, indent=2, allow_nan=False))
