"""Lower bounds of the time of a measurement: the fewest bytes and the fewest operations.

Operations are multiplications and additions of convolutions and matrix products. Nothing is
computed twice. Bytes are those that must pass between memory and processor:

- evaluation reads the images and the weights and writes the logits; activations stay in the cache;
- a training step also writes the output of each convolution and linear layer once and reads it
  once on the way back, and reads and writes the weights and the two moments of Adam.
"""
# Shape letters: N patches, C image channel, H W pixels, P patch pixels.

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from timing import duration
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

FLOAT = 4  # bytes of a float32


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Fewest bytes and operations of a measurement."""

    bytes: float
    operations: float


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a backbone computes for its patches: operations, and values that layers write."""

    operations: int
    activations: int
    parameters: int
    logits: int


def work_of(backbone: nn.Module, patches: Tensor, training: bool) -> Work:
    """Count the work for patches (N, C, P, P), with the backward pass if `training`."""
    written: list[int] = []
    layers = [m for m in backbone.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    hooks = [
        m.register_forward_hook(lambda _, __, out: written.append(out.numel())) for m in layers
    ]
    backbone.train(training)
    # The counter supports attention on every device only as matrix products.
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter, sdpa_kernel(SDPBackend.MATH):
        logits = backbone(patches)
    for hook in hooks:
        hook.remove()
    operations = counter.get_total_flops()
    if training:
        # Gradients of weights and inputs take as many each; the images need none. The counter is
        # not used for them: it ignores the groups of a convolution on the way back.
        operations = 3 * operations - 2 * written[0] * layers[0].weight[0].numel()
    return Work(
        operations=operations,
        activations=sum(written),
        parameters=sum(p.numel() for p in backbone.parameters()),
        logits=logits.shape[1],
    )


def of_network(work: Work, images: Sequence[int], training: bool, width: int = FLOAT) -> Counts:
    """Return the counts for a batch; `work` is that of one image, `images` the shape (B, C, H, W).

    Activations have `width` bytes, all other values are float32.
    """
    batch, pixels = images[0], torch.Size(images).numel()
    if training:  # weights and both moments are read and written
        kept = 6 * FLOAT * work.parameters + 2 * width * batch * work.activations
    else:
        kept = FLOAT * (work.parameters + batch * work.logits)
    return Counts(bytes=FLOAT * pixels + kept, operations=batch * work.operations)


def of_resampling(
    images: Sequence[int], scales: Sequence[float], size: int, antialias: bool, backward: bool
) -> Counts:
    """Return the counts of the resampling op on float32 images of shape (B, C, H, W).

    A sample has `taps` pixels along each axis: two, or with antialiasing two per pixel of the
    sample spacing. It takes a multiplication and an addition per tap, for all taps at once or axis
    by axis, whichever is less. The pixels of the largest window are read once and the patches are
    written once. The backward pass does the same in the other direction.
    """
    planes, sides = images[0] * images[1], images[2:]
    largest = [min(side, scales[-1] * size) for side in sides]
    operations = 0.0
    for scale in scales:
        taps = 2 * max(scale, 1.0) if antialias else 2.0
        columns = min(sides[1], scale * size) / size  # per patch column
        operations += size**2 * min(2 * taps**2, 2 * taps * columns + 2 * taps)
    values = planes * (largest[0] * largest[1] + len(scales) * size**2)
    passes = 2 if backward else 1
    return Counts(bytes=passes * FLOAT * values, operations=passes * planes * operations)


def copy_rate(device: torch.device, size: int) -> float:
    """Measure the bytes per second that a copy of `size` bytes reads and writes."""
    source = torch.ones(size // FLOAT, device=device)
    target = torch.empty_like(source)
    return 2 * size / _fastest(lambda: target.copy_(source), device)


def product_rate(device: torch.device, dtype: torch.dtype, side: int) -> float:
    """Measure the operations per second of a product of two square matrices."""
    one = torch.randn(side, side, device=device).to(dtype)
    other = torch.randn(side, side, device=device).to(dtype)
    return float(2 * side**3 / _fastest(lambda: one @ other, device))


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """Return the least of the times of several rounds in seconds: a rate is a limit."""
    repeats = 10 if device.type == "cuda" else 1
    return min(duration(work, repeats, device) for _ in range(9))
