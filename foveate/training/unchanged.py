"""Checksums of the training data: stored when a run starts, compared when it is used again."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress

from foveate.data.pictures import PictureFolder
from foveate.data.shards import Shards
from foveate.data.sources import Load, Source, open_source
from foveate.data.store import ScaledFile
from foveate.errors import ConfigError, DataError
from foveate.training.checkpoint import RunFolder, RunWriter
from foveate.training.config import TrainConfig, is_photo
from foveate.training.data import generated_files

LISTING = "listing:"  # prefix of checksums that do not cover the pixels


def source_checksum(source: str, load: Load, listing: bool) -> str:
    """Compute the sha256 of a source.

    It covers the whole content of sources in memory. HDF5 files and shards are too large for that:
    their checksum begins with "listing:" and covers the name, size, labels and manifest of each
    file, and the positions of the images in a tar file; with `listing`, that of a folder covers the
    path and size of each image. It does not detect changed pixels if all sizes are equal.
    """
    found = open_source(source, load, stream=listing)
    if isinstance(found, Source):
        return found.checksum
    lines = "\n".join(sorted(json.dumps(line) for line in found.listing()))
    return LISTING + hashlib.sha256(lines.encode()).hexdigest()


def record_data(
    folder: RunWriter, config: TrainConfig, load: Load, *, listing: bool, changed_data: bool
) -> None:
    """Store checksum and classes of the source in the run's folder, or compare the checksum.

    With `changed_data`, a new checksum is stored and the previous one added to "earlier".
    """
    data, listing = folder.data(), listing or is_photo(config)
    before = data.get("checksum", "")
    found = source_checksum(config.source, load, before.startswith(LISTING) if before else listing)
    if before and not changed_data:
        _compare(config.source, before, found, f"{folder.path} was started")
    names = data.get("classes") if before == found else None
    if not names:
        names = names_of(open_source(config.source, load, stream=listing))
        check_classes(folder, config.source, names)
    new = {"source": config.source, "checksum": found} | ({"classes": names} if names else {})
    if before and before != found:
        new["earlier"] = [*data.get("earlier", []), before]
    if {**data, **new} != data:
        folder.update_record(data={**data, **new})


def names_of(images: Source | Shards) -> list[str]:
    """Return the class names of an opened source; empty for shards and HDF5 files."""
    named = images.shards[0] if isinstance(images, Shards) else images
    return list(named.classes) if isinstance(named, Source | PictureFolder) else []


def check_classes(folder: RunFolder, source: str, names: Sequence[str]) -> None:
    """Raise a ConfigError if a class of the run has another index among the `names` of a source.

    Labels are indices, so its images would count as another class. Other names, and indices that
    stand for unknown names, are accepted.
    """
    if list(names) == [str(index) for index in range(len(names))]:
        return
    for index, name in enumerate(known := folder.classes()):
        if name in names and names.index(name) != index:
            raise ConfigError(
                f"class {name!r} has index {names.index(name)} in {source}, but {index} in "
                f"{folder.path}; give {source} the {len(known)} classes of the run"
            )


def check_unchanged(folder: RunFolder, source: str, load: Load) -> None:
    """Raise a DataError if a source has changed since the run or its HDF5 file was made from it.

    Other sources, and runs of versions that stored no checksum, pass.
    """
    own, recorded = folder.config().source, folder.data().get("checksum", "")
    if source == own and recorded:
        found = source_checksum(source, load, recorded.startswith(LISTING))
        _compare(source, recorded, found, f"{folder.path} was started")
    files: list[ScaledFile] = []
    with suppress(DataError):  # without the file, there is nothing to compare
        files = generated_files(own)
    for file in files[:1]:
        made = (file.manifest or {}).get("source", {})
        if made.get("name") == source:
            _compare(source, made["checksum"], load(source).checksum, f"{file.path} was made")


def _compare(source: str, before: str, now: str, since: str) -> None:
    if before != now:
        was, found = (checksum.removeprefix(LISTING)[:12] for checksum in (before, now))
        raise DataError(
            f"{source} changed since {since}: its checksum was {was} and is {found}; restore the "
            "data, train a new run with another --out, or use the changed data with --changed-data"
        )
