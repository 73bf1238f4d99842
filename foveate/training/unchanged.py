"""The checksum of a run's data: recorded when the run starts, compared when it is used again."""

import hashlib
import json
from contextlib import suppress

from foveate.data.pictures import PictureFolder
from foveate.data.shards import Shards
from foveate.data.sources import Load, Source, open_source
from foveate.data.store import ScaledFile
from foveate.errors import DataError
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import is_photo, made_files

LISTING = "listing:"  # begins checksums that do not cover the pixels


def source_checksum(source: str, load: Load, listing: bool = False) -> str:
    """Compute the sha256 of a source.

    Sources that are held in memory are hashed by content. Data set files and shards are too large
    to read through: their checksum, which begins with "listing:", covers the name, size, labels
    and manifest of each file, and the positions of pictures in a tar. With `listing`, that of a
    folder covers the relative path and size of each picture. A listing does not notice pixels that
    change while all sizes stay.
    """
    found = open_source(source, load, stream=listing)
    if isinstance(found, Source):
        return found.checksum
    lines = "\n".join(sorted(json.dumps(line) for line in found.listing()))
    return LISTING + hashlib.sha256(lines.encode()).hexdigest()


def record_data(
    folder: RunFolder, config: TrainConfig, load: Load, *, listing: bool, changed_data: bool
) -> None:
    """Record checksum and classes of the source in the run's folder, or compare the checksum.

    With `changed_data`, the new checksum is recorded and the one before kept as "earlier".
    """
    data, listing = folder.data(), listing or is_photo(config)
    before = data.get("checksum", "")
    found = source_checksum(config.source, load, _is_listing(before) if before else listing)
    if before and not changed_data:
        _compare(config.source, before, found, f"{folder.path} was started")
    names = data.get("classes") if before == found else None
    names = names or class_names(config.source, load, listing)
    new = {"source": config.source, "checksum": found} | ({"classes": names} if names else {})
    if before and before != found:
        new["earlier"] = [*data.get("earlier", []), before]
    if {**data, **new} != data:
        folder.record_data({**data, **new})


def class_names(source: str, load: Load, listing: bool = False) -> list[str]:
    """Name the classes of a source; nothing for shards and data set files, which number them."""
    found = open_source(source, load, stream=listing)
    named = found.shards[0] if isinstance(found, Shards) else found
    return list(named.classes) if isinstance(named, Source | PictureFolder) else []


def check_unchanged(folder: RunFolder, source: str, load: Load) -> None:
    """Refuse a source that the run was trained on, or its file made from, if it changed since.

    Other sources, and runs of versions that recorded no checksum, pass.
    """
    own, recorded = folder.config().source, folder.data().get("checksum", "")
    if source == own and recorded:
        found = source_checksum(source, load, _is_listing(recorded))
        _compare(source, recorded, found, f"{folder.path} was started")
    files: list[ScaledFile] = []
    with suppress(DataError):  # a file that is gone says nothing about the source
        files = made_files(own)
    for file in files[:1]:
        made = (file.manifest or {}).get("source", {})
        if made.get("name") == source:
            _compare(source, made["checksum"], load(source).checksum, f"{file.path} was made")


def _compare(source: str, before: str, now: str, since: str) -> None:
    if before != now:
        was, found = (checksum.removeprefix(LISTING)[:12] for checksum in (before, now))
        raise DataError(
            f"{source} changed since {since}: its checksum was {was} and is {found}; restore the "
            "data, train a new run with another --out, or pass --changed-data to use it as it is"
        )


def _is_listing(checksum: str) -> bool:
    return checksum.startswith(LISTING)
