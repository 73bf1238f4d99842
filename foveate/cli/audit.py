"""The command about other people's classifiers: audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foveate.cli.console import ERRORS, OUTPUT, PretrainedOption, TrustOption, progress
from foveate.cli.predict import MODELS
from foveate.cli.training import PICTURES, ChangedDataOption, DeviceOption, _loader
from foveate.scales import SCALES_HELP, as_scales

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from foveate.evaluation.audit.audited_images import AuditImages
    from foveate.evaluation.audit.report import AuditReport
    from foveate.models.pooling import Pool
    from foveate.report.html import Page

POOLS = ("logsumexp", "max", "probabilities", "avg", "none")


def audit(
    model: Annotated[str, typer.Argument(help=MODELS)],
    source: Annotated[
        str, typer.Option(help="folder:DIR with a sub-folder per class, mnist, mnist-5k, ...")
    ],
    split: Annotated[
        str | None,
        typer.Option(
            help="test, val, train or all; test by default, all of a folder without splits."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Classes in the order of the logits: a,b,c or a file with one per line."),
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            help=f"Scales. {SCALES_HELP} By default 0.25:4:2, with --view resolution 0.125:1:2, or "
            "the paper's."
        ),
    ] = None,
    native: Annotated[
        float | None, typer.Option(help="The scale to compare with; 1, or a run's training scale.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="frame: rescale the images; large-scale: MNIST Large Scale of them; photo: the "
            "recipe of a run on photographs, its default."
        ),
    ] = None,
    view: Annotated[
        str,
        typer.Option(
            help="What scale s means. zoom: objects are s times as large; resolution: the same "
            "scene has s times the pixels along each axis, s at most 1."
        ),
    ] = "zoom",
    fit: Annotated[
        str | None,
        typer.Option(
            help="At scale 1 an image fills the input and the excess is cropped (fill, the "
            "default), or lies inside it as a whole (inside)."
        ),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Input size in pixels; the model's by default.")
    ] = None,
    border: Annotated[
        str | None,
        typer.Option(
            help="Beyond the image: replicate, reflect, a number (0.5) or a colour (0.5,0.4,0.4)."
        ),
    ] = None,
    mean: Annotated[
        str | None, typer.Option(help="Mean used for normalisation, as 0.5,0.4,0.4; 0 by default.")
    ] = None,
    std: Annotated[
        str | None, typer.Option(help="Standard deviation used for normalisation; 1 by default.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, max=2**31, help="Use only the first images.")
    ] = None,
    pool: Annotated[
        str, typer.Option(help=f"Pooling over scale channels: {', '.join(POOLS)}.")
    ] = "logsumexp",
    patch: Annotated[
        int | None,
        typer.Option(min=1, help="Patch size of the channels in pixels; the input's by default."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 32,
    device: DeviceOption = "auto",
    changed_data: ChangedDataOption = False,
    pretrained: PretrainedOption = False,
    trust: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", "--output", help="Folder for the results.")] = Path(
        "audit"
    ),
) -> None:
    """Measure how a classifier behaves when objects change size.

    The model takes images (B, C, H, W) of 0 to 1, normalised with --mean and --std, and returns
    logits (B, classes); the classes are the sub-folders by name unless --classes gives them. Each
    image fills the model's input at scale 1 and is rescaled about its centre. The model is also
    audited in scale channels, without training. Runs on photographs prepare images by their own
    recipe. Other networks of foveate, and sources other than folders, get MNIST Large Scale. Both
    are as in 'foveate evaluate'.

    Writes audit.html (the report), audit.csv (per scale and class), audit.json, audit.png and .svg.
    Images that cannot be read are reported and left out. TorchScript and .pt2 files, and runs with
    a backbone, can run code and need --trust. Pickles are not opened.

    Example: foveate audit mypackage.nets:classifier --source folder:photos --size 224
    """
    from foveate.data.large_scale import check_size
    from foveate.errors import ConfigError
    from foveate.evaluation.audit.audited_images import open_images
    from foveate.evaluation.audit.images import check_view
    from foveate.evaluation.audit.report import audit_beside, usual_scales
    from foveate.evaluation.audit.transforms import choose_transform
    from foveate.evaluation.models import load_model
    from foveate.files import check_folder
    from foveate.report.audit_page import audit_page
    from foveate.training.checkpoint import RunFolder
    from foveate.training.config import MAX_BATCH
    from foveate.training.loop import find_device
    from foveate.training.unchanged import check_unchanged

    if pool not in POOLS:
        raise ConfigError(f"pool must be one of {', '.join(POOLS)}, got {pool!r}")
    grid, place = None if scales is None else as_scales(scales), find_device(device)
    check_folder(out)
    check_size(size or 1)
    check_size(patch or 1)
    for scale in grid or [1.0]:
        check_view(view, scale)
    names = _classes(classes)
    if batch > MAX_BATCH:
        raise ConfigError(f"batch must be at most {MAX_BATCH:,} images, got {batch}")
    found, load = load_model(model, trust=trust, device=place, pretrained=pretrained), _loader()
    if (run := Path(model).expanduser()).is_dir() and not changed_data:
        check_unchanged(RunFolder(run), source, load)
    if split is None and found.source:
        split = "test"
    images = open_images(source, split, limit, names, load)
    transform = choose_transform(
        found,
        images,
        recipe=recipe,
        size=size,
        border=_border(border),
        mean=_numbers("mean", mean),
        std=_numbers("std", std),
        fit=fit,
        view=view,
    )
    wanted = grid or usual_scales(transform)
    with progress("images", len(images) * len(wanted)) as advance:
        report = audit_beside(
            found,
            images,
            transform,
            wanted,
            native=native,
            pool=None if pool == "none" else cast("Pool", pool),
            patch=patch,
            batch=batch,
            advance=advance,
        )
    page = audit_page(report, images.first(4), found.trainable, _changed(report, images))
    _write(report, page, out)


def _changed(report: "AuditReport", images: "AuditImages") -> list["Tensor"]:
    """The images whose prediction changed."""
    return [images.read(images.readable[change.image]) for change in report.plain.changes]


def _write(report: "AuditReport", page: "Page", out: Path) -> None:
    from foveate.report.audit_page import audit_curves, summary
    from foveate.report.plots import save

    written = [*report.save(out), page.save(out / "audit.html")]
    curves = audit_curves(report.audits)
    written += [save(curves, out / f"audit.{kind}") for kind in PICTURES]
    OUTPUT.print(_table(report))
    OUTPUT.print(summary(report.plain), markup=False)
    for path in written:
        OUTPUT.print(path, markup=False)
    for words in (*report.notes, *report.unreadable):
        ERRORS.print(f"warning: {words}", markup=False)
    if report.unreadable:
        count = f"{len(report.unreadable)} of {report.plain.count + len(report.unreadable)}"
        ERRORS.print(f"warning: {count} images were left out", markup=False)


def _table(report: "AuditReport") -> "Table":
    from rich.table import Table

    from foveate.report.audit_page import over_scale

    header, rows = over_scale(report)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _classes(text: str | None) -> list[str]:
    from foveate.errors import ConfigError

    if text is None:
        return []
    path = Path(text)
    try:
        listed = path.read_text(encoding="utf-8").splitlines() if path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the classes in {text} ({error})") from None
    names = text.split(",") if listed is None else listed
    if not (found := [name.strip() for name in names if name.strip()]):
        raise ConfigError(f"classes must be names, or a file with a name a line, got {text!r}")
    return found


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    from foveate.errors import ConfigError

    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be a number, or one per channel, got {text!r}") from None


def _border(text: str | None) -> str | float | tuple[float, ...] | None:
    try:
        numbers = () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        return text
    return numbers[0] if len(numbers) == 1 else numbers or None
