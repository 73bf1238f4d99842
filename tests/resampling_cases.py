"""Scales and options with which the tests resample, and the op as one einsum."""

import torch

from foveate.resampling.definition import PatchSpec, _by_definition
from foveate.scales import ScaleGrid, as_scales

PAPER = ScaleGrid(0.5, 8, per_octave=4)
PADDINGS = ["border", "reflect", 0, -0.7]
OPTIONS = [{"padding": p, "antialias": a} for p in PADDINGS for a in (False, True)]
LAYOUTS = {
    "rows": lambda images: images,
    "columns": lambda images: images.mT.contiguous().mT,
    "colours": lambda images: images.contiguous(memory_format=torch.channels_last),
    "every other pixel": lambda images: images.repeat_interleave(2, -1)[..., ::2],
    "imaginary parts": lambda images: torch.complex(images, -images).conj().imag,
    "one image": lambda images: images[:1].expand(images.shape),
}


def foveate_plain(images, scales, size, **options):
    """Compute `foveate` as one einsum over whole images, which every faster path must reproduce."""
    return _by_definition(images, PatchSpec(as_scales(scales), size, **options))
