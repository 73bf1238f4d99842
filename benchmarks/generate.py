"""Measure the MNIST Large Scale generator in images per second, against a SciPy loop over images.

python benchmarks/generate.py            2 CPU threads, scale 2
python benchmarks/generate.py --cuda     the paper's 17 test sets on a GPU, in memory
python benchmarks/generate.py --write    peak memory while writing the file of 50,000 images
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from scipy import ndimage
from scipy.special import ive

from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.data.store import BLOCK, FileSpec, write
from foveate.scales import ScaleRange


def scipy_loop(images: np.ndarray, scale: float) -> np.ndarray:
    """Apply the same preprocessing to one image after another, with SciPy."""
    sigma = 7 / 8 * scale
    reach = int(np.ceil(4 * sigma))
    kernel = ive(np.abs(np.arange(-reach, reach + 1)), sigma**2)
    frames = np.empty((len(images), 112, 112), np.float32)
    for index, image in enumerate(images):
        zoomed = ndimage.zoom(image.astype(np.float32), scale, order=3).clip(0, 256)
        height, width = zoomed.shape
        top, left = (112 - height) // 2, (112 - width) // 2
        frame = np.zeros((112, 112), np.float32)
        frame[top : top + height, left : left + width] = zoomed
        for axis in (0, 1):
            frame = ndimage.convolve1d(frame, kernel, axis=axis, mode="nearest")
        frame = 255 * (frame - frame.min()) / (frame.max() - frame.min())
        frames[index] = 2 / np.pi * np.arctan(0.02 * (frame - 128))
    return frames


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the median time of `work` in seconds, after one warm-up call."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def on_cpu() -> dict[str, float]:
    torch.set_num_threads(1)  # as in `write`, which uses one thread per block of images
    images = load_source("mnist-5k").train.images[:2560]
    plain = images[:500, 0].numpy()
    with ThreadPoolExecutor(2) as pool:
        ours = seconds(
            lambda: list(pool.map(lambda b: rescale(b, 2.0), torch.split(images, BLOCK))), 7
        )
    theirs = seconds(lambda: scipy_loop(plain, 2.0), 3)
    rates = {"ours": len(images) / ours, "scipy loop": len(plain) / theirs}
    return {**rates, "ratio": rates["ours"] / rates["scipy loop"]}


def on_gpu() -> dict[str, float]:
    digits = load_source("mnist-5k").train.images
    images = digits.repeat(3, 1, 1, 1)[:10_000].cuda()
    scales = [2 ** (k / 4) for k in range(-4, 13)]

    def all_sets() -> None:
        sets = [rescale(images, scale) for scale in scales]
        torch.cuda.synchronize()
        assert len(sets) == 17

    return {"images": 170_000, "seconds": seconds(all_sets, 5)}


def written() -> dict[str, float]:
    digits = load_source("mnist-5k")
    many = digits.train.images.repeat(15, 1, 1, 1)[:50_000], digits.train.labels.repeat(15)[:50_000]
    source = type(digits)("digits", type(digits.train)(*many), digits.val, digits.test, (), "")
    spec = FileSpec(train=ScaleRange(1, 4), test=ScaleRange(1, 4))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        start = time.perf_counter()
        write(spec, source, Path(folder))
        took = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"images": 51_500, "seconds": took, "peak memory GB": peak}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cuda", action="store_true", help="measure on a GPU")
    parser.add_argument("--write", action="store_true", help="measure memory while writing a file")
    options = parser.parse_args()
    found = on_gpu() if options.cuda else written() if options.write else on_cpu()
    print(json.dumps({key: round(value, 3) for key, value in found.items()}))
