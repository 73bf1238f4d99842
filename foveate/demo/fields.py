"""Validation of request fields."""

from foveate.errors import DataError


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Return a field after checking that it is an integer in a range."""
    if type(value) is not int or not low <= value <= high:
        raise DataError(f"{name} must be an integer from {low} to {high}, got {_shown(value)}")
    return value


def check_number(name: str, value: object, low: float, high: float) -> float:
    """Return a field after checking that it is a number in a range."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not low <= value <= high:
        raise DataError(f"{name} must be a number from {low:g} to {high:g}, got {_shown(value)}")
    return float(value)


def _shown(value: object) -> str:
    """Shorten a request value for a message: its repr can be long or too deeply nested."""
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else "a JSON structure"
