"""Scales and options with which the tests resample."""

import torch

from foveate.scales import ScaleGrid

PAPER = ScaleGrid(0.5, 8, per_octave=4)
PADDINGS = ["border", "reflect", 0, -0.7]
OPTIONS = [{"padding": p, "antialias": a} for p in PADDINGS for a in (False, True)]
LAYOUTS = {
    "rows": lambda images: images,
    "columns": lambda images: images.mT.contiguous().mT,
    "colours": lambda images: images.contiguous(memory_format=torch.channels_last),
    "every other pixel": lambda images: images.repeat_interleave(2, -1)[..., ::2],
    "one image": lambda images: images[:1].expand(images.shape),
}
