"""The named networks of the paper, each exactly as published unless told otherwise."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, get_args

from torch import nn

from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.models.pooling import Pool, check_pool
from foveate.models.sliding import SlidingChannels
from foveate.resampling import Padding
from foveate.scales import ScaleGrid

Form = Literal["plain", "foveated", "sliding"]


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A network: `form` is how the base network meets the image, the rest is its shape."""

    form: Form = "foveated"
    pool: Pool = "max"
    scales: ScaleGrid = PAPER_SCALES
    size: int = 28
    features: tuple[int, ...] = (16, 16, 32, 32)
    hidden: int = 100
    channels: int = 1
    classes: int = 10
    batch_norm: bool = True
    dropout: float = 0.15
    padding: Padding = "border"
    antialias: bool = False

    def __post_init__(self) -> None:
        if self.form not in get_args(Form):
            raise ConfigError(f"form must be one of {', '.join(get_args(Form))}, got {self.form!r}")
        check_pool(self.pool)
        if not isinstance(self.scales, ScaleGrid):
            raise ConfigError(f"scales must be a ScaleGrid here, got {self.scales!r}")
        object.__setattr__(self, "features", tuple(self.features))
        if not self.features or min(self.features) < 1:
            raise ConfigError(f"features must be numbers of at least 1, got {self.features}")
        for name in ("size", "hidden", "channels", "classes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout:g}")

    def build(self) -> nn.Module:
        """Make the network, its weights drawn from torch's random state."""
        backbone = ConvNet(
            self.features,
            self.size,
            channels=self.channels,
            classes=self.classes,
            hidden=self.hidden,
            batch_norm=self.batch_norm,
            dropout=self.dropout,
        )
        around = {"padding": self.padding, "antialias": self.antialias}
        match self.form:
            case "plain":
                return backbone
            case "sliding":
                return SlidingChannels(backbone, self.scales, self.pool, **around)  # type: ignore[arg-type]
        classes = self.classes
        return ScaleChannels(backbone, self.scales, self.size, self.pool, classes=classes, **around)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Everything that makes this network, ready for JSON."""
        return {**asdict(self), "scales": self.scales.to_dict(), "features": list(self.features)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Read what `to_dict` wrote."""
        _check_names(values)
        return cls(**{**values, "scales": ScaleGrid.from_dict(values["scales"])})


ZOO = {
    "cnn": ModelConfig(form="plain", size=112, features=(16, 16, 16, 16, 32, 32, 32, 32)),
    "fovmax": ModelConfig(pool="max"),
    "fovavg": ModelConfig(pool="avg"),
    "fovconc": ModelConfig(pool="concat", scales=ScaleGrid(1, 4, per_octave=1)),
    "swmax": ModelConfig(form="sliding", batch_norm=False),
}


def model_config(name: str, **changes: Any) -> ModelConfig:
    """Look up a network of the paper by name, with changes."""
    if name not in ZOO:
        raise ConfigError(f"no model named {name!r}; there are {', '.join(ZOO)}")
    _check_names(changes)
    return replace(ZOO[name], **changes)


def create_model(name: str, **changes: Any) -> nn.Module:
    """Make a network of the paper by name: cnn, fovmax, fovavg, fovconc or swmax.

    `changes` replace what the paper says: create_model("fovavg", classes=3, channels=3).
    """
    return model_config(name, **changes).build()


def _check_names(values: Iterable[str]) -> None:
    known = sorted(field.name for field in fields(ModelConfig))
    for name in values:
        if name not in known:
            raise ConfigError(f"models have no {name!r}; they have {', '.join(known)}")
