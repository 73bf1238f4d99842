"""The networks of the paper by name, as published unless options change them."""

from dataclasses import asdict, dataclass, fields, replace
from fnmatch import fnmatch
from typing import Any, Literal

from torch import nn

from foveate.checks import check_fields, check_keys, check_range
from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.models.pooling import Pool
from foveate.models.sliding import SlidingChannels
from foveate.resampling import Padding
from foveate.scales import ScaleGrid

Form = Literal["plain", "foveated", "sliding"]
ALIASES = {"num_classes": "classes", "in_chans": "channels"}  # argument names of timm
LIMITS = {"size": 4096, "hidden": 65_536, "channels": 1024, "classes": 100_000}
"""Upper limits of the fields of a `ModelConfig`."""
MAX_FEATURES = 4096  # filters of one convolution
MAX_LAYERS = 64  # convolutions
MAX_WEIGHTS = 2**30  # 4 GiB in float32
MAX_WINDOW = 2**16  # pixels: 16 times the largest short side of a photograph


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Configuration of a network: its form, its scale channels and the layers of its backbone.

    Args:
        form: ``"foveated"`` builds `ScaleChannels`, ``"sliding"`` builds `SlidingChannels`, and
            ``"plain"`` builds the `ConvNet` alone.
        pool: How the logits of the channels are pooled over scale.
        scales: Scales of the channels.
        size: Width and height of the backbone's input in pixels.
        features: Number of filters of each convolution.
        hidden: Number of hidden units between the two linear layers.
        channels: Number of image channels.
        classes: Number of classes.
        batch_norm: Whether batch norm follows each convolution.
        dropout: Dropout probability of the hidden units.
        padding: Values outside the image: ``"border"``, ``"reflect"`` or a constant.
        antialias: Whether to low-pass filter before downsampling.

    Raises:
        ConfigError: If a field is invalid, the network would have more than 2**30 weights, or a
            window more than 2**16 pixels.

    Examples:
        >>> config = ModelConfig(pool="avg", classes=3)
        >>> config.build().scales == config.scales.values
        True
    """

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
        if isinstance(self.features, list):
            object.__setattr__(self, "features", tuple(self.features))
        check_fields(self)
        within = all(1 <= count <= MAX_FEATURES for count in self.features)
        if not within or not 1 <= len(self.features) <= MAX_LAYERS:
            raise ConfigError(
                f"features must be 1 to {MAX_LAYERS} numbers from 1 to {MAX_FEATURES:,}, "
                f"got {str(self.features)[:100]}"
            )
        for name, most in LIMITS.items():
            check_range(name, getattr(self, name), 1, most, f"1 to {most:,}")
        if (window := self.size * self.scales.high) > MAX_WINDOW:
            raise ConfigError(
                f"the largest window has {window:,.0f} pixels, the limit is {MAX_WINDOW:,}; use "
                "smaller windows or scales"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout must be at least 0 and below 1, got {self.dropout:g}")
        if (count := self._weights()) > MAX_WEIGHTS:
            raise ConfigError(
                f"the network has about {count:,} weights, the limit is {MAX_WEIGHTS:,}; reduce "
                "hidden, features or size"
            )

    def _weights(self) -> int:
        """Estimate the number of weights from the largest layers."""
        before = (self.channels, *self.features)
        convolutions = sum(9 * i * o for i, o in zip(before, self.features, strict=False))
        side = max(1, self.size >> len(self.features) // 2)
        mixing = self.classes**2 * len(self.scales) if self.pool == "concat" else 0
        full = self.hidden * (self.features[-1] * side**2 + self.classes)
        return convolutions + full + mixing

    def activations(self) -> int:
        """Estimate the number of activations of one image in the convolutions of all channels.

        Returns:
            The number of activations.
        """
        sides = [max(1, self.size >> (index + 1) // 2) for index in range(len(self.features))]
        each = sum(count * side**2 for count, side in zip(self.features, sides, strict=True))
        return each * (1 if self.form == "plain" else len(self.scales))

    def build(self) -> nn.Module:
        """Build the network with random weights from the global random state of PyTorch.

        Returns:
            The network, in training mode on the default device.

        Raises:
            ConfigError: If ``size`` is too small for the number of convolutions, or ``pool`` or
                ``padding`` is not available for this form.
        """
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
        """Return all fields as a dict for JSON.

        Returns:
            Dict of the fields; `from_dict` reads it.
        """
        return {**asdict(self), "scales": self.scales.to_dict(), "features": list(self.features)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "ModelConfig":
        """Build a configuration from the result of `to_dict`.

        Args:
            values: Dict of fields; ``scales`` is required.

        Returns:
            The configuration.

        Raises:
            ConfigError: If a field is unknown, missing or invalid.
        """
        check_keys("a model", values, FIELDS)
        return cls(**{**values, "scales": ScaleGrid.from_dict(values.get("scales", {}))})


FIELDS = {field.name for field in fields(ModelConfig)}
ZOO = {
    "cnn": ModelConfig(form="plain", size=112, features=(16, 16, 16, 16, 32, 32, 32, 32)),
    "fovmax": ModelConfig(pool="max"),
    "fovavg": ModelConfig(pool="avg"),
    "fovconc": ModelConfig(pool="concat", scales=ScaleGrid(1, 4, per_octave=1)),
    "swmax": ModelConfig(form="sliding", batch_norm=False),
}


def model_config(name: str, **changes: Any) -> ModelConfig:
    """Return the configuration of a network of the paper, with fields or timm arguments changed."""
    changes = {ALIASES.get(key, key): value for key, value in changes.items()}
    if name not in ZOO:
        raise ConfigError(f"no model named {name!r}; available models: {', '.join(ZOO)}")
    check_keys("a model", changes, FIELDS)
    return replace(ZOO[name], **changes)


def list_models(filter: str = "", *, pretrained: bool = False) -> list[str]:
    """List the models that `create_model` can create.

    Args:
        filter: Shell pattern, such as ``"fov*"``; the empty pattern matches every name.
        pretrained: List only the trained networks that are included in the package.

    Returns:
        The names in alphabetical order.

    Examples:
        >>> from foveate import list_models
        >>> list_models("fov*-mnist-tr2")
        ['fovavg-mnist-tr2', 'fovconc-mnist-tr2', 'fovconc5-mnist-tr2', 'fovmax-mnist-tr2']
    """
    from foveate.models.pretrained import pretrained_names  # circular import

    names = pretrained_names() if pretrained else [*ZOO, *pretrained_names()]
    return sorted(name for name in names if fnmatch(name, filter or "*"))


def create_model(
    name: str,
    pretrained: bool = False,
    num_classes: int | None = None,
    in_chans: int | None = None,
    **changes: Any,
) -> nn.Module:
    """Create a network by name.

    Args:
        name: A network of the paper (cnn, fovmax, fovavg, fovconc, swmax), or a trained network
            included in the package. `list_models` lists all names.
        pretrained: Whether to load trained weights. The network is then in evaluation mode, and
            expects images as generated by ``foveate.data.large_scale``, with a background of -0.76.
        num_classes: Number of classes; 10 by default.
        in_chans: Number of image channels; 1 by default.
        **changes: Other fields of [`ModelConfig`][foveate.models.zoo.ModelConfig], such as
            ``dropout=0.0`` or ``pool="avg"``.

    Returns:
        A module from images ``(B, C, H, W)`` to logits ``(B, K)``, on the CPU.

    Raises:
        ConfigError: If the name or a field is unknown, a value is invalid, or ``pretrained`` is
            combined with changed fields.
        DataError: If the file with the trained weights is missing or damaged.

    Examples:
        >>> import torch
        >>> from foveate import create_model
        >>> net = create_model("fovavg", num_classes=3, in_chans=3).eval()
        >>> net(torch.zeros(2, 3, 112, 112)).shape
        torch.Size([2, 3])
    """
    from foveate.models.pretrained import from_pretrained, read_index

    given = {"classes": num_classes, "channels": in_chans}
    changes |= {key: value for key, value in given.items() if value is not None}
    if pretrained and changes:
        raise ConfigError(f"cannot change {', '.join(changes)} of a pretrained network; omit it")
    if pretrained:
        return from_pretrained(name)
    check_keys("a model", changes, FIELDS)
    if name not in ZOO and (info := read_index().get(name)):
        return replace(info.model, **changes).build()
    return model_config(name, **changes).build()
