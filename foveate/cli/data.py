"""The commands that make and show data: generate and show."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from foveate.cli import options
from foveate.cli.console import OUTPUT, print_message, progress, status
from foveate.errors import ConfigError, DataError
from foveate.files import check_folder
from foveate.scales import ScaleRange, as_scales, parse_scales

if TYPE_CHECKING:
    from torch import Tensor

    from foveate.data.sources import Source
    from foveate.data.store import FileSpec

MAX_WORKERS = 256
RECIPE = "mnist-large-scale"
DATA_SET = options.argument("RECIPE", f"Dataset to generate: {RECIPE}.", RECIPE)


def generate(
    recipe: Annotated[str, DATA_SET],
    out: Annotated[Path, options.OUT_FOLDER()],
    source: Annotated[str, options.SOURCE()] = "mnist",
    train_scales: Annotated[str, options.TRAIN_SCALES()] = "1,2,4,1-4",
    test_scales: Annotated[str, options.TEST_SCALES()] = "all",
    size: Annotated[int, options.SIZE()] = 112,
    border: options.BorderOption = "replicate",
    seed: Annotated[int, options.SEED(min=0, panel=options.DATA)] = 0,
    workers: Annotated[int, options.WORKERS(min=1, max=MAX_WORKERS)] = 2,
) -> None:
    """Generate MNIST Large Scale, the dataset of the paper, as HDF5 files.

    ```
    foveate generate mnist-large-scale --source mnist-5k --out data
    foveate generate mnist-large-scale --test-scales 1,2,4 --out data
    ```

    The images cover a factor of 16 in scale. File names, keys and shapes are those of the official
    files. Existing files are kept. Shards and .h5 files cannot be the source. The random seed
    determines the scales that are drawn from a range such as 1-4.
    """
    from foveate.data.store import write

    if recipe != RECIPE:
        raise ConfigError(f"recipe must be {RECIPE}, got {recipe!r}")
    specs = _plan(train_scales, test_scales, size, seed, border)
    check_folder(out)
    data = _load(source)
    _check_space(
        out, sum(s.size_in_bytes(data) for s in specs if not (out / s.name(data)).exists())
    )
    with progress("images", sum(spec.count(data) for spec in specs)) as advance:
        for spec in specs:
            OUTPUT.print(write(spec, data, out, workers=workers, advance=advance))


def show(
    source: Annotated[str, options.SHOWN_SOURCE],
    samples: Annotated[int, options.SAMPLES(min=1, max=50)] = 4,
    scales: Annotated[str | None, options.SCALES(options.USUAL_SCALES)] = None,
    size: Annotated[int | None, options.SIZE("112, or 64 for cifar10")] = None,
    border: options.BorderOption = "replicate",
    out: Annotated[Path, options.OUT_FILE()] = Path("samples.png"),
) -> None:
    """Draw the images of a source, one row per image and one column per scale.

    ```
    foveate show mnist-5k --scales 0.5,1,2,4,8 --out digits.png
    foveate show folder:photos --scales 0.5,1,2 --size 224 --out photos.pdf
    ```

    The output file is a .png, .svg or .pdf. Photographs are shown as in 'foveate evaluate': their
    short side is half of --size at scale 1 and proportional to the scale, and their border is
    replicated. CIFAR-10 is shown with the recipe mirrored. The images of an .h5 file are shown as
    they are stored, with their labels.
    """
    from foveate.data.large_scale import check_size
    from foveate.report.plots import sample_grid, save
    from foveate.training.data import has_colour_pictures

    check_folder(out.parent)
    if size is not None:
        check_size(size)
    if source.endswith((".h5", ".hdf5")):
        images, titles = _from_file(Path(source), samples)
    elif has_colour_pictures(source):
        images, titles = _from_photographs(source, samples, scales, size or 112, border)
    else:
        images, titles = _from_source(source, samples, scales, size, border)
    OUTPUT.print(save(sample_grid(images, titles), out))


def _plan(train: str, test: str, size: int, seed: int, border: str) -> "list[FileSpec]":
    from foveate.data.large_scale import check_border
    from foveate.data.store import FileSpec

    beyond = check_border(border)
    both = () if train == "none" else parse_scales(train)
    alone = [] if test == "none" else [ScaleRange(scale, scale) for scale in as_scales(test)]
    if not both and not alone:
        raise ConfigError(
            "--train-scales and --test-scales are both none; give scales for at least one"
        )
    return [
        FileSpec(train=first, test=second, size=size, seed=seed, border=beyond)
        for first, second in [*zip(both, both, strict=True), *((None, scale) for scale in alone)]
    ]


def _load(name: str) -> "Source":
    from foveate.data.sources import load_source

    with status(f"loading {name} ..."):
        return load_source(name, report=print_message)


def _check_space(folder: Path, needed: int) -> None:
    import shutil

    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise DataError(
            f"the files need {needed / 1e9:.1f} GB, but {existing} has {free / 1e9:.1f} GB free; "
            "choose another --out or fewer scales"
        )


def _check_memory(count: int, size: int) -> None:
    """Raise a ConfigError if the frames of all scales do not fit into memory together."""
    from foveate.checks import check_memory

    remedy = "use a smaller --size, fewer --samples or fewer --scales"
    check_memory(4 * count * size**2, "the frames of all scales", remedy)


def _from_source(
    name: str, samples: int, given: str | None, size: int | None, border: str
) -> "tuple[list[Tensor], list[str]]":
    from foveate.data.large_scale import check_border, rescale
    from foveate.data.mirrored import rescale_mirrored
    from foveate.evaluation.curve import default_scales

    images, beyond = _load(name).train.images[:samples], check_border(border)
    grey = images.shape[1] == 1
    usual = default_scales("mnist-large-scale" if grey else "mirrored")
    scales = usual.values if given is None else as_scales(given)
    titles = [f"{scale:.3g}" for scale in scales]
    _check_memory(images.shape[:2].numel() * len(scales), size or 112)
    if grey:
        return [rescale(images, scale, size=size or 112, border=beyond) for scale in scales], titles
    if border != "replicate":
        raise ConfigError(f"the recipe mirrored has no border; leave out --border {border}")
    frame = size or 2 * images.shape[-1]
    return [rescale_mirrored(images, scale, size=frame) for scale in scales], titles


def _from_photographs(
    name: str, samples: int, given: str | None, size: int, border: str
) -> "tuple[list[Tensor], list[str]]":
    import torch
    from torch import nn

    from foveate.data.recipes import Recipe
    from foveate.evaluation.audit.transforms import PhotoTransform
    from foveate.evaluation.curve import default_scales
    from foveate.models.channels import ScaleChannels
    from foveate.training.data import open_pictures

    if border != "replicate":
        raise ConfigError(f"photographs always replicate their border; leave out --border {border}")
    scales = default_scales("photo").values if given is None else as_scales(given)
    frame = ScaleChannels(nn.Identity(), [1.0], size, antialias=True)
    shown = PhotoTransform(recipe=Recipe(name="photo", base=max(1, size // 2)), windows=frame)
    for scale in scales:
        shown.check_scale(scale)
    pictures = open_pictures(name)
    count = min(samples, len(pictures.labels("train")))
    _check_memory(3 * count * len(scales), size)
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
