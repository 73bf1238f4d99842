"""Choose the demo page for the networks: digits or photographs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from foveate.data.sources import load_source
from foveate.demo.digit_page import DigitPage
from foveate.demo.networks import to_digit_networks, to_photo_networks
from foveate.demo.photo_page import PhotoPage
from foveate.errors import ConfigError
from foveate.evaluation.models import TIMM, load_model

WebPage: TypeAlias = DigitPage | PhotoPage
DEFAULT_NETWORKS = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MAX_NETWORKS = 4  # networks that fit next to each other on the page


def open_page(
    refs: Sequence[str] = (),
    *,
    trust: bool = False,
    pretrained: bool = False,
    weights: str | Path | None = None,
) -> WebPage:
    """Load networks as `load_model` does, and build the demo page for digits or for photographs.

    Without `refs`, the page compares the digit networks of the package. Raises a ConfigError if the
    networks cannot be compared on one page.
    """
    if len(refs) > MAX_NETWORKS:
        raise ConfigError(
            f"the demo compares at most {MAX_NETWORKS} networks, got {len(refs)}; remove --model "
            "options"
        )
    timm = [ref for ref in refs if ref.startswith(TIMM)]
    start: dict[str, Any] = {"pretrained": pretrained, "weights": weights}
    if not timm and (pretrained or weights):
        option = "--pretrained" if pretrained else "--weights"
        raise ConfigError(f"{option} applies to timm models only: add --model timm:NAME")
    if timm and not (pretrained or weights):
        raise ConfigError(f"{timm[0]} has no trained weights here: add --pretrained or --weights")
    if weights and len(timm) > 1:
        raise ConfigError(f"--weights is for one timm model, got {len(timm)}; use --pretrained")
    chosen = refs or DEFAULT_NETWORKS
    models = [load_model(r, trust=trust, **(start if r in timm else {})) for r in chosen]
    photos = [m for m in models if (m.photo and m.config) or m.name.startswith(TIMM)]
    if not photos:
        return DigitPage(to_digit_networks(models), load_source("mnist-5k").test)
    if other := next((model for model in models if model not in photos), None):
        raise ConfigError(
            f"{photos[0].name} classifies photographs and {other.name} does not; run a separate "
            "demo for each"
        )
    return PhotoPage(to_photo_networks(models))
