"""Check the fields of a request one by one."""

from foveate.errors import DataError


def integer(name: str, value: object, low: int, high: int) -> int:
    """Return a field that must be an integer in a range."""
    if type(value) is not int or not low <= value <= high:
        raise DataError(f"{name} must be an integer from {low} to {high}, got {_shown(value)}")
    return value


def number(name: str, value: object, low: float, high: float) -> float:
    """Return a field that must be a number in a range."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name} must be a number from {low:g} to {high:g}, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    """A value from a request in a few characters: its repr may be long, or nested too deeply."""
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else "a JSON structure"
