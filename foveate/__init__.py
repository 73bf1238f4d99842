"""Vision networks that recognise objects at sizes they were never trained on."""

# No imports here: `python -m foveate` runs this file with the current folder first on sys.path.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from foveate.data.sources import load_source as load_source
    from foveate.evaluation.audit import audit as audit
    from foveate.evaluation.models import load_model as load_model
    from foveate.models.channels import ScaleChannels as ScaleChannels
    from foveate.models.sliding import SlidingChannels as SlidingChannels
    from foveate.models.sliding import local_maps as local_maps
    from foveate.models.wrap import wrap as wrap
    from foveate.models.zoo import create_model as create_model
    from foveate.models.zoo import list_models as list_models
    from foveate.resampling import foveate as foveate
    from foveate.scales import ScaleGrid as ScaleGrid

__version__ = "0.2.0"

# Names are imported on first use, so that `foveate --help` does not import torch.
_HOMES = {
    "ScaleChannels": "foveate.models.channels",
    "ScaleGrid": "foveate.scales",
    "SlidingChannels": "foveate.models.sliding",
    "audit": "foveate.evaluation.audit",
    "create_model": "foveate.models.zoo",
    "foveate": "foveate.resampling",
    "list_models": "foveate.models.zoo",
    "load_model": "foveate.evaluation.models",
    "load_source": "foveate.data.sources",
    "local_maps": "foveate.models.sliding",
    "wrap": "foveate.models.wrap",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> "Any":
    if name not in _HOMES:
        raise AttributeError(f"module 'foveate' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
