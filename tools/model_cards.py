"""Model cards: Markdown pages about the pretrained networks of the package."""

from collections.abc import Sequence

import torch

from foveate.models.pretrained import PretrainedInfo
from foveate.models.zoo import ModelConfig

GOOD = 0.95  # accuracy of the range given under limitations
SHOWN = (0.5, 1.0, 2.0, 4.0, 8.0)  # scales of the overview
SEEN = {
    "mnist": "the training set includes mnist-5k, the digits in this package",
    "mnist-5k": "the training digits are part of the MNIST training set",
}


def card(info: PretrainedInfo) -> str:
    """Return the card of one network in Markdown."""
    parts = [
        f"# {info.name}",
        _lead(info),
        "## Usage",
        _use(info),
        "## Accuracy over scale",
        _scores(info),
        "## Training",
        _facts(info),
        "## Limitations",
        _limits(info),
    ]
    return "\n\n".join(parts) + "\n"


def overview(infos: Sequence[PretrainedInfo]) -> str:
    """Return the page that lists all networks in Markdown."""
    lines = [
        "# Trained networks",
        "",
        "These networks were trained on MNIST and come with the package. Load one with",
        "`foveate.create_model(NAME, pretrained=True)`. The table shows the test accuracy in",
        "percent at five scales; the card of each network lists all tested scales.",
        "",
        "| network | training scale | parameters | " + " | ".join(f"{s:g}" for s in SHOWN) + " |",
        "|---|---|---" + "|---:" * len(SHOWN) + "|",
    ]
    for info in infos:
        cells = [_percent(info.accuracy.get(scale)) for scale in SHOWN]
        start = f"| [{info.name}]({info.name}.md) | {info.scales} | {_count(info.model):,} | "
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _lead(info: PretrainedInfo) -> str:
    model = info.model
    patches = f"patches of {model.size} × {model.size} pixels"
    pool = f"with {model.pool} pooling over the channels"
    kind = {
        "plain": f"A CNN with an input of {model.size} × {model.size} pixels",
        "foveated": f"A foveated scale-channel network: one small CNN applied to {patches} around "
        f"the image centre, at {model.scales}, {pool}",
        "sliding": f"A sliding-window scale-channel network: one small CNN applied densely to "
        f"{patches}, at {model.scales}, {pool}",
    }[model.form]
    images = (
        f"the first {info.samples:,} training images" if info.samples else "all training images"
    )
    zooms = ", with random zooms" if "zooms" in info.recipe else ""
    return (
        f"{kind}. It has {_count(model):,} parameters and {model.classes} classes, and was trained "
        f"on {images} of {info.source} at {_scales(info)}{zooms}."
    )


def _use(info: PretrainedInfo) -> str:
    return "\n".join(
        [
            "```python",
            "from foveate import create_model",
            "",
            f'net = create_model("{info.name}", pretrained=True)  # in eval mode',
            f"logits = net(images)  # ({_shape(info)}) from foveate.data.large_scale.rescale",
            "```",
            "",
            "```sh",
            f"foveate predict digit.png --model {info.name}",
            "```",
        ]
    )


def _scores(info: PretrainedInfo) -> str:
    rows = [f"| {scale:.3f} | {_percent(share)} |" for scale, share in info.accuracy.items()]
    head = f"Measured on {info.tested:,} test images of {info.source}, not used for training:"
    return "\n".join([head, "", "| scale | accuracy (%) |", "|---:|---:|", *rows])


def _facts(info: PretrainedInfo) -> str:
    settings = "; ".join(f"{key} {value}" for key, value in info.recipe.items() if value != "")
    chosen = f"{info.seed}, the median of {info.seeds} seeds by validation accuracy"
    facts = {
        "data": f"{info.source} at {_scales(info)} in frames of {info.size} pixels",
        "other settings": settings,
        "seed": chosen if info.seeds > 1 else str(info.seed),
        "validation accuracy": f"{_percent(info.validation)} % (at the training scales)",
        "environment": ", ".join(filter(None, [_version(info), info.hardware])),
        "file": f"`{info.file}`, SHA-256 `{info.sha256}`",
    }
    rows = [f"| {key} | {value} |" for key, value in facts.items()]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _limits(info: PretrainedInfo) -> str:
    place = "anywhere in the image" if info.model.form == "sliding" else "in the image centre"
    limits = [
        _range(info),
        f"It predicts one of the {info.model.classes} classes of {info.source} for any input. The "
        "calibration of its confidence was not measured.",
        f"It expects one object, {place}, light on dark, with the pixel values of the dataset.",
        "Rotation, slant, noise and handwriting from other sources were not tested.",
    ]
    if info.source in SEEN:
        limits.append(f"Do not evaluate it on its training images: {SEEN[info.source]}.")
    return "\n".join(f"- {limit}" for limit in limits)


def _range(info: PretrainedInfo) -> str:
    """Describe the range of scales around the best one with an accuracy of at least `GOOD`."""
    scales, shares = list(info.accuracy), list(info.accuracy.values())
    first = last = max(range(len(scales)), key=shares.__getitem__)
    least = f"{100 * GOOD:g} %"
    if shares[first] < GOOD:
        return f"Its accuracy is below {least} at all tested scales."
    while first > 0 and shares[first - 1] >= GOOD:
        first -= 1
    while last + 1 < len(scales) and shares[last + 1] >= GOOD:
        last += 1
    return (
        f"Its accuracy is at least {least} from scale {scales[first]:.3g} to {scales[last]:.3g}; "
        f"scales from {scales[0]:.3g} to {scales[-1]:.3g} were tested."
    )


def _scales(info: PretrainedInfo) -> str:
    low, _, high = info.scales.partition("-")
    return f"scales from {low} to {high}" if high else f"scale {low}"


def _count(model: ModelConfig) -> int:
    with torch.random.fork_rng(devices=[]):
        return sum(weight.numel() for weight in model.build().parameters())


def _shape(info: PretrainedInfo) -> str:
    return f"B, {info.model.channels}, {info.size}, {info.size}"


def _version(info: PretrainedInfo) -> str:
    return f"foveate {info.version}" + (f" ({info.commit})" if info.commit else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
