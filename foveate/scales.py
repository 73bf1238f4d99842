"""Scale factors: geometric grids, ranges to draw from, and the text that commands take for them.

A text of scales lists items separated by commas:

- ``2``: one scale;
- ``1-4``: a range, drawn from log-uniformly, or four scales per octave where a list is needed;
- ``0.5:8:4``: a grid from 0.5 to 8, four scales per octave;
- ``all``: the paper's grid, 0.5:8:4.

A text of windows, ``56-448``, gives the smallest and the largest window in pixels of the image.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from numbers import Real
from typing import Any

from foveate.checks import check_keys
from foveate.errors import ConfigError

WHOLE = 1e-6  # how far from a whole number of steps a grid may end
MAX_SCALES = 1000
"""The largest number of scales, and so of scale channels."""
SMALLEST, LARGEST = 1 / 16, 64.0  # scales at which images can be made
PER_OCTAVE = 4  # of the paper's grid, and of a range where single scales are needed
SCALES_HELP = "A list 0.5,1,2, a range 1-4, a grid 0.5:8:4 (4 per octave), or all: 0.5:8:4."


@dataclass(frozen=True)
class ScaleGrid:
    """The scales low · 2^(k / per_octave), k = 0, 1, …, up to and including high.

    `ScaleGrid(0.5, 8, per_octave=4)` is the paper's set of 17 scale channels. Whole octaves
    above `low` are exact floats, so that grid holds exactly 0.5, 1.0, 2.0, 4.0 and 8.0.
    """

    low: float
    high: float
    per_octave: float = PER_OCTAVE
    values: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("low", "high", "per_octave"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.high < self.low:
            raise ConfigError(f"high must be at least low, got {self.low:g} to {self.high:g}: swap")
        if self.per_octave == int(self.per_octave):
            object.__setattr__(self, "per_octave", int(self.per_octave))
        count = self._steps() + 1
        object.__setattr__(self, "values", tuple(self._scale(k) for k in range(count)))

    def _steps(self) -> int:
        """The number of steps from low to high, which must be whole."""
        steps = (math.log2(self.high) - math.log2(self.low)) * self.per_octave
        _check_count(steps + 1)
        if abs(steps - round(steps)) > WHOLE:
            fitting = self._scale(round(steps))
            raise ConfigError(
                f"high={self.high:g} is not a whole number of steps above low={self.low:g} "
                f"with per_octave={self.per_octave:g}: the nearest high that fits is {fitting!r}"
            )
        return round(steps)

    def _scale(self, step: int) -> float:
        """Scale number `step`, its whole octaves applied by exponent so that they are exact."""
        octaves = step / self.per_octave
        whole = math.floor(octaves)
        return math.ldexp(self.low * 2.0 ** (octaves - whole), whole)

    @classmethod
    def parse(cls, text: str) -> ScaleGrid:
        """Read one grid: ``0.5:8:4``, ``all``, a range with 4 scales per octave, or one scale."""
        if "," in text:
            raise ConfigError(f"a scale grid is low:high:per_octave, as 0.5:8:4, got {text!r}")
        low, *rest = _numbers(text)
        return cls(low, *(rest or [low]))

    @classmethod
    def windows(
        cls, smallest: float, largest: float, size: int, per_octave: float = 2
    ) -> ScaleGrid:
        """Build the grid whose windows reach from `smallest` to `largest` pixels of the image.

        The channel of scale s sees a window of ``size * s`` pixels. The smallest window is exact.
        The number of steps is rounded up, so the largest window is `largest` or, if that is not a
        whole number of steps above `smallest`, less than one step larger.

        Args:
            smallest: Side of the smallest window in pixels.
            largest: Side of the largest window in pixels.
            size: Side of the patches that the backbone receives, in pixels.
            per_octave: Number of windows per factor of 2.

        Returns:
            The grid of scales, from ``smallest / size`` upwards.

        Raises:
            ConfigError: If an argument is not a positive number, `largest` is below `smallest`, or
                there would be more than 1,000 windows.

        Example:
            >>> [160 * scale for scale in ScaleGrid.windows(40, 160, size=160, per_octave=1)]
            [40.0, 80.0, 160.0]
        """
        given = {"smallest": smallest, "largest": largest, "size": size, "per_octave": per_octave}
        low, high, side, density = (_positive(name, value) for name, value in given.items())
        if high < low:
            raise ConfigError(f"largest must be at least smallest, got {low:g} to {high:g}: swap")
        steps = math.ceil((math.log2(high) - math.log2(low)) * density - WHOLE)
        _check_count(steps + 1)
        return cls(low / side, low / side * 2.0 ** (steps / density), per_octave)

    @property
    def spacing(self) -> float:
        """The ratio of two neighbouring scales."""
        return float(2.0 ** (1 / self.per_octave))

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __contains__(self, scale: object) -> bool:
        """Whether `scale` is one of these, up to the rounding of a float."""
        return isinstance(scale, Real) and any(
            math.isclose(float(scale), value, rel_tol=1e-12) for value in self.values
        )

    def __str__(self) -> str:
        if len(self) == 1:
            return f"1 scale, {_readable(self.low)}"
        ends = f"from {_readable(self.low)} to {_readable(self.high)}"
        return f"{len(self)} scales {ends}, {self.per_octave:g} per octave"

    def to_dict(self) -> dict[str, float]:
        """The three numbers that make this grid, ready for JSON."""
        return {"low": self.low, "high": self.high, "per_octave": self.per_octave}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScaleGrid:
        """The grid that `to_dict` wrote down."""
        check_keys("a scale grid", values, {"low", "high", "per_octave"})
        if missing := sorted({"low", "high"} - set(values)):
            raise ConfigError(f"a scale grid needs low and high: {missing[0]} is missing")
        return cls(**values)


@dataclass(frozen=True)
class ScaleRange:
    """Scales drawn log-uniformly from low to high, or one scale if the two are equal."""

    low: float
    high: float

    def __post_init__(self) -> None:
        check_scale(self.low)
        check_scale(self.high)
        if self.low > self.high:
            raise ConfigError(f"scale range {self.low:g}-{self.high:g} is reversed, swap the two")

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"

    def values(self) -> tuple[float, ...]:
        """Four scales per octave from low to high, both included."""
        steps = math.ceil(PER_OCTAVE * math.log2(self.high / self.low) - WHOLE)
        return (*(self.low * 2.0 ** (k / PER_OCTAVE) for k in range(steps)), self.high)


def check_scale(scale: float) -> float:
    """Return `scale` if images can be made at it, otherwise raise a ConfigError."""
    if not SMALLEST <= scale <= LARGEST:  # also refuses NaN
        raise ConfigError(f"scale must lie between 1/16 and {LARGEST:g}, got {scale:g}")
    return scale


def parse_scales(text: str) -> tuple[ScaleRange, ...]:
    """Parse scales to draw from; a grid is expanded to the list of its scales.

    Example:
        >>> [str(item) for item in parse_scales("0.5,1-4,1:4:1")]
        ['0.5', '1-4', '1', '2', '4']
    """
    found: list[ScaleRange] = []
    for item in text.split(","):
        numbers = _numbers(item)
        grid = ScaleGrid(*numbers) if len(numbers) == 3 else ()
        found += [ScaleRange(s, s) for s in grid] or [ScaleRange(numbers[0], numbers[-1])]
        _check_count(len(found))
    return tuple(found)


def parse_windows(text: str, size: int, per_octave: float = 2) -> ScaleGrid:
    """Read windows in pixels, ``56-448`` or one window ``112``, as `ScaleGrid.windows` does.

    Args:
        text: The smallest and the largest window, or the only one.
        size: Side of the patches that the backbone receives, in pixels.
        per_octave: Number of windows per factor of 2.

    Raises:
        ConfigError: If the text has another form, or `ScaleGrid.windows` refuses the numbers.

    Example:
        >>> parse_windows("40-160", size=160, per_octave=1).values
        (0.25, 0.5, 1.0)
    """
    number = r"([0-9]+(?:\.[0-9]+)?)"
    found = re.fullmatch(rf"{number}(?:-{number})?", text.strip())
    if found is None:
        raise ConfigError(
            "windows must look like 56-448 (pixels of the smallest and the largest window), "
            f"got {text!r}"
        )
    smallest, largest = found[1], found[2] or found[1]
    return ScaleGrid.windows(float(smallest), float(largest), size, per_octave)


def _numbers(item: str) -> tuple[float, ...]:
    """The numbers of one item: (scale,), (low, high) of a range, (low, high, per_octave)."""
    if item.strip() == "all":
        return (0.5, 8.0, PER_OCTAVE)
    grid = item.split(":")
    parts = grid if len(grid) == 3 else re.split(r"(?<=[\d.])-", item, maxsplit=1)
    try:
        return tuple(map(float, parts))
    except ValueError:
        raise ConfigError(
            "scales must look like 0.5,1,2 (a list), 1-4 (a range) or 0.5:8:4 (low:high:per octave)"
            f", got {item!r}"
        ) from None


def as_scales(scales: str | ScaleGrid | Iterable[float]) -> tuple[float, ...]:
    """The scales as a tuple of positive floats in strictly increasing order.

    Args:
        scales: A grid, numbers, or text as described above, where a range means 4 per octave.
    """
    if isinstance(scales, str):
        ranges = parse_scales(scales)
        scales = [scale for item in ranges for scale in item.values()]
    if isinstance(scales, ScaleGrid):
        return scales.values
    if isinstance(scales, Real) or not isinstance(scales, Iterable):
        raise ConfigError(f"scales must be a list of numbers, got {scales!r}: write [1.0] for one")
    values = tuple(_positive("each scale", scale) for scale in islice(scales, MAX_SCALES + 1))
    _check_count(len(values))
    if not values:
        raise ConfigError("no scales given: name at least one, such as [1.0]")
    for before, after in pairwise(values):
        if after <= before:
            raise ConfigError(
                f"scales out of order: {after:g} follows {before:g}; "
                "list each scale once, smallest first (a grid is low:high:per_octave)"
            )
    return values


def _check_count(count: float) -> None:
    if count > MAX_SCALES:
        raise ConfigError(f"{count:,.0f} scales are too many; the limit is {MAX_SCALES:,}")


def _positive(name: str, value: object) -> float:
    """`value` as a float, if it is a finite number above zero."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ConfigError(f"{name} must be a number above 0, got {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and number > 0):
        raise ConfigError(f"{name} must be finite and above 0, got {number:g}")
    return number


def _readable(scale: float) -> str:
    """A scale for people: 1/2 for 0.5, otherwise its shortest usual form."""
    inverse = 1 / scale
    if scale < 1 and inverse == round(inverse):
        return f"1/{round(inverse)}"
    return f"{scale:g}"
