"""The command that writes a network as a file for other programs: export."""

from pathlib import Path
from typing import Annotated, Any, cast

import typer

from foveate.cli.console import OUTPUT, PretrainedOption, TrustOption, status
from foveate.cli.predict import MODELS


def export(
    model: Annotated[str, typer.Argument(help=MODELS)],
    output: Annotated[Path, typer.Option("--out", "--output", help="File to write.")],
    format: Annotated[
        str | None, typer.Option(help="onnx or torch; by default from the file's name.")
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Width and height of the images; as trained by default, for a run on photographs "
            "the largest window.",
        ),
    ] = None,
    pretrained: PretrainedOption = False,
    trust: TrustOption = False,
) -> None:
    """Write a network as ONNX (.onnx) or as a torch.export program (.pt2), for any batch size.

    Example: foveate export fovmax-mnist-tr2 --out fovmax.onnx

    The file maps images to logits and, for a network with scale channels, the logits of each
    channel. It is read back and compared with the network on random images, one and three at a
    time. ONNX needs foveate[onnx]. The entry foveate.json of the file's metadata lists the classes
    and, for a run on photographs, base size, mean and std of its recipe.
    """
    from foveate.data.large_scale import check_size
    from foveate.errors import ConfigError
    from foveate.evaluation.models import load_model
    from foveate.models.export import Format
    from foveate.models.export import export as write

    found = load_model(model, trust=trust, pretrained=pretrained)
    side, channels = found.size if size is None else size, found.shape[1]
    check_size(side)
    if channels is None or not found.trainable:
        raise ConfigError(f"{model} cannot be exported: name a network of foveate or timm")
    with status(f"exporting {model} ..."):
        made = write(
            cast(Any, found.net),
            output,
            shape=(channels, side, side),
            format=cast(Format | None, format),
            about=found.about(),
        )
    OUTPUT.print(f"{made.path}: images to {' and '.join(made.outputs)}", markup=False)
    OUTPUT.print(
        f"largest difference from the network {made.difference:.1e} "
        f"(rounding allows {made.allowed:.1e})"
    )
