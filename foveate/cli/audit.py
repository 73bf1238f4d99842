"""The command about other people's classifiers: audit."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from foveate.cli.console import ERRORS, OUTPUT, TrustOption, progress
from foveate.cli.training import PICTURES, ChangedDataOption, DeviceOption, _loader
from foveate.scales import SCALES_HELP, as_scales

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor

    from foveate.evaluation.audit.measure import Estimate
    from foveate.evaluation.audit.report import AuditReport
    from foveate.models.pooling import Pool

POOLS = ("max", "avg", "logsumexp", "none")


def audit(
    model: Annotated[
        str,
        typer.Argument(
            help="package.module:factory, a TorchScript, torch.export or ONNX file, the folder of "
            "a run, or pretrained:NAME."
        ),
    ],
    source: Annotated[
        str, typer.Option(help="folder:DIR with a sub-folder per class, mnist, mnist-5k, ...")
    ],
    split: Annotated[
        str | None,
        typer.Option(
            help="test, val, train or all; test if not said, all of a folder without splits."
        ),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="What the model answers, in order: a,b,c or a file with a name a line."),
    ] = None,
    scales: Annotated[
        str | None, typer.Option(help=f"Scales. {SCALES_HELP} Default: 0.25:4:2, or the paper's.")
    ] = None,
    native: Annotated[
        float | None, typer.Option(help="The scale to compare with; 1, or a run's training scale.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="frame: rescale the images; large-scale: MNIST Large Scale of them."),
    ] = None,
    size: Annotated[
        int | None, typer.Option(min=1, help="Pixels that the model takes; as the images, or 112.")
    ] = None,
    border: Annotated[
        str | None, typer.Option(help="Beyond the image: replicate, reflect or a number, as 0.5.")
    ] = None,
    mean: Annotated[str, typer.Option(help="Taken from pixels of 0 to 1; as 0.5,0.4,0.4.")] = "0",
    std: Annotated[str, typer.Option(help="What that is then divided by.")] = "1",
    limit: Annotated[
        int | None, typer.Option(min=1, max=2**31, help="Use only the first images.")
    ] = None,
    pool: Annotated[
        str, typer.Option(help="Of the scale channels beside it: max, avg, logsumexp or none.")
    ] = "max",
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 32,
    device: DeviceOption = "auto",
    changed_data: ChangedDataOption = False,
    trust: TrustOption = False,
    out: Annotated[Path, typer.Option("--out", "--output", help="Folder for the results.")] = Path(
        "audit"
    ),
) -> None:
    """Find out how a classifier behaves when objects change size.

    The model takes images (B, C, H, W) of 0 to 1, less --mean, over --std, and gives logits
    (B, classes); the classes are the sub-folders by name, if --classes does not say otherwise.
    Each image fills the model's frame at scale 1 and is rescaled about its centre. Beside the model
    the same is put into scale channels, without training. Networks of foveate, and sources that
    are no folder, are shown MNIST Large Scale, as by 'foveate evaluate'.

    Writes audit.html (the report), audit.csv (per scale and class), audit.json, audit.png and .svg.
    Images that cannot be read are named and left out. TorchScript and .pt2 files, and runs with a
    backbone, can run code and need --trust. Pickles are not opened.

    Example: foveate audit mypackage.nets:classifier --source folder:photos --size 224
    """
    from foveate.data.large_scale import check_size
    from foveate.errors import ConfigError
    from foveate.evaluation.audit.data import open_pictures, usual_split
    from foveate.evaluation.audit.images import read_border
    from foveate.evaluation.audit.report import audit_beside, fitted_look, usual_scales
    from foveate.evaluation.models import load_model
    from foveate.files import check_folder
    from foveate.report.audit_page import finetune_script
    from foveate.training.checkpoint import RunFolder
    from foveate.training.config import MAX_BATCH
    from foveate.training.loop import find_device
    from foveate.training.unchanged import check_unchanged

    ways, grid, place = _pool(pool), as_scales(scales) if scales else None, find_device(device)
    check_folder(out)
    check_size(size or 1)
    names = _classes(classes)
    if batch > MAX_BATCH:
        raise ConfigError(f"batch must be at most {MAX_BATCH:,} images, got {batch}")
    found, load = load_model(model, place, trust), _loader()
    if (run := Path(model).expanduser()).is_dir() and not changed_data:
        check_unchanged(RunFolder(run), source, load)
    usual = "test" if found.training else usual_split(source)
    chosen = usual if split is None else split
    pictures = open_pictures(source, chosen, limit, names, load)
    look = fitted_look(
        found,
        pictures,
        recipe=recipe,
        size=size,
        border=None if border is None else read_border(border),
        mean=_numbers("mean", mean),
        std=_numbers("std", std),
        device=place,
    )
    wanted = grid or usual_scales(look)
    with progress("images", len(pictures) * len(wanted)) as advance:
        report = audit_beside(
            found,
            pictures,
            look,
            wanted,
            native=native,
            pool=ways,
            batch=batch,
            device=place,
            advance=advance,
        )
    script = finetune_script(report, trust) if found.trainable and report.channels else None
    _write(report, pictures.some(4), out, script)


def _write(report: "AuditReport", samples: "list[Tensor]", out: Path, script: str | None) -> None:
    from foveate.evaluation.audit.report import save_audit
    from foveate.report.audit_page import audit_page, summary
    from foveate.report.audit_plots import audit_curves
    from foveate.report.plots import save

    page = audit_page(report, samples, script)
    written = [*save_audit(report, out), page.save(out / "audit.html")]
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

    from foveate.evaluation.audit.measure import MEASURES

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("scale", justify="right")
    for name in (*MEASURES, *(f"accuracy {other}" for other in list(report.audits)[1:])):
        table.add_column(name, justify="right")
    for i, scale in enumerate(report.plain.scales):
        own = [_shown(getattr(report.plain.overall[i], measure)) for measure in MEASURES]
        others = [_shown(audit.overall[i].accuracy) for audit in list(report.audits.values())[1:]]
        table.add_row(f"{scale:.3f}", *own, *others)
    return table


def _shown(estimate: "Estimate") -> str:
    value, low, high = (100 * part for part in estimate)
    return f"{value:.1f} ({low:.0f}-{high:.0f})"


def _pool(name: str) -> "Pool | None":
    from foveate.errors import ConfigError

    if name not in POOLS:
        raise ConfigError(f"pool must be one of {', '.join(POOLS)}, got {name!r}")
    return None if name == "none" else cast("Pool", name)


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


def _numbers(name: str, text: str) -> tuple[float, ...]:
    from foveate.errors import ConfigError

    try:
        return tuple(map(float, text.split(",")))
    except ValueError:
        raise ConfigError(f"{name} must be a number, or one per channel, got {text!r}") from None
