"""Choose the demo page for the networks: digits or photographs."""

from collections.abc import Sequence

from foveate.data.sources import load_source
from foveate.demo.digit_page import DigitPage
from foveate.demo.networks import to_digit_networks
from foveate.demo.photo_networks import to_photo_networks
from foveate.demo.photo_page import PhotoPage
from foveate.errors import ConfigError
from foveate.evaluation.models import TIMM, load_model
from foveate.models.pretrained import pretrained_names

DEFAULT_NETWORKS = ("cnn-mnist-tr2", "fovmax-mnist-tr2", "fovavg-mnist-tr2")
MAX_NETWORKS = 4  # networks that fit next to each other on the page


def open_page(
    refs: Sequence[str] = (), *, trust: bool = False, pretrained: bool = False
) -> DigitPage | PhotoPage:
    """Load networks and build the demo page for them.

    Args:
        refs: Networks by name, run folder or timm:NAME; by default the digit networks shipped
            with the package.
        trust: Allow a reference to run code that it contains or names.
        pretrained: Download the weights of timm:NAME, unless they are cached.

    Returns:
        The page for digits or for photographs.

    Raises:
        ConfigError: If the networks cannot be compared on one page.
    """
    if len(refs) > MAX_NETWORKS:
        raise ConfigError(
            f"the demo compares at most {MAX_NETWORKS} networks, got {len(refs)}; remove --model "
            "options"
        )
    if pretrained and not any(ref.startswith(TIMM) for ref in refs):
        raise ConfigError("--pretrained applies to timm models only: add --model timm:NAME")
    for ref in refs:
        if ref.startswith(TIMM) and not pretrained:
            raise ConfigError(f"{ref} has no trained weights here: add --pretrained")
    if not refs and not set(DEFAULT_NETWORKS) <= set(pretrained_names()):
        raise ConfigError(
            "this version contains no trained networks: run 'foveate quickstart', then 'foveate "
            "demo --model quickstart/cnn --model quickstart/fovmax --model quickstart/fovavg'"
        )
    chosen = refs or DEFAULT_NETWORKS
    models = [load_model(r, trust=trust, pretrained=r.startswith(TIMM)) for r in chosen]
    photos = [model for model in models if model.photo or model.name.startswith(TIMM)]
    if not photos:
        return DigitPage(to_digit_networks(models), load_source("mnist-5k").test)
    if other := next((model for model in models if model not in photos), None):
        raise ConfigError(
            f"{photos[0].name} classifies photographs and {other.name} does not; run a separate "
            "demo for each"
        )
    return PhotoPage(to_photo_networks(models))
