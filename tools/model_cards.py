"""Model cards: Markdown pages about the networks that come with the package."""

from collections.abc import Sequence

import torch

from foveate.models.pretrained import PretrainedInfo
from foveate.models.zoo import ModelConfig

GOOD = 0.95
SHOWN = (0.5, 1.0, 2.0, 4.0, 8.0)  # scales of the overview
SEEN = {
    "mnist": "mnist-5k, the digits inside this package, is part of what it was trained on",
    "mnist-5k": "the digits it was trained on are part of MNIST's training set",
}


def card(info: PretrainedInfo) -> str:
    """Write the page of one network, in Markdown."""
    parts = [
        f"# {info.name}",
        _lead(info),
        "## Use",
        _use(info),
        "## Accuracy over scale",
        _scores(info),
        "## How it was made",
        _facts(info),
        "## Limits",
        _limits(info),
    ]
    return "\n\n".join(parts) + "\n"


def overview(infos: Sequence[PretrainedInfo]) -> str:
    """Write the page that lists all networks, in Markdown."""
    lines = [
        "# Networks that come with foveate",
        "",
        "Test accuracy in % at some scales; each page has all of them.",
        "",
        "| network | trained at scale | weights | " + " | ".join(f"{s:g}" for s in SHOWN) + " |",
        "|---|---|---" + "|---:" * len(SHOWN) + "|",
    ]
    for info in infos:
        cells = [_percent(info.accuracy.get(scale)) for scale in SHOWN]
        start = f"| [{info.name}]({info.name}.md) | {info.scales} | {_count(info.model):,} | "
        lines.append(start + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _lead(info: PretrainedInfo) -> str:
    model = info.model
    window = f"windows of {model.size} pixels at {model.scales}, pooled by {model.pool}"
    kind = {
        "plain": f"A CNN that sees the whole image of {model.size} pixels",
        "foveated": f"One small CNN that sees the image centre through {window}",
        "sliding": f"One small CNN slid over the whole image, through {window}",
    }[model.form]
    images = (
        f"the first {info.samples:,} training images" if info.samples else "all training images"
    )
    return (
        f"{kind}; {_count(model):,} weights, {model.classes} classes. Trained on {images} of "
        f"{info.source} at scale {info.scales} alone."
    )


def _use(info: PretrainedInfo) -> str:
    return "\n".join(
        [
            "```python",
            "from foveate import create_model",
            "",
            f'net = create_model("{info.name}", pretrained=True)  # in eval mode',
            f"logits = net(images)  # ({_shape(info)}), as foveate.data.large_scale makes them",
            "```",
            "",
            "```sh",
            f"foveate predict digit.png --model {info.name}",
            "```",
        ]
    )


def _scores(info: PretrainedInfo) -> str:
    rows = [f"| {scale:.3f} | {_percent(share)} |" for scale, share in info.accuracy.items()]
    head = f"Of {info.tested:,} test images of {info.source}, which it has never seen:"
    return "\n".join([head, "", "| scale | accuracy (%) |", "|---:|---:|", *rows])


def _facts(info: PretrainedInfo) -> str:
    recipe = "; ".join(f"{key} {value}" for key, value in info.recipe.items() if value != "")
    chosen = f"{info.seed}, the median of {info.seeds} by validation accuracy"
    facts = {
        "data": f"{info.source} at scale {info.scales} in frames of {info.size} pixels",
        "recipe": recipe,
        "seed": chosen if info.seeds > 1 else str(info.seed),
        "validation accuracy": f"{_percent(info.validation)} % (images of the training scales)",
        "made with": ", ".join(filter(None, [_version(info), info.hardware])),
        "file": f"`{info.file}`, sha256 `{info.sha256}`",
    }
    rows = [f"| {key} | {value} |" for key, value in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])


def _limits(info: PretrainedInfo) -> str:
    place = "anywhere in the image" if info.model.form == "sliding" else "in the image centre"
    limits = [
        _range(info),
        f"It knows the {info.model.classes} classes of {info.source} and nothing else: whatever "
        "it is shown, it names one of them, and how often a confidence is right was not measured.",
        f"It expects one thing, {place}, light on dark, in values as the data set has them.",
        "Rotation, slant, noise and other handwriting than the data's were not tested.",
    ]
    if info.source in SEEN:
        limits.append(f"Never score it on images it has seen: {SEEN[info.source]}.")
    return "\n".join(f"- {limit}" for limit in limits)


def _range(info: PretrainedInfo) -> str:
    """Where it holds: the scales about the best one that are all good."""
    scales, shares = list(info.accuracy), list(info.accuracy.values())
    first = last = max(range(len(scales)), key=shares.__getitem__)
    least = f"{100 * GOOD:g} %"
    if shares[first] < GOOD:
        return f"It reaches {least} at none of the scales it was tested at."
    while first > 0 and shares[first - 1] >= GOOD:
        first -= 1
    while last + 1 < len(scales) and shares[last + 1] >= GOOD:
        last += 1
    return (
        f"It reaches {least} from scale {scales[first]:.3g} to {scales[last]:.3g}; it was tested "
        f"from {scales[0]:.3g} to {scales[-1]:.3g}."
    )


def _count(model: ModelConfig) -> int:
    with torch.random.fork_rng(devices=[]):
        return sum(weight.numel() for weight in model.build().parameters())


def _shape(info: PretrainedInfo) -> str:
    return f"B, {info.model.channels}, {info.size}, {info.size}"


def _version(info: PretrainedInfo) -> str:
    return f"foveate {info.version}" + (f" ({info.commit})" if info.commit else "")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.2f}"
