"""The command that hands a network to other programs: export."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from foveate.cli.console import OUTPUT, TrustOption, status


def export(
    model: Annotated[
        str, typer.Argument(help="A network that comes with foveate, or the folder of a run.")
    ],
    output: Annotated[Path, typer.Option("--out", "--output", help="File to write.")],
    format: Annotated[
        str | None, typer.Option(help="onnx or torch; goes by the file's name if not said.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, help="Width and height of the images; as trained."),
    ] = None,
    trust: TrustOption = False,
) -> None:
    """Write a network as ONNX (.onnx) or as a torch.export program (.pt2), for any batch size.

    Example: foveate export fovmax-mnist-tr2 --out fovmax.onnx

    The file takes images and gives logits and, from a network with scale channels, what each
    channel said. It is read back and compared with the network on new random images, one and
    three at a time; ONNX needs foveate[onnx].
    """
    from foveate.data.large_scale import check_size
    from foveate.evaluation.predict import find_network
    from foveate.models.export import Format
    from foveate.models.export import export as write

    network = find_network(model, trust)
    side = network.size if size is None else size
    check_size(side)
    about = {"model": network.name, "source": network.source, "classes": network.classes}
    with status(f"exporting {model} ..."):
        made = write(
            network.net,
            output,
            shape=(network.model.channels, side, side),
            format=cast(Format | None, format),
            about=cast(dict[str, Any], about),
        )
    OUTPUT.print(f"{made.path}: images to {' and '.join(made.outputs)}", markup=False)
    OUTPUT.print(
        f"largest difference from the network {made.difference:.1e} "
        f"(rounding allows {made.allowed:.1e})"
    )
