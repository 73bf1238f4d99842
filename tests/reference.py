"""The data-set recipe again in float64: direct sums pixel by pixel, no matrices, no torch."""

import math

import numpy as np
from scipy.special import ive


def keys(x):
    x = abs(x)
    if x < 1:
        return 1.5 * x**3 - 2.5 * x**2 + 1
    return -0.5 * x**3 + 2.5 * x**2 - 4 * x + 2 if x < 2 else 0.0


def interpolate(line, position, width):
    """The value at `position` of a line of pixels whose edges are repeated for ever."""
    total = weight_sum = 0.0
    for j in range(math.floor(position - 2 * width) - 1, math.ceil(position + 2 * width) + 1):
        weight = keys((position - (j + 0.5)) / width)
        total = total + weight * line[min(max(j, 0), len(line) - 1)]
        weight_sum += weight
    return total / weight_sum


def embed(image, scale, size):
    height, width = image.shape
    widening = max(1.0, 1 / scale)
    frame = np.zeros((size, size))
    at = [[(i + 0.5 - size / 2) / scale + n / 2 for i in range(size)] for n in (height, width)]
    inside = [
        [i for i in range(size) if -1e-9 <= at[k][i] <= n + 1e-9]
        for k, n in ((0, height), (1, width))
    ]
    for i in inside[0]:
        row = interpolate(image, at[0][i], widening)  # rows are the elements of a 2-D array
        for j in inside[1]:
            frame[i, j] = interpolate(row, at[1][j], widening)
    return np.clip(frame, 0, 256)


PAD = {"replicate": "edge", "reflect": "reflect", "zero": "constant"}


def smooth(frame, scale, border):
    variance, size = (7 * scale / 8) ** 2, len(frame)
    reach = size - 1 if border == "reflect" else math.ceil(10 * math.sqrt(variance)) + 10
    kernel = ive(np.abs(np.arange(-reach, reach + 1)), variance)
    for axis in (0, 1):
        pad = [(reach, reach) if k == axis else (0, 0) for k in (0, 1)]
        lines = np.moveaxis(np.pad(frame, pad, PAD[border]), axis, 0)
        sums = sum(kernel[n] * lines[n : n + size] for n in range(2 * reach + 1))
        frame = np.moveaxis(sums, 0, axis)
    return frame


def rescale(image, scale, size=112, border="replicate"):
    if border == "whole":
        margin = math.ceil(10 * 7 * scale / 8) + 10
        wide = smooth(embed(image, scale, size + 2 * margin), scale, "zero")
        frame = wide[margin:-margin, margin:-margin]
    else:
        frame = smooth(embed(image, scale, size), scale, border)
    frame = frame - frame.min()
    frame = frame * (255 / frame.max() if frame.max() > 0 else 0)
    return 2 / math.pi * np.arctan(0.02 * (frame - 128))
