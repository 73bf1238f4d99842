"""Vision networks that recognise things at sizes they were never trained on."""

# No imports: `python -m foveate` runs this with the current folder first on sys.path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from foveate.data.sources import load_source as load_source
    from foveate.evaluation.audit.measure import audit as audit
    from foveate.models.channels import ScaleChannels as ScaleChannels
    from foveate.models.pretrained import from_pretrained as from_pretrained
    from foveate.models.sliding import SlidingChannels as SlidingChannels
    from foveate.models.sliding import local_maps as local_maps
    from foveate.models.zoo import create_model as create_model
    from foveate.resampling import foveate as foveate
    from foveate.scales import ScaleGrid as ScaleGrid

__version__ = "0.1.0"

# Names are looked up on first use, so that `foveate --help` need not wait for torch.
_HOMES = {
    "ScaleChannels": "foveate.models.channels",
    "ScaleGrid": "foveate.scales",
    "SlidingChannels": "foveate.models.sliding",
    "audit": "foveate.evaluation.audit.measure",
    "create_model": "foveate.models.zoo",
    "foveate": "foveate.resampling",
    "from_pretrained": "foveate.models.pretrained",
    "load_source": "foveate.data.sources",
    "local_maps": "foveate.models.sliding",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'foveate' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
