"""The methods of the comparison: what each is, its paper, its network and its settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foveate.baselines.data_sets import ALL, DataSet
from foveate.models.channels import PAPER_SCALES
from foveate.models.zoo import ModelConfig, model_config
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig
from foveate.training.presets import preset

CHANNELS = "Jansson and Lindeberg, ICPR 2020"
SIZES = "Simonyan and Zisserman, ICLR 2015"
STIR = "Altstidl et al., IJCNN 2023"
SESN = "Sosnovik, Szmaja and Smeulders, ICLR 2020"
DISCO = "Sosnovik, Moskalev and Smeulders, BMVC 2021"
GAUSSIAN = "Lindeberg, JMIV 2022"
RIESZ = "Barisin, Schladitz and Redenbach, JMIV 2024"
PYRAMID, STEERABLE = "Image pyramid", "Steerable filters"  # families
DERIVATIVES, CEILING = "Gaussian derivatives", "Ceiling"
ONE = ScaleGrid(1, 1)  # one window, the frame itself
VALIDATIONS = 1  # at the end: no method keeps the weights of an earlier epoch


@dataclass(frozen=True, kw_only=True)
class Reference:
    """Accuracy of the authors' own network on MNIST Large Scale in percent, for calibration.

    The mean is over the test scales `scales`, or over all 17 if they are empty.
    """

    trained: str
    mean: float
    scales: tuple[float, ...] = ()
    origin: str = "the authors' code"


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method of the comparison.

    Args:
        name: Name on the command line.
        title: Description for readers.
        paper: Authors, venue and year of the paper that the method follows.
        family: Group of related methods, which share a panel of the figures.
        model: Function that returns the network for a dataset.
        backbone: Factory in ``foveate.baselines``; empty for the paper's network.
        backbone_by_data: Factories for some datasets, by name.
        settings: Settings chosen on validation images; `config` adds the images and the network.
        settings_by_data: Settings for some datasets, by name.
        zooms: Whether training images are zoomed at random, see `DataSet.objects`.
        trained: ``each`` for a run per training set of a dataset, ``all`` for one run on all test
            scales, or ``expert`` for a run per test scale, tested at that scale only.
        runs_of: Method whose trained networks are tested; empty for runs of its own.
        presets: Presets of the runs on some datasets, by name; the training set completes the name
            of a preset.
        reference: Accuracy that the method must reach before it is compared.
        zoom: Windows of a test in scale channels, as multiples of the frame; None tests the network
            as trained.
        missing: Reason why the method cannot be used, by dataset.

    Examples:
        >>> from foveate.baselines.data_sets import DATA_SETS
        >>> config = METHODS["fovmax"].config(DATA_SETS["mnist"], "2")
        >>> config.scales, config.batch, len(config.model.scales)
        ('2', 16, 17)
        >>> METHODS["sesn"].config(DATA_SETS["mnist"], "2").backbone
        'foveate.baselines.steerable:network'
    """

    name: str
    title: str
    paper: str
    family: str
    model: Callable[[DataSet], ModelConfig]
    backbone: str = ""
    backbone_by_data: Mapping[str, str] = field(default_factory=dict)
    settings: TrainConfig = field(default_factory=TrainConfig)
    settings_by_data: Mapping[str, TrainConfig] = field(default_factory=dict)
    zooms: bool = False
    trained: Literal["each", "all", "expert"] = "each"
    runs_of: str = ""
    presets: Mapping[str, str] = field(default_factory=dict)
    reference: Reference | None = None
    zoom: tuple[float, float] | None = None
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def run_name(self) -> str:
        """Name of the method whose runs this method tests: its own, or `runs_of`."""
        return self.runs_of or self.name

    def trainings(self, data: DataSet) -> tuple[str, ...]:
        """Return the training sets of the method.

        Args:
            data: The dataset.

        Returns:
            Names of training sets; empty if the method cannot be used.
        """
        if data.name in self.missing:
            return ()
        found = {"each": data.trained, "all": (ALL,), "expert": data.experts}[self.trained]
        return () if data.few and self.trained != "each" else found

    def config(self, data: DataSet, trained: str) -> TrainConfig:
        """Return the configuration of a run.

        Args:
            data: The dataset.
            trained: One of the training sets that `trainings` returns.

        Returns:
            The configuration, with seed 0.

        Raises:
            ConfigError: If the dataset has no source.
        """
        images = data.images(trained, zooms=self.zooms)
        if data.name in self.presets:
            found = preset(self.presets[data.name] + trained)
            model = _fitted(found.model, data)
            return replace(found, source=data.source, model=model, validations=VALIDATIONS)
        settings = self.settings_by_data.get(data.name, self.settings)
        epochs = settings.epochs * data.repeats(trained)
        return replace(
            settings,
            model=self.model(data),
            backbone=self.backbone_by_data.get(data.name, self.backbone),
            epochs=epochs,
            epochs_per_decay=epochs / 10,
            validations=VALIDATIONS,
            **images,
        )


def _frame(data: DataSet) -> ModelConfig:
    """Return one window that is the frame, around a backbone."""
    return _fitted(ModelConfig(scales=ONE, size=data.frame, pool="avg"), data)


def _cnn(data: DataSet) -> ModelConfig:
    """Return the paper's CNN on the whole frame; photographs need a window around it."""
    form: dict[str, Any] = {"form": "foveated", "pool": "avg", "scales": ONE}
    changes = form if data.recipe == "photo" else {}
    return _fitted(model_config("cnn", size=data.frame, **changes), data)


def _channels(name: str) -> Callable[[DataSet], ModelConfig]:
    """Return a function for a network of the paper with the channels of a dataset."""
    return lambda data: _fitted(model_config(name, size=data.image, scales=data.windows), data)


def _fovplus(data: DataSet) -> ModelConfig:
    """Return FovAvg with wider layers; 108,390 weights for digits.

    For Fashion-MNIST and colour images, the channels are antialiased. On CIFAR-10, two per octave
    are as accurate as four, and `logsumexp` is 0.5 points better than the average (docs/log.md).
    """
    model = _channels("fovavg")(data)
    model = replace(model, features=(16, 16, 48, 48), antialias=data.name != "mnist")
    if data.channels == 1:
        return model
    scales = ScaleGrid(data.windows.low, data.windows.high, per_octave=2)
    return replace(model, scales=scales, pool="logsumexp")


def _residual(data: DataSet) -> ModelConfig:
    """Return one antialiased window that is the frame, for the backbone of `fovplus`."""
    return replace(_frame(data), antialias=True)


def _fovconc(data: DataSet) -> ModelConfig:
    """Return FovConc with one channel per octave; 3 for digits, and 17 with few samples.

    Both numbers for digits are those of the paper.
    """
    three = data.windows == PAPER_SCALES
    low, high = (1.0, 4.0) if three else (data.windows.low, data.windows.high)
    scales = data.windows if data.few else ScaleGrid(low, high, per_octave=1)
    return _fitted(model_config("fovconc", size=data.image, scales=scales), data)


def _fitted(model: ModelConfig, data: DataSet) -> ModelConfig:
    """Return a network with the image channels and classes of a dataset."""
    antialias = data.recipe == "photo"
    return replace(model, channels=data.channels, classes=data.classes, antialias=antialias)


NOT_ZOOMED = {
    "photographs": "this is cnn-all-scales",
    "mnist-few": "the images already have scales of 1 to 4",
}
COLOUR, OTHERS = ("cifar10", "photographs"), ("mnist", "fashion-mnist", "mnist-few")
_COSINE = TrainConfig(schedule="cosine", warmup=0.1, smallest_rate=1e-6)
_FOVPLUS = replace(_COSINE, weight_decay=0.02, label_smoothing=0.05)
_COLOUR_FOVPLUS = replace(_FOVPLUS, batch=64)
GREY_EXPERT = dict.fromkeys(COLOUR, "residual-expert is better")
NOT_SLIDING = {"photographs": "sliding windows do not support images of different sizes"}
_CNN = Method(name="cnn", title="CNN on the whole frame", paper=CHANNELS, family="CNN", model=_cnn)
_FOVMAX = Method(
    name="fovmax",
    title="foveated channels, maximum",
    paper=CHANNELS,
    family="Scale channels",
    model=_channels("fovmax"),
    settings=TrainConfig(batch=16),
    settings_by_data={"mnist-few": TrainConfig()},
)

_RESIDUAL = Method(
    name="residual-zooms",
    title="the network of fovplus on the whole frame, zooms in training",
    paper="foveate, 2026",
    family="CNN",
    model=_residual,
    backbone="foveate.baselines.residual:network",
    settings=_COLOUR_FOVPLUS,
    zooms=True,
    missing=dict.fromkeys(OTHERS, "a control for colour images"),
)


def _baseline(
    name: str,
    title: str,
    paper: str,
    family: str,
    factory: str,
    rate_and_epochs: tuple[float, int],
    for_colour: tuple[float, int],
    reference: Reference | None = None,
) -> Method:
    """Return a method of other authors, with a learning rate and epochs for two kinds of images.

    `rate_and_epochs` are those for MNIST Large Scale and Fashion-MNIST, chosen on validation images
    of the former, and `for_colour` those for CIFAR-10, chosen on its validation images.
    Photographs, whose frames have four times as many pixels, have half of the epochs of the latter.
    With few samples, the rate is that of the former, and the number of epochs that of the latter.

    Epochs take longer than ours: estimated from the time of a step on one H200, training takes 1 to
    4 times as long as that of `fovplus` on MNIST Large Scale, and 0.5 to 1.4 times on CIFAR-10.
    """
    grey, colour = (
        replace(_COSINE, learning_rate=rate, epochs=epochs)
        for rate, epochs in (rate_and_epochs, for_colour)
    )
    wide = name.endswith("-wide")
    return Method(
        name=name,
        title=title,
        paper=paper,
        family=family,
        model=_frame,
        backbone=f"foveate.baselines.{factory}",
        settings=grey,
        settings_by_data={
            "cifar10": colour,
            "photographs": replace(colour, epochs=colour.epochs // 2),
            "mnist-few": replace(grey, epochs=colour.epochs),
        },
        reference=reference,
        missing={"mnist-few": "the scales of training and test are the same"} if wide else {},
    )


_METHODS = (
    _CNN,
    replace(_CNN, name="cnn-all-scales", title="CNN, trained on all test scales", trained="all"),
    replace(
        _CNN,
        name="cnn-zooms",
        title="CNN, training images magnified and reduced at random",
        zooms=True,
        missing=NOT_ZOOMED,
    ),
    replace(
        _CNN,
        name="cnn-averaged",
        title="the trained CNN, logits averaged over five input sizes",
        paper=SIZES,
        runs_of="cnn",
        zoom=(0.5, 2.0),
    ),
    _baseline(
        "pyramid", "image pyramid, 4 levels", STIR, PYRAMID, "pyramid:network",
        (1e-2, 4), (3e-3, 20), Reference(trained="2", mean=80.2),
    ),
    _baseline(
        "pyramid-wide", "image pyramid, levels for all test scales", STIR, PYRAMID, "pyramid:wide",
        (1e-2, 3), (3e-3, 20),
    ),
    _baseline(
        "sesn", "scale-steerable filters", SESN, STEERABLE, "steerable:network",
        (3e-3, 2), (1e-3, 10), Reference(trained="2", mean=65.7),
    ),
    _baseline(
        "sesn-wide", "scale-steerable filters, scales over a factor of 8", SESN, STEERABLE,
        "steerable:wide", (3e-3, 2), (1e-3, 10),
    ),
    _baseline(
        "disco", "discrete scale-steerable filters", DISCO, STEERABLE, "steerable:discrete",
        (3e-3, 2), (1e-3, 10), Reference(trained="2", mean=55.6),
    ),
    _baseline(
        "disco-wide", "discrete scale-steerable filters, scales over a factor of 8", DISCO,
        STEERABLE, "steerable:discrete_wide", (3e-3, 2), (1e-3, 10),
    ),
    _baseline(
        "gaussian", "Gaussian derivatives, maximum over channels", GAUSSIAN, DERIVATIVES,
        "gaussian_derivatives:network", (3e-3, 4), (1e-2, 20),
    ),
    _baseline(
        "gaussian-wide", "Gaussian derivatives, channels for all test scales", GAUSSIAN,
        DERIVATIVES, "gaussian_derivatives:wide", (3e-3, 4), (1e-2, 20),
    ),
    _baseline(
        "riesz", "Riesz transforms", RIESZ, "Riesz transforms", "riesz:network",
        (1e-2, 3), (1e-2, 10),
        Reference(trained="1", mean=88.31, scales=(0.5, 1, 2, 4, 8), origin="the paper"),
    ),
    _FOVMAX,
    replace(
        _FOVMAX, name="fovavg", title="foveated channels, average", model=_channels("fovavg")
    ),
    replace(
        _FOVMAX,
        name="swmax",
        title="sliding windows, maximum",
        model=_channels("swmax"),
        settings=TrainConfig(),
        missing=NOT_SLIDING,
    ),
    replace(
        _FOVMAX,
        name="fovconc",
        title="foveated channels, concatenated",
        model=_fovconc,
        settings=TrainConfig(),
    ),
    replace(
        _FOVMAX,
        name="fovplus",
        title="foveated channels, zooms in training",
        paper="foveate, 2026",
        model=_fovplus,
        backbone_by_data=dict.fromkeys(COLOUR, "foveate.baselines.residual:network"),
        settings=_FOVPLUS,
        settings_by_data=dict.fromkeys(COLOUR, _COLOUR_FOVPLUS),
        zooms=True,
        presets={"mnist-few": "fovplus-few"},
    ),
    _RESIDUAL,
    replace(
        _CNN, name="cnn-expert", title="CNN, one per test scale", family=CEILING, trained="expert",
        runs_of="cnn", missing=GREY_EXPERT,
    ),
    replace(
        _FOVMAX, name="fovmax-expert", title="FovMax, one per test scale", family=CEILING,
        trained="expert", runs_of="fovmax", missing=GREY_EXPERT,
    ),
    replace(
        _RESIDUAL, name="residual-expert", family=CEILING, trained="expert",
        title="the network of fovplus on the whole frame, one per test scale", zooms=False,
    ),
)  # fmt: skip
METHODS = {method.name: method for method in _METHODS}
"""The methods by name. The experts give the ceiling: the accuracy if the test scale is known."""
