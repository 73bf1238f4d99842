"""Measure memory and speed of training on shards, for a small and a ten times larger dataset.

python benchmarks/streaming.py                    an epoch of 1 GB and of 10 GB of HDF5 shards
python benchmarks/streaming.py --kind tar         the same with tar files of images
python benchmarks/streaming.py --gigabytes 1,100  other sizes

Each size is trained in a separate process, whose peak memory is reported. One shard of 100 MB of
random images is written; all others are hard links to it.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
from PIL import Image

from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.training.config import TrainConfig
from foveate.training.loop import train

BYTES = 100_000_000  # size of a shard
SIDE = {"h5": 112, "tar": 256}  # side of an image in pixels
MODEL = ModelConfig(
    pool="avg", features=(16, 16), size=12, scales=ScaleGrid(1, 2, per_octave=1), hidden=8
)


def write_h5(path: Path, size: int, split: str) -> int:
    """Write an HDF5 shard of about `size` bytes; return the number of its images."""
    side, random = SIDE["h5"], np.random.default_rng(0)
    count = size // (4 * side**2)
    with h5py.File(path, "w") as file:
        file[f"x_{split}"] = random.random((count, side, side, 1), np.float32)
        file[f"y_{split}"] = random.integers(0, 10, count)
    return count


def write_tar(path: Path, size: int, split: str) -> int:
    """Write a tar file of images of about `size` bytes; return their number."""
    side, random = SIDE["tar"], np.random.default_rng(0)
    count = size // side**2
    with tarfile.open(path, "w") as tar:
        for index in range(count):
            picture = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (side, side), np.uint8)).save(picture, "png")
            for kind, content in (("png", picture.getvalue()), ("cls", b"%d" % (index % 10))):
                member = tarfile.TarInfo(f"{index:06}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return count


def write_data(folder: Path, kind: str, size: int) -> int:
    """Write `size` bytes of training shards; return the number of training images."""
    write = {"h5": write_h5, "tar": write_tar}[kind]
    write(folder / f"val-0.{kind}", BYTES // 10, "val")
    first = folder / f"train-0.{kind}"
    each, copies = write(first, BYTES, "train"), max(1, round(size / BYTES))
    for copy in range(1, copies):
        os.link(first, folder / f"train-{copy}.{kind}")
    return each * copies


def measure(folder: Path, kind: str) -> None:
    """Train for an epoch and print time and peak memory; runs in a separate process."""
    side = SIDE[kind]
    config = TrainConfig(
        model=MODEL, source=f"shards:{folder}", scales="1", size=side, batch=64, epochs=1
    )
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as run:
        train(config, Path(run))
    print(json.dumps({"peak, MB": peak_memory() / 1e6, "s": time.perf_counter() - start}))


def peak_memory() -> int:
    """Return the peak memory of this process in bytes; getrusage would include its parent's."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    ]
    return 1024 * int(line.split()[1])


def one_size(kind: str, size: int, place: Path | None) -> dict[str, float]:
    with tempfile.TemporaryDirectory(dir=place) as folder:
        count = write_data(Path(folder), kind, size)
        command = [sys.executable, __file__, "--kind", kind, "--measure", folder]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {"images": count, **found, "images per s": count / found["s"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kind", choices=[*SIDE], default="h5", help="kind of shard (default: h5)")
    parser.add_argument("--gigabytes", default="1,10", help="sizes to compare (default: 1,10)")
    parser.add_argument("--place", type=Path, help="folder for temporary data")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measure(options.measure, options.kind)
        sys.exit()
    peaks = []
    for gigabytes in map(float, options.gigabytes.split(",")):
        found = one_size(options.kind, round(gigabytes * 1e9), options.place)
        peaks.append(found["peak, MB"])
        shown = {key: round(value, 1) for key, value in found.items()}
        print(f"{gigabytes:g} GB of {options.kind}", json.dumps(shown), flush=True)
    print(f"peak memory differs by {max(peaks) - min(peaks):.0f} MB")
