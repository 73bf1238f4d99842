"""The command that audits any classifier over scale: audit."""

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from foveate.checks import check_choice
from foveate.cli import options
from foveate.cli.console import OUTPUT, print_message, print_table, progress
from foveate.cli.training import cached_loader
from foveate.errors import ConfigError, DataError
from foveate.files import check_folder
from foveate.scales import as_scales

if TYPE_CHECKING:
    from foveate.data.sources import Load
    from foveate.evaluation.audit.audited_images import AuditImages
    from foveate.evaluation.audit.report import AuditReport
    from foveate.evaluation.models import Model
    from foveate.models.pooling import Pool

MAX_SAMPLES = 2**31


def audit(
    model: options.ModelArgument,
    source: Annotated[str, options.SOURCE()],
    split: Annotated[
        str | None,
        options.SPLIT(
            "test; all images of a folder without splits that is not the run's own",
            values=("test", "val", "train", "all"),
        ),
    ] = None,
    samples: Annotated[int | None, options.SAMPLES("all images", min=1, max=MAX_SAMPLES)] = None,
    classes: Annotated[str | None, options.CLASSES("the names of the source")] = None,
    changed_data: options.ChangedDataOption = False,
    scales: Annotated[
        str | None,
        options.SCALES(options.VIEWED_SCALES, panel=options.EVALUATION),
    ] = None,
    view: Annotated[str, options.VIEW()] = "zoom",
    fit: Annotated[str | None, options.FIT("fill")] = None,
    size: Annotated[
        int | None, options.SIZE("the model's input size", min=1, panel=options.EVALUATION)
    ] = None,
    border: Annotated[str | None, options.BORDER("replicate, or that of a run")] = None,
    mean: Annotated[str | None, options.MEAN("that of a timm model; otherwise 0")] = None,
    std: Annotated[str | None, options.STD("that of a timm model; otherwise 1")] = None,
    pool: Annotated[
        str, options.POOL(panel=options.EVALUATION, values=(*options.POOLS, "none"))
    ] = "logsumexp",
    patch: Annotated[int | None, options.PATCH("the input size", min=1)] = None,
    lazy: Annotated[float | None, options.LAZY("all channels")] = None,
    pretrained: options.PretrainedOption = False,
    weights: options.WeightsOption = None,
    trust: options.TrustOption = False,
    out: Annotated[Path, options.OUT_FOLDER()] = Path("audit"),
    batch: Annotated[int, options.BATCH(min=1, panel=options.EXECUTION)] = 32,
    device: options.DeviceOption = "auto",
) -> None:
    """Measure how a classifier behaves when objects change size.

    ```
    foveate audit mypackage.nets:classifier --source folder:photos --size 224
    foveate audit net.onnx --source folder:photos --classes names.txt
    foveate audit runs/first --source mnist-5k --scales 0.5,1,2,4,8
    ```

    The model maps images of shape (B, C, H, W), normalised with --mean and --std, to logits of
    shape (B, classes). The classes are the subfolders of folder:DIR in alphabetical order, or
    --classes. At scale 1 an image fills the input; at other scales it is rescaled about its centre.
    Runs on photographs and on CIFAR-10 prepare images with their own recipe. Other networks of
    foveate are audited on MNIST Large Scale, and so is any model on sources other than folders, tar
    files and CIFAR-10. For runs, a scale means the same as in 'foveate evaluate'.

    The audit also evaluates the model inside scale channels, without training, unless --pool none
    is given. It writes audit.html (the report), audit.csv (per scale and class), audit.json,
    audit.png and audit.svg. Images that cannot be read are skipped and listed. TorchScript and .pt2
    files, and runs with a custom backbone, can run code and require --trust. Pickle files are never
    opened.

    With --lazy, for networks with scale channels, confidences are those of the evaluated channels.
    """
    from foveate.data.large_scale import check_size
    from foveate.evaluation.audit.audited_images import open_images
    from foveate.evaluation.audit.images import check_view
    from foveate.evaluation.audit.report import audit_with_channels
    from foveate.evaluation.audit.transforms import PhotoTransform, choose_transform
    from foveate.evaluation.curve import default_scales
    from foveate.evaluation.models import load_model
    from foveate.evaluation.test_sets import lazy_channels
    from foveate.training.checkpoint import RunFolder
    from foveate.training.config import MAX_BATCH
    from foveate.training.loop import find_device
    from foveate.training.unchanged import check_classes, check_unchanged

    check_choice("pool", pool, (*options.POOLS, "none"))
    grid, place = None if scales is None else as_scales(scales), find_device(device)
    check_folder(out)
    check_size(size or 1)
    check_size(patch or 1)
    for scale in grid or [1.0]:
        check_view(view, scale)
    names = _classes(classes)
    if batch > MAX_BATCH:
        raise ConfigError(f"batch must be at most {MAX_BATCH:,} images, got {batch}")
    found = load_model(model, trust=trust, device=place, pretrained=pretrained, weights=weights)
    if patch is not None and (found.scales or pool == "none"):
        why = f"{model} has them already" if found.scales else "--pool none makes none"
        raise ConfigError(f"--patch is for scale channels of the audit, and {why}; leave it out")
    if lazy is not None:
        lazy_channels(found.net).lazy = lazy
    load = cached_loader()
    if (run := Path(model).expanduser()).is_dir() and not changed_data:
        check_unchanged(RunFolder(run), source, load)
    if split is None and _is_own(source, found, run, load):
        split = "test"
    images = open_images(source, split, samples, names, load)
    if not names and set(images.classes) <= set(found.class_names) and os.path.isfile(model):
        images = open_images(source, split, samples, found.class_names, load)
    if run.is_dir():
        check_classes(RunFolder(run), source, images.classes)
    transform = choose_transform(
        found,
        images,
        size=size,
        border=parse_border(border),
        mean=_numbers("mean", mean),
        std=_numbers("std", std),
        fit=fit,
        view=view,
    )
    recipe = "photo" if isinstance(transform, PhotoTransform) else transform.recipe
    wanted = grid or default_scales(recipe, view)
    with progress("images", len(images) * len(wanted)) as advance:
        report = audit_with_channels(
            found,
            images,
            transform,
            wanted,
            pool=None if pool == "none" else cast("Pool", pool),
            patch=patch,
            batch=batch,
            advance=advance,
        )
    _write(report, images, found.trainable, out)


def _is_own(source: str, model: "Model", run: Path, load: "Load") -> bool:
    """Whether the model was trained on a source; the folder of its images can have moved."""
    from foveate.training.checkpoint import RunFolder
    from foveate.training.unchanged import LISTING, source_checksum

    if source == model.source or not (source.startswith("folder:") and run.is_dir()):
        return source == model.source
    recorded = RunFolder(run).data().get("checksum", "")
    with suppress(DataError):  # images that cannot be split were not trained on
        return bool(source_checksum(source, load, recorded.startswith(LISTING)) == recorded)
    return False


def _write(report: "AuditReport", images: "AuditImages", trainable: bool, out: Path) -> None:
    from foveate.report.audit_page import audit_curves, audit_page, scale_table, summary
    from foveate.report.plots import save_figure

    changed = [images.read(images.readable[change.image]) for change in report.plain.changes]
    page = audit_page(report, images.first(4), trainable, changed)
    written = [*report.save(out), page.save(out / "audit.html")]
    written += save_figure(audit_curves(report.audits), out, "audit")
    print_table(*scale_table(report))
    OUTPUT.print(summary(report.plain), *written, sep="\n")
    for note in (*report.notes, *report.unreadable):
        print_message(f"warning: {note}")
    if report.unreadable:
        count = f"{len(report.unreadable)} of {report.plain.count + len(report.unreadable)}"
        print_message(f"warning: skipped {count} images that cannot be read")


def _classes(text: str | None) -> list[str]:
    if text is None:
        return []
    names = text.split(",")
    if os.path.isfile(text):  # False for a list that is too long for a path
        try:
            names = Path(text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"cannot read the classes in {text}: {error}; use a UTF-8 text file"
            ) from None
    if not (found := [name.strip() for name in names if name.strip()]):
        raise ConfigError(f"classes must be a,b,c or a file with one name per line, got {text!r}")
    return found


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be a number, or one per channel, got {text!r}") from None


def parse_border(text: str | None) -> str | float | tuple[float, ...] | None:
    """Parse a border: the name of a mode, a number, or a colour such as 0.5,0.4,0.4."""
    try:
        numbers = () if text is None else tuple(map(float, text.split(",")))
    except ValueError:
        return text
    if not all(0 <= number <= 1 for number in numbers):
        raise ConfigError(f"border must have values from 0 to 1, got {text}; divide them by 255")
    return numbers[0] if len(numbers) == 1 else numbers or None
