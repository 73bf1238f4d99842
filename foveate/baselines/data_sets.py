"""The datasets of the comparison: images, test scales, and the sets on which methods train."""

from dataclasses import dataclass, replace
from typing import Any

from foveate.data.recipes import Recipe, find_recipe
from foveate.data.sources import Load, open_source
from foveate.data.splits import Source
from foveate.errors import ConfigError
from foveate.models.channels import PAPER_SCALES
from foveate.scales import ScaleGrid
from foveate.training.data import open_pictures

ALL = "all"
"""The training set in which each image is shown at one of the test scales."""
FEW_SCALES = "1-4"  # training scales with few samples, as in Table III of the paper
WHOLE = 10_000  # samples from which on a run has its usual number of epochs
MOST_REPEATED = 20  # times as many epochs, with few samples


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A dataset on which methods are compared.

    Args:
        name: Name on the command line.
        title: Description for readers.
        source: Data source; empty if the user must name it with ``--source``.
        scales: Test scales.
        trained: Training sets: the training scales, or with ``few`` the numbers of samples.
        image: Width and height in pixels of an image at scale 1; with the recipe ``photo``, its
            short side.
        frame: Width and height in pixels of the frame in which images are shown.
        channels: Number of image channels.
        classes: Number of classes.
        recipe: Preprocessing, see `foveate.data.recipes`.
        few: Whether the training sets are numbers of samples, shown at scales of 1 to 4.
        windows: Scales of the channels of a network whose channels cover the test scales.
        repeated: Factor of the number of epochs, for a dataset of few images.
        objects: Smallest and largest scale of objects that random zooms of the training images
            show, see ``TrainConfig.zooms``; with the recipe ``photo``, see ``Recipe.sizes``.

    Examples:
        >>> mnist = DATA_SETS["mnist"]
        >>> len(mnist.scales), mnist.trained, mnist.images("2")["scales"]
        (17, ('1', '2', '4'), '2')
        >>> DATA_SETS["mnist-few"].images("100")["samples"]
        100
    """

    name: str
    title: str
    source: str
    scales: ScaleGrid
    trained: tuple[str, ...] = ("1",)
    image: int = 28
    frame: int = 112
    channels: int = 1
    classes: int = 10
    recipe: str = "mnist-large-scale"
    few: bool = False
    windows: ScaleGrid = PAPER_SCALES
    repeated: int = 1
    objects: tuple[float, float] = (0.354, 11.32)  # half an octave beyond the paper's test scales

    @property
    def experts(self) -> tuple[str, ...]:
        """Training sets of a single test scale each; none with few samples."""
        return () if self.few else tuple(map(scale_text, self.scales))

    def describe(self, trained: str) -> str:
        """Return the name of a training set for readers.

        Args:
            trained: A training set: an entry of `trained` or `experts`, or ``all``.

        Returns:
            Text such as ``trained on scale 2``.
        """
        if trained == ALL:
            return "trained on all test scales"
        if self.few:
            return f"trained on {int(trained):,} samples"
        return f"trained on scale {float(trained):.3g}"

    def images(self, trained: str, *, zooms: bool = False) -> dict[str, Any]:
        """Return the fields of a `TrainConfig` that define the training images.

        Args:
            trained: A training set: an entry of `trained` or `experts`, or ``all``.
            zooms: Whether images are zoomed at random, to show objects of the scales `objects`.

        Returns:
            Values by field name.

        Raises:
            ConfigError: If the dataset has no source.
        """
        if not self.source:
            raise ConfigError(
                f"the dataset {self.name} has no default source; "
                f"add --source {self.name}=folder:DIR"
            )
        low, high = self.scales.low, self.scales.high
        grid = f"{low:g}:{high:g}:{self.scales.per_octave:g}"
        found: dict[str, Any] = {"source": self.source, "size": self.frame}
        if self.few:
            return {**found, "scales": FEW_SCALES, "samples": int(trained)}
        if self.recipe == "photo":
            sizes = (low, high) if trained == ALL else (float(trained), float(trained))
            sizes = self.objects if zooms else sizes
            recipe = Recipe(name="photo", base=self.image, sizes=sizes)
            return {**found, "scales": "1", "recipe": recipe}
        if zooms:
            found["zooms"] = tuple(scale / float(trained) for scale in self.objects)
        if self.recipe != "mnist-large-scale":
            found["recipe"] = find_recipe(self.recipe)
        return {**found, "scales": grid if trained == ALL else trained}

    def repeats(self, trained: str) -> int:
        """Return the factor by which the number of epochs grows with few images.

        Args:
            trained: One of `trained`.

        Returns:
            `repeated`; with few samples a factor of at most 20. All few-sample runs of the paper's
            networks have at most 200,000 images in all, see `foveate.training.presets`.
        """
        return min(MOST_REPEATED, WHOLE // int(trained)) if self.few else self.repeated

    def with_source(self, source: str, load: Load) -> "DataSet":
        """Replace the source, and adapt the number of channels and classes to it.

        Args:
            source: Name of a data source.
            load: Function that loads a source by name.

        Returns:
            The dataset with that source.

        Raises:
            ConfigError: If the dataset needs photographs, and the source has none.
            DataError: If the source is unknown or missing.
        """
        found = open_pictures(source) if self.recipe == "photo" else open_source(source, load)
        channels = found.shape[0] if isinstance(found, Source) else self.channels
        return replace(self, source=source, channels=channels, classes=found.num_classes)


def scale_text(scale: float) -> str:
    """Return a scale as text that gives the same number when it is parsed."""
    return f"{scale:g}" if float(f"{scale:g}") == scale else repr(scale)


_MNIST = DataSet(
    name="mnist",
    title="MNIST Large Scale",
    source="mnist",
    scales=PAPER_SCALES,
    trained=("1", "2", "4"),
)
_SETS = (
    _MNIST,
    replace(
        _MNIST,
        name="fashion-mnist",
        title="Fashion-MNIST, rescaled like MNIST Large Scale",
        source="fashion-mnist",
    ),
    DataSet(
        name="cifar10",
        title="CIFAR-10, mirrored into frames of 64 pixels and rescaled",
        source="cifar10",
        scales=ScaleGrid(0.5, 2, per_octave=4),
        image=32,
        frame=64,
        channels=3,
        recipe="mirrored",
        windows=ScaleGrid(0.5, 2, per_octave=4),
        objects=(0.5, 2.0),  # the test scales; half an octave beyond costs 3 points (docs/log.md)
    ),
    DataSet(
        name="photographs",
        title="Photographs, trained from random weights",
        source="",
        scales=ScaleGrid(0.25, 2, per_octave=2),
        image=64,
        frame=128,
        channels=3,
        recipe="photo",
        windows=ScaleGrid(0.25, 2, per_octave=2),
        repeated=4,
        objects=(0.25, 2.0),  # the test scales
    ),
    DataSet(
        name="mnist-few",
        title="MNIST Large Scale with few training samples",
        source="mnist",
        scales=ScaleGrid(1, 4, per_octave=4),
        trained=("100", "1000", "10000"),
        few=True,
    ),
)
DATA_SETS = {data.name: data for data in _SETS}
"""The datasets by name."""
