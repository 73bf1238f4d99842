"""The command that exports a network for other programs: export."""

from pathlib import Path
from typing import Annotated, Any, cast

from foveate.cli import options
from foveate.cli.console import OUTPUT, status
from foveate.errors import ConfigError


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
