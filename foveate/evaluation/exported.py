"""Read what `foveate export` stores in a file about its network: classes and preprocessing."""

from pathlib import Path
from typing import Any

from foveate.checks import check_names, check_range
from foveate.data.large_scale import check_border
from foveate.data.recipes import Recipe
from foveate.errors import ConfigError, DataError
from foveate.files import parse_json

DIGIT_SOURCES = ("mnist", "mnist-5k", "fashion-mnist")


def read_metadata(text: str, path: Path) -> dict[str, Any]:
    """Return the fields of a `foveate.evaluation.models.Model` that the metadata of a file states.

    Files of version 0.2.0 state no recipe for networks that were trained on digits.

    Raises:
        DataError: If the metadata is damaged.
    """
    if not text:
        return {}
    try:
        about = parse_json(text)
        found: dict[str, Any] = {"class_names": check_names(about.get("classes", []))}
        if found["class_names"]:
            found["source"] = str(about.get("source", ""))
        if recipe := about.get("recipe"):
            found["recipe"] = Recipe.from_dict(recipe)
        elif about.get("source") in DIGIT_SOURCES:
            found["recipe"] = Recipe()
        if "border" in about:
            found["border"] = check_border(about["border"])
        for name in {"mean", "std"} & set(about):
            found[name] = tuple(map(float, about[name]))
        check_range("std", min(found.get("std", (1.0,))), 1e-12, 1e12, "above 0")
    except (AttributeError, KeyError, TypeError, ValueError, ConfigError) as error:
        raise DataError(
            f"the metadata of {path} is damaged ({error}); export the network again"
        ) from None
    return found
