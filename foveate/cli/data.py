"""The commands about data: generate and show."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress, status, tell
from foveate.scales import SCALES_HELP, ScaleRange, as_scales, parse_scales

if TYPE_CHECKING:
    from torch import Tensor

    from foveate.data.sources import Source
    from foveate.data.store import FileSpec

MAX_WORKERS = 256
BorderOption = Annotated[
    str, typer.Option(help="Beyond the frame in smoothing: replicate, reflect, zero or whole.")
]


def generate(
    what: Annotated[str, typer.Argument(metavar="mnist-large-scale", help="The recipe.")],
    out: Annotated[Path, typer.Option(help="Folder for the files.")],
    source: Annotated[
        str, typer.Option(help="mnist, fashion-mnist, mnist-5k (embedded), idx:DIR or folder:DIR.")
    ] = "mnist",
    train: Annotated[
        str, typer.Option(help=f"Training scales, a file for each, or none. {SCALES_HELP}")
    ] = "1,2,4,1-4",
    test: Annotated[
        str, typer.Option(help=f"Test scales, a file for each, or none. {SCALES_HELP}")
    ] = "all",
    size: Annotated[int, typer.Option(help="Width and height of the images in pixels.")] = 112,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the scales drawn for a range.")] = 0,
    border: BorderOption = "replicate",
    workers: Annotated[
        int, typer.Option(min=1, max=MAX_WORKERS, help="Threads; the files do not depend on it.")
    ] = 2,
) -> None:
    """Make the paper's data set: images over a factor of 16 in scale, as HDF5 files.

    Example: foveate generate mnist-large-scale --source mnist-5k --train 1 --test 1,2,4 --out data

    Names, keys and shapes are those of the official files. What is finished is not made again.
    """
    from foveate.data.store import write
    from foveate.errors import ConfigError
    from foveate.files import check_folder

    if what != "mnist-large-scale":
        raise ConfigError(f"the only recipe is mnist-large-scale, got {what!r}")
    specs = _plan(train, test, size, seed, border)
    check_folder(out)
    data = _load(source)
    _check_space(out, sum(s.bytes(data) for s in specs if not (out / s.name(data)).exists()))
    with progress("images", sum(spec.count(data) for spec in specs)) as advance:
        for spec in specs:
            OUTPUT.print(write(spec, data, out, workers=workers, advance=advance))


def show(
    what: Annotated[
        str, typer.Argument(help="A source (mnist-5k, folder:DIR, ...) or an .h5 file.")
    ],
    out: Annotated[Path, typer.Option(help="Picture to write: .png, .svg or .pdf.")] = Path(
        "samples.png"
    ),
    samples: Annotated[int, typer.Option(min=1, max=50, help="Rows of the picture.")] = 4,
    scales: Annotated[str, typer.Option(help=f"Scales of the columns. {SCALES_HELP}")] = "all",
    size: Annotated[int, typer.Option(help="Width and height of the images in pixels.")] = 112,
    border: BorderOption = "replicate",
) -> None:
    """Draw samples over scales, from a source or a data set file.

    Example: foveate show mnist-5k --scales 0.5,1,2,4,8 --out digits.png

    Photographs are shown as in 'foveate evaluate': scale s multiplies the short side, which at
    scale 1 is half of --size, and the border is repeated.
    """
    from foveate.files import check_folder
    from foveate.report.plots import sample_grid, save
    from foveate.training.data import has_colour_pictures

    check_folder(out.parent)
    if what.endswith((".h5", ".hdf5")):
        images, titles = _from_file(Path(what), samples)
    elif has_colour_pictures(what):
        images, titles = _from_photographs(what, samples, as_scales(scales), size, border)
    else:
        images, titles = _from_source(what, samples, as_scales(scales), size, border)
    OUTPUT.print(save(sample_grid(images, titles), out))


def _plan(train: str, test: str, size: int, seed: int, border: str) -> "list[FileSpec]":
    from foveate.data.large_scale import check_border
    from foveate.data.store import FileSpec
    from foveate.errors import ConfigError

    beyond = check_border(border)
    both = () if train == "none" else parse_scales(train)
    alone = [] if test == "none" else [ScaleRange(scale, scale) for scale in as_scales(test)]
    if not both and not alone:
        raise ConfigError("--train none and --test none leave nothing to make; name some scales")
    return [
        FileSpec(train=first, test=second, size=size, seed=seed, border=beyond)
        for first, second in [*zip(both, both, strict=True), *((None, scale) for scale in alone)]
    ]


def _load(name: str) -> "Source":
    from foveate.data.sources import load_source

    with status(f"loading {name} ..."):
        return load_source(name, report=tell)


def _check_space(folder: Path, needed: int) -> None:
    import shutil

    from foveate.errors import DataError

    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"the files need {needed / 1e9:.1f} GB and {existing} has {free / 1e9:.1f} GB free; "
            "choose another --out or fewer scales"
        )


def _from_source(
    name: str, samples: int, scales: tuple[float, ...], size: int, border: str
) -> "tuple[list[Tensor], list[str]]":
    from foveate.data.large_scale import check_border, rescale

    images, beyond = _load(name).train.images[:samples], check_border(border)
    drawn = [rescale(images, scale, size=size, border=beyond) for scale in scales]
    return drawn, [f"{scale:.3g}" for scale in scales]


def _from_photographs(
    name: str, samples: int, scales: tuple[float, ...], size: int, border: str
) -> "tuple[list[Tensor], list[str]]":
    import torch
    from torch import nn

    from foveate.data.large_scale import check_size
    from foveate.data.recipes import Recipe
    from foveate.errors import ConfigError
    from foveate.evaluation.audit.run_recipe import PhotoTransform
    from foveate.models.channels import ScaleChannels
    from foveate.training.data import open_pictures

    if border != "replicate":
        raise ConfigError(f"photographs repeat their border: leave out --border {border}")
    check_size(size)
    frame = ScaleChannels(nn.Identity(), [1.0], size, antialias=True)
    shown = PhotoTransform(recipe=Recipe(name="photo", base=max(1, size // 2)), windows=frame)
    for scale in scales:
        shown.check_scale(scale)
    pictures = open_pictures(name)
    count = min(samples, len(pictures.labels("train")))
    images = [torch.from_numpy(pictures.read("train", i).copy()) for i in range(count)]
    return [shown.show(images, s) for s in scales], [f"{s:.3g}" for s in scales]


def _from_file(path: Path, samples: int) -> "tuple[list[Tensor], list[str]]":
    from foveate.data.store import ScaledFile

    file = ScaledFile(path)
    images, labels = file.read("test", slice(17 * samples))
    columns = min(17, max(1, len(images) // samples))
    rows = min(samples, len(images))
    drawn = [images[column * rows : (column + 1) * rows] for column in range(columns)]
    groups = labels[: rows * columns].reshape(columns, rows).tolist()
    return drawn, [" ".join(str(label) for label in group) for group in groups]
