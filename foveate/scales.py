"""Scale factors: geometric grids, ranges for random sampling, and their text format.

Scales as text are a comma-separated list of these items:

- ``2``: one scale;
- ``1-4``: a range for log-uniform sampling; it stands for four scales per octave where a list of
  scales is required;
- ``0.5:8:4``: a grid from 0.5 to 8 with four scales per octave;
- ``all``: the paper's grid, 0.5:8:4.

Windows as text, such as ``56-448``, are the smallest and the largest window in image pixels.
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

STEP_TOLERANCE = 1e-6  # tolerance in steps when testing for a whole number of steps
MAX_SCALES = 1000
"""The maximum number of scales, and therefore of scale channels."""
MIN_SCALE, MAX_SCALE = 1 / 16, 64.0  # range of scales at which images can be generated
PER_OCTAVE = 4  # density of the paper's grid, and of a range that is expanded to a list


@dataclass(frozen=True)
class ScaleGrid:
    """Geometric grid of scales: ``low * 2 ** (k / per_octave)`` from ``low`` to ``high``.

    ``ScaleGrid(0.5, 8, per_octave=4)`` is the paper's set of 17 scale channels. Whole octaves
    above ``low`` are exact floats, so this grid contains exactly 0.5, 1.0, 2.0, 4.0 and 8.0. A grid
    can be indexed and iterated over like a tuple of floats.

    Args:
        low: Smallest scale.
        high: Largest scale, a whole number of steps above ``low``.
        per_octave: Number of steps per factor of 2.

    Attributes:
        values: The scales as a tuple of floats, smallest first.

    Raises:
        ConfigError: If an argument is not a positive finite number, ``high`` is below ``low`` or
            not on the grid, or the grid has more than 1,000 scales.

    Examples:
        >>> grid = ScaleGrid(0.5, 8, per_octave=4)
        >>> len(grid), grid[0], grid[-1]
        (17, 0.5, 8.0)
        >>> list(ScaleGrid(1, 4, per_octave=1))
        [1.0, 2.0, 4.0]
    """

    low: float
    high: float
    per_octave: float = PER_OCTAVE
    values: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("low", "high", "per_octave"):
            object.__setattr__(self, name, _positive(name, getattr(self, name)))
        if self.high < self.low:
            raise ConfigError(
                f"high must be at least low, got {self.low:g} to {self.high:g}; swap them"
            )
        if self.per_octave == int(self.per_octave):
            object.__setattr__(self, "per_octave", int(self.per_octave))
        count = self._steps() + 1
        object.__setattr__(self, "values", tuple(self._scale(k) for k in range(count)))

    def _steps(self) -> int:
        """Return the number of steps from low to high; raise unless it is whole."""
        steps = (math.log2(self.high) - math.log2(self.low)) * self.per_octave
        _check_count(steps + 1)
        if abs(steps - round(steps)) > STEP_TOLERANCE:
            fitting = self._scale(round(steps))
            raise ConfigError(
                f"high={self.high:g} is not a whole number of steps above low={self.low:g} "
                f"with per_octave={self.per_octave:g}; the nearest valid high is {fitting!r}"
            )
        return round(steps)

    def _scale(self, step: int) -> float:
        """Return scale number `step`; whole octaves change only the exponent, so they are exact."""
        octaves = step / self.per_octave
        whole = math.floor(octaves)
        return math.ldexp(self.low * 2.0 ** (octaves - whole), whole)

    @classmethod
    def parse(cls, text: str) -> ScaleGrid:
        """Parse one grid from text.

        Args:
            text: A grid ``0.5:8:4``, ``all``, a range ``1-4`` (4 scales per octave), or one scale.

        Returns:
            The grid.

        Raises:
            ConfigError: If the text is a list or has another format, or the numbers are invalid.

        Examples:
            >>> ScaleGrid.parse("0.5:8:4")
            ScaleGrid(low=0.5, high=8.0, per_octave=4)
        """
        if "," in text:
            raise ConfigError(f"a scale grid is low:high:per_octave, such as 0.5:8:4, got {text!r}")
        low, *rest = _numbers(text)
        return cls(low, *(rest or [low]))

    @classmethod
    def windows(
        cls, smallest: float, largest: float, size: int, per_octave: float = 2
    ) -> ScaleGrid:
        """Build the grid whose windows range from ``smallest`` to ``largest`` image pixels.

        The channel of scale s sees a window of ``size * s`` pixels. The smallest window is exactly
        ``smallest``. The number of steps is rounded up. If ``largest`` is not a whole number of
        steps above ``smallest``, the largest window is therefore up to one step larger.

        Args:
            smallest: Side of the smallest window in pixels.
            largest: Side of the largest window in pixels.
            size: Side of the patches that the backbone receives, in pixels.
            per_octave: Number of windows per factor of 2.

        Returns:
            The grid of scales, from ``smallest / size`` upwards.

        Raises:
            ConfigError: If an argument is not a positive number, ``largest`` is below
                ``smallest``, or the grid would have more than 1,000 windows.

        Examples:
            >>> [160 * scale for scale in ScaleGrid.windows(40, 160, size=160, per_octave=1)]
            [40.0, 80.0, 160.0]
        """
        given = {"smallest": smallest, "largest": largest, "size": size, "per_octave": per_octave}
        low, high, side, density = (_positive(name, value) for name, value in given.items())
        if high < low:
            raise ConfigError(
                f"largest must be at least smallest, got {low:g} to {high:g}; swap them"
            )
        steps = math.ceil((math.log2(high) - math.log2(low)) * density - STEP_TOLERANCE)
        _check_count(steps + 1)
        return cls(low / side, low / side * 2.0 ** (steps / density), per_octave)

    @property
    def spacing(self) -> float:
        """Ratio of two neighbouring scales."""
        return float(2.0 ** (1 / self.per_octave))

    def __iter__(self) -> Iterator[float]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> float:
        return self.values[index]

    def __str__(self) -> str:
        if len(self) == 1:
            return f"1 scale, {_readable(self.low)}"
        ends = f"from {_readable(self.low)} to {_readable(self.high)}"
        return f"{len(self)} scales {ends}, {self.per_octave:g} per octave"

    def to_dict(self) -> dict[str, float]:
        """Return the three constructor arguments as a dict for JSON.

        Returns:
            Dict with the keys ``low``, ``high`` and ``per_octave``.
        """
        return {"low": self.low, "high": self.high, "per_octave": self.per_octave}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ScaleGrid:
        """Build a grid from the result of `to_dict`.

        Args:
            values: Dict with the keys ``low`` and ``high``, and optionally ``per_octave``.

        Returns:
            The grid.

        Raises:
            ConfigError: If a key is missing or unknown, or a value is invalid.
        """
        check_keys("a scale grid", values, {"low", "high", "per_octave"})
        if missing := sorted({"low", "high"} - set(values)):
            raise ConfigError(f"a scale grid requires low and high; {missing[0]} is missing")
        return cls(**values)


@dataclass(frozen=True)
class ScaleRange:
    """Range of scales for log-uniform sampling; one fixed scale if both ends are equal.

    Args:
        low: Smallest scale, at least 1/16.
        high: Largest scale, at most 64.

    Raises:
        ConfigError: If a scale is outside 1/16 to 64, or ``low`` is above ``high``.

    Examples:
        >>> str(ScaleRange(1, 4))
        '1-4'
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        check_scale(self.low)
        check_scale(self.high)
        if self.low > self.high:
            raise ConfigError(f"scale range {self.low:g}-{self.high:g} is reversed; swap its ends")

    def __str__(self) -> str:
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g}-{self.high:g}"

    def values(self) -> tuple[float, ...]:
        """Expand the range to single scales.

        Returns:
            Four scales per octave from ``low`` to ``high``, both included.
        """
        steps = math.ceil(PER_OCTAVE * math.log2(self.high / self.low) - STEP_TOLERANCE)
        return (*(self.low * 2.0 ** (k / PER_OCTAVE) for k in range(steps)), self.high)


def check_scale(scale: float) -> float:
    """Return `scale` if images can be generated at it, otherwise raise a ConfigError."""
    if not MIN_SCALE <= scale <= MAX_SCALE:  # also rejects NaN
        raise ConfigError(f"scale must lie between 1/16 and {MAX_SCALE:g}, got {scale:g}")
    return scale


def parse_scales(text: str) -> tuple[ScaleRange, ...]:
    """Parse a comma-separated list of scales, ranges and grids.

    Args:
        text: Items such as ``2``, ``1-4``, ``0.5:8:4`` or ``all``, separated by commas. The
            [module][foveate.scales] describes the format.

    Returns:
        One range per item. Single scales have equal ends, and a grid is expanded to its scales.

    Raises:
        ConfigError: If an item has another format, a scale is outside 1/16 to 64, or there are more
            than 1,000 scales.

    Examples:
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
    """Parse windows in pixels into a grid of scales.

    Args:
        text: The smallest and the largest window in image pixels, ``56-448``; the same with the
            number of windows per factor of 2, ``56:448:4``; or one window, ``112``.
        size: Side of the patches that the backbone receives, in pixels.
        per_octave: Number of windows per factor of 2, unless the text states it.

    Returns:
        The grid that `ScaleGrid.windows` builds.

    Raises:
        ConfigError: If the text has another format, or `ScaleGrid.windows` rejects the numbers.

    Examples:
        >>> parse_windows("40-160", size=160, per_octave=1).values
        (0.25, 0.5, 1.0)
        >>> parse_windows("40:160:1", size=160).values
        (0.25, 0.5, 1.0)
    """
    number = r"([0-9]+(?:\.[0-9]+)?)"
    found = re.fullmatch(rf"{number}(?:-{number}|:{number}:{number})?", text.strip())
    if found is None:
        raise ConfigError(
            "windows must look like 56-448 (the smallest and the largest window in pixels) or "
            f"56:448:4 (four per octave), got {text!r}"
        )
    smallest, largest = float(found[1]), float(found[2] or found[3] or found[1])
    return ScaleGrid.windows(smallest, largest, size, float(found[4] or per_octave))


def _numbers(item: str) -> tuple[float, ...]:
    """Parse one item to (scale,), (low, high) of a range, or (low, high, per_octave)."""
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
    """Return 1 to 1,000 positive scales in increasing order, or raise a ConfigError."""
    if isinstance(scales, str):
        ranges = parse_scales(scales)
        scales = [scale for item in ranges for scale in item.values()]
    if isinstance(scales, ScaleGrid):
        return scales.values
    if isinstance(scales, Real) or not isinstance(scales, Iterable):
        raise ConfigError(f"scales must be a list of numbers such as [1.0], got {scales!r}")
    values = tuple(_positive("each scale", scale) for scale in islice(scales, MAX_SCALES + 1))
    _check_count(len(values))
    if not values:
        raise ConfigError("no scales given; pass at least one, such as [1.0]")
    for before, after in pairwise(values):
        if after <= before:
            raise ConfigError(
                f"scales out of order: {after:g} follows {before:g}; "
                "list each scale once, smallest first (a grid is low:high:per_octave)"
            )
    return values


def _check_count(count: float) -> None:
    if count > MAX_SCALES:
        raise ConfigError(f"too many scales: got {count:,.0f}, the limit is {MAX_SCALES:,}")


def _positive(name: str, value: object) -> float:
    """Return `value` as a float if it is a finite number above zero, otherwise raise."""
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
    """Format a scale for display: 1/2 for 0.5, otherwise the shortest decimal form."""
    inverse = 1 / scale
    if scale < 1 and inverse == round(inverse):
        return f"1/{round(inverse)}"
    return f"{scale:g}"
