"""Images that a run leaves out because they cannot be used, and the table that lists them."""

import csv
import io
from pathlib import Path
from typing import Literal, TypeAlias, cast, get_args

from foveate.checks import check_choice
from foveate.errors import ConfigError
from foveate.files import escape_bytes, read_text, wrap_read_errors, write_csv
from foveate.training.config import TrainConfig, is_photo

Bad = Literal["stop", "skip"]
Skipped: TypeAlias = dict[tuple[str, str], str]
"""The reason why an image was left out, by split and name."""
TABLE = "skipped.csv"
COLUMNS = ["split", "image", "reason"]


def check_bad(bad: str, config: TrainConfig, processes: int = 1) -> Bad:
    """Return `bad`, the treatment of images that cannot be used, if the run supports it."""
    check_choice("bad", bad, get_args(Bad))
    if bad == "skip" and not is_photo(config):
        raise ConfigError("--bad skip needs the recipe photo; leave it out, or use --recipe photo")
    if bad == "skip" and processes > 1:
        raise ConfigError(
            f"--bad skip works in one process, not in {processes}; train without torchrun, or "
            "remove the images that cannot be used"
        )
    return cast(Bad, bad)


def read_skipped(folder: Path) -> Skipped:
    """Read the list of images that a run left out."""
    path = folder / TABLE
    if not path.exists():
        return {}
    with wrap_read_errors(path):
        rows = list(csv.reader(io.StringIO(read_text(path))))
        return {(split, image): reason for split, image, reason in rows[1:]}


def add_skipped(folder: Path, found: Skipped) -> None:
    """Add images to the table of a run, which is sorted by split and name."""
    known = read_skipped(folder)
    found = {(split, escape_bytes(image)): reason for (split, image), reason in found.items()}
    if found.keys() <= known.keys():
        return
    rows = sorted((*key, reason) for key, reason in {**found, **known}.items())
    write_csv(folder / TABLE, COLUMNS, rows)
