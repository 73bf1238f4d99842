"""The trunk of a `ConvNet` on CPUs in compiled stages, forward and backward.

A stage reads a feature map patch by patch and applies batch norm, ReLU and the next convolution
within the cache. The backward stages recompute the cheap operations instead of saving their
results. Batch norm of the first convolution is folded into its weights, as in `execution.windows`.
Sums over the batch have a fixed order, so results are bitwise equal for any number of threads.

Measured with FovAvg, 17 channels, batch 32, on 2 cores with AVX-512, medians of seven runs: a
training step takes 26 ms, and 113 ms with the plain trunk.
"""
# Shape letters: N images, C image channel, H W pixels, O filters.

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from foveate.execution.exact import Block, plain_blocks
from foveate.execution.native.passes import Backward, Forward, sides_of
from foveate.native.build import library
from foveate.native.calls import PARTS
from foveate.tracing import differentiable_once, is_traced

MULTIPLE = 16  # the number of filters must be a multiple of this
# Values of the largest feature map without gradients: maps that leave the cache are slow to write.
# A CNN on 1,000 images of 112 pixels, on one core: 0.75 s, in one piece 1.1 s.
CHUNK = 1 << 21


def applies(trunk: nn.Sequential, images: Tensor) -> bool:
    """Whether the compiled stages can compute the trunk for these images."""
    wanted = images.requires_grad and torch.is_grad_enabled()
    if wanted or images.device.type != "cpu" or images.dtype != torch.float32:
        return False
    seen = is_traced(images) or torch.is_autocast_enabled("cpu")
    return not seen and _fits(trunk, images) and library() is not None


def run(trunk: nn.Sequential, images: Tensor) -> Tensor:
    """Run the whole trunk on images (N, C, H, W). Running statistics are updated as usual."""
    blocks, images = plain_blocks(trunk), images.detach().contiguous()
    layers: list[Any] = [layer for block in blocks for layer in block if layer is not None]
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    training_norms = [norm for _, norm in blocks if norm is not None and norm.training]
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        result = _Trunk.apply(images, blocks, *parameters)  # type: ignore[no-untyped-call]
    else:
        chunk = images.shape[0] if training_norms else _chunk(blocks, images)
        result = _run_alone(blocks, images, chunk)
    _count_batch(training_norms)
    return result  # type: ignore[no-any-return]


def _run_alone(blocks: Sequence[Block], images: Tensor, chunk: int) -> Tensor:
    """Run `chunk` images at a time without saving feature maps."""
    begin, *rest = images.split(chunk)
    forward = Forward(blocks, begin)
    first, results = forward.first, [forward.run()]
    for part in rest:
        forward = Forward(blocks, part, first)  # frees the buffers of the previous chunk
        results.append(forward.run())
    return torch.cat(results) if rest else results[0]


def _chunk(blocks: Sequence[Block], images: Tensor) -> int:
    """Return the number of images whose largest stored feature map fits the cache."""
    sides = sides_of(blocks, images)[1:]  # the first map is not stored
    sizes = [
        conv.out_channels * height * width
        for (conv, _), (height, width) in zip(blocks[1:], sides, strict=True)
    ]
    return max(PARTS, CHUNK // max(sizes))


@torch.no_grad()
def _count_batch(training_norms: Sequence[Any]) -> None:
    """Count the batch, and tell autograd that the running statistics have changed."""
    changed = [t for norm in training_norms for t in (norm.running_mean, norm.running_var)]
    increment_version([tensor for tensor in changed if not tensor.is_inference()])
    for norm in training_norms:
        norm.num_batches_tracked += 1


class _Trunk(torch.autograd.Function):
    """The stages as one autograd function of the weights; images get no gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, blocks: Sequence[Block], *parameters: Tensor) -> Tensor:
        ctx.forward = Forward(blocks, images)
        result = ctx.forward.run()
        ctx.save_for_backward(images, *parameters, *ctx.forward.maps)
        return result  # type: ignore[no-any-return]

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the parameters, block by block."""
        images, *rest = ctx.saved_tensors
        split = len(rest) - len(ctx.forward.maps)
        return None, None, *Backward(ctx.forward, images, rest[:split], rest[split:]).run(slope)


def _fits(trunk: nn.Sequential, images: Tensor) -> bool:
    """Whether the stages support these layers and sizes."""
    blocks = plain_blocks(trunk)
    if len(blocks) < 2 or not all(map(_is_known, blocks)):
        return False
    first = blocks[0][0]
    if images.ndim != 4 or images.shape[1] != first.in_channels or first.stride != (1, 1):
        return False
    sides = sides_of(blocks, images)
    least = min(min(side) for side in sides)
    return least > 0 and images.shape[0] * sides[-1][0] * sides[-1][1] > 1


def _is_known(block: Block) -> bool:
    conv, norm = block
    own: list[Any] = [conv.weight, conv.bias]
    if norm is not None:
        own += [norm.weight, norm.bias, norm.running_mean, norm.running_var]
    return conv.out_channels % MULTIPLE == 0 and all(map(_is_plain, own))


def _is_plain(tensor: Tensor) -> bool:
    near = tensor.dtype == torch.float32 and tensor.device.type == "cpu"
    return near and (tensor.ndim > 1 or tensor.is_contiguous())
