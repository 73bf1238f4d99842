"""Plan that computes the first two blocks of a `ConvNet` as one matrix product over windows.

A 3 × 3 convolution of one image channel has little arithmetic, and its activations are by far the
largest of the network. This plan restructures both blocks:

- Every window of 4 × 4 pixels, two pixels apart, becomes a row of a matrix. One matrix product
  computes the 2 × 2 outputs of the first convolution inside the window, as separate channels.
- The convolution is linear, so the batch-norm mean and variance of its outputs follow from the mean
  and covariance of the windows. No pass over the activations is needed, and the norm is folded into
  the weights.
- On the 2 × 2 groups, the second convolution (3 × 3 with stride 2) becomes a 2 × 2 convolution with
  stride 1 and four times the channels.

Measured on one H200 with 17 channels, batch 128 and bf16, compiled and captured: a training step
takes 0.82 ms, and 1.47 ms without this plan.
"""
# Shape letters: B batch, S scale channel, N images or patches, C image channel, P pixels,
# m windows along an axis, O filters.

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from foveate.execution.exact import matching_convnet, plain_blocks, require_convnet
from foveate.execution.precision import autocast_dtype
from foveate.execution.triton_common import KERNEL_DEVICES, MOST_VALUES
from foveate.models.channels import ScaleChannels
from foveate.models.lazy import lazy_logits
from foveate.models.outputs import Outputs
from foveate.models.sliding import SlidingChannels

AT_ONCE = 1000  # images whose moments are computed at a time: 0.4 MB each with 17 channels


class Moments(NamedTuple):
    """Mean (9 C,) and covariance (9 C, 9 C) of the 3 × 3 windows of a batch."""

    mean: Tensor
    covariance: Tensor


def fits(net: nn.Module, images: Tensor) -> bool:
    """Whether the network applies an unmodified `ConvNet` to images or patches of even size."""
    backbone = matching_convnet(net, images)
    if backbone is None or isinstance(net, SlidingChannels):
        return False
    return backbone.size % 2 == 0 and backbone.size > 6 and _begins(backbone.trunk)


def prepare(net: nn.Module, images: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Cut the windows of all patches, see `cut_patches`."""
    images = net.patches(images) if isinstance(net, ScaleChannels) else images[:, None]
    return cut_patches(net, images)


def cut_patches(net: nn.Module, patches: Tensor) -> tuple[Tensor, ...]:
    """Cut patches (B, S, C, P, P) into windows (B, S, m, m, 16 C).

    In training mode, also return the mean (9 C,) and mean square (9 C, 9 C) of the 3 × 3 windows
    of each image.
    """
    cut = cut_windows(patches.flatten(0, 1)).unflatten(0, patches.shape[:2])
    if not net.training:
        return (cut,)
    parts = [window_moments(part.flatten(1, 3).double()) for part in cut.split(AT_ONCE)]
    mean, covariance = map(torch.cat, zip(*parts, strict=True))
    square = covariance + mean[:, :, None] * mean[:, None, :]
    wide = torch.promote_types(patches.dtype, torch.float32)
    return cut, mean.to(wide), square.to(wide)


def outputs(net: nn.Module, inputs: tuple[Tensor, ...]) -> Outputs:
    """Run the network on the windows."""
    backbone, (cut, *statistics) = require_convnet(net), inputs
    moments = None
    if statistics:
        mean, square = (values.mean(0) for values in statistics)
        moments = Moments(mean, square - mean[:, None] * mean)
    if isinstance(net, ScaleChannels):
        lazy = lazy_logits(net, cut, lambda c: backbone.classify(run_windows(backbone.trunk, c)))
        if lazy is not None:
            return Outputs(lazy)
    features = run_windows(backbone.trunk, cut.flatten(0, 1), moments)
    if not isinstance(net, ScaleChannels):
        return Outputs(backbone.classify(features))
    outputs = backbone.classify(features, net.draw_mask(cut))
    channels = outputs.unflatten(0, cut.shape[:2])
    return Outputs(net.combine(channels), channels)


def applies(trunk: nn.Sequential, images: Tensor) -> bool:
    """Whether the trunk can be computed by windows: even sides and no gradient for the images."""
    wanted = images.requires_grad and torch.is_grad_enabled()
    even = all(side % 2 == 0 and side > 6 for side in images.shape[2:])
    return even and not wanted and _begins(trunk)


def run(trunk: nn.Sequential, images: Tensor) -> Tensor:
    """Run the whole trunk on images (N, C, P, P)."""
    return run_windows(trunk, cut_windows(images))


def _begins(trunk: nn.Sequential) -> bool:
    """Whether the trunk has the plain blocks of a `ConvNet`, the first two of stride 1 and 2."""
    strides = [conv.stride for conv, _ in plain_blocks(trunk)]
    return strides[:2] == [(1, 1), (2, 2)]


def cut_windows(images: Tensor) -> Tensor:
    """Cut (N, C, P, P) images into 4 × 4 windows, two pixels apart: (N, m, m, 16 C)."""
    return images.unfold(2, 4, 2).unfold(3, 4, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)


def run_windows(trunk: nn.Sequential, cut: Tensor, moments: Moments | None = None) -> Tensor:
    """Run the whole trunk on the windows (N, m, m, 16 C) of images.

    The first product has the precision of the windows, also under autocast: rounded weights would
    shift a filter's response to the background, and a folded norm cannot remove this shift. Running
    statistics are updated as usual. `moments` are the moments of the windows, if already computed.
    """
    kinds = [isinstance(layer, nn.Conv2d) for layer in trunk]
    at = kinds.index(True, 1)  # the second convolution
    second = trunk[at]
    assert isinstance(second, nn.Conv2d)
    assert second.bias is not None
    with torch.autocast(cut.device.type, enabled=False):
        weight, bias = fold_norm(trunk, cut, moments)
        first, shift = group_first(weight).to(cut.dtype), bias.repeat(4).to(cut.dtype)
        grouped = regroup_second(second.weight)
    features = F.conv2d(_first_block(cut, first, shift), grouped, second.bias)
    for layer in list(trunk)[at + 1 :]:
        features = layer(features)
    return features


def _first_block(cut: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Compute the first block on windows (N, m, m, 16 C), as images (N, 4 O, m, m).

    The block has weight (4 O, 16 C) and shift (4 O,), and is computed in the precision of the
    windows, also under autocast. The kernel rounds the activations once, to bf16.
    """
    rows = cut.flatten(0, 2)
    if _supports_kernel(rows, weight):
        from foveate.execution import triton_trunk

        active = triton_trunk.first_block(rows, weight, shift)
    else:
        with torch.autocast(cut.device.type, enabled=False):
            # Flat, because an in-place ReLU on a view would copy these activations, the largest.
            active = torch.relu_(F.linear(rows, weight, shift))
    return active.view(*cut.shape[:3], len(weight)).permute(0, 3, 1, 2)


def _supports_kernel(rows: Tensor, weight: Tensor) -> bool:
    """Whether the kernel of the first block applies: no gradients, and float32 rounded to bf16."""
    filters, width = weight.shape
    exact = rows.dtype == weight.dtype == torch.float32 and not torch.is_grad_enabled()
    shaped = filters in (16, 32, 64) and width <= 64  # more exceed registers
    sized = 0 < len(rows) * max(filters, width) < MOST_VALUES
    kind = rows.device.type in KERNEL_DEVICES and autocast_dtype(rows) == torch.bfloat16
    return kind and exact and shaped and sized and not torch.compiler.is_compiling()


def fold_norm(trunk: nn.Sequential, cut: Tensor, moments: Moments | None) -> tuple[Tensor, Tensor]:
    """Return weights (O, C, 3, 3) and bias (O,) of the first convolution with its norm folded in.

    In training mode, the norm has the `moments` of the windows `cut`.
    """
    first, norm = trunk[0], trunk[1]
    assert isinstance(first, nn.Conv2d) and first.bias is not None
    if not isinstance(norm, nn.BatchNorm2d):
        return first.weight, first.bias
    assert norm.running_mean is not None and norm.running_var is not None
    if norm.training:
        mean, variance = _output_moments(first, moments or window_moments(cut.flatten(0, 2)))
        track(norm, mean, variance, 4 * cut.shape[:-1].numel())
    else:
        mean, variance = norm.running_mean, norm.running_var
    gain = norm.weight * torch.rsqrt(variance + norm.eps)
    return first.weight * gain[:, None, None, None], (first.bias - mean) * gain + norm.bias


def _output_moments(first: nn.Conv2d, moments: Moments) -> tuple[Tensor, Tensor]:
    """Return the mean and variance (O,) of the convolution's outputs from its input moments."""
    weight = first.weight.flatten(1).to(moments.mean.dtype)  # wider than bf16 and half
    variance = ((weight @ moments.covariance) * weight).sum(1)
    assert first.bias is not None
    return weight @ moments.mean + first.bias, variance


@torch.no_grad()
def window_moments(rows: Tensor) -> Moments:
    """Return mean (..., 9 C) and covariance (..., 9 C, 9 C) of the 3 × 3 windows in 4 × 4 windows.

    `rows` (..., n, 16 C) are the 4 × 4 windows; each contains four 3 × 3 windows.
    """
    # Subtract a value near the mean first, to limit cancellation below.
    shift = rows.reshape(-1)[:: max(1, rows.numel() // 4096)].mean()
    rows = rows - shift
    mean = rows.mean(-2, dtype=torch.promote_types(rows.dtype, torch.float32))
    square = (rows.mT @ rows).to(mean.dtype) / rows.shape[-2]
    inner = _inner(rows.shape[-1] // 16, rows.device)
    small_mean = mean[..., inner].mean(-2)
    small_square = square[..., inner[:, :, None], inner[:, None, :]].mean(-3)
    product = small_mean[..., :, None] * small_mean[..., None, :]
    return Moments(small_mean + shift, small_square - product)


def _inner(channels: int, device: torch.device) -> Tensor:
    """Return the indices (4, 9 C) of the 3 × 3 windows inside a 4 × 4 window of C channels."""
    pixel = torch.arange(16 * channels, device=device).reshape(channels, 4, 4)
    return torch.stack([pixel[:, a : a + 3, b : b + 3].flatten() for a in (0, 1) for b in (0, 1)])


@torch.no_grad()
def track(norm: nn.BatchNorm2d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update running statistics with the moments of a batch of `count` values per filter."""
    assert norm.running_mean is not None and norm.running_var is not None
    assert norm.num_batches_tracked is not None and norm.momentum is not None
    norm.num_batches_tracked += 1
    norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), norm.momentum)
    unbiased = variance * (count / (count - 1))
    norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), norm.momentum)


def group_first(weight: Tensor) -> Tensor:
    """Place (O, C, 3, 3) weights at the four offsets of a 4 × 4 window: (4 O, 16 C)."""
    corners = [(0, 1), (1, 0)]  # padding after, or before
    placed = [F.pad(weight, (*x, *y)) for y in corners for x in corners]
    return torch.stack(placed).flatten(0, 1).flatten(1)


def regroup_second(weight: Tensor) -> Tensor:
    """Convert (O, C, 3, 3) weights of stride 2 to (O, 4 C, 2, 2) weights on 2 × 2 groups."""
    filters, channels = weight.shape[:2]
    padded = F.pad(weight, (0, 1, 0, 1)).reshape(filters, channels, 2, 2, 2, 2)
    kernel = padded.permute(0, 3, 5, 1, 2, 4).flatten(1, 3)
    return kernel.contiguous(memory_format=torch.channels_last)
