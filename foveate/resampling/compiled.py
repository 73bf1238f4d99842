"""The resampling op in compiled code, Triton or C, with gradients of any order."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, P patch pixels.

from typing import Any

import torch
from torch import Tensor

from foveate.resampling.definition import View, compiled_code_reads, resample, spread_plain
from foveate.tracing import is_traced


def gather(images: Tensor, view: View) -> Tensor:
    """Cut (B, C, H, W) images into patches (B, S, C, P, P); see `foveate`.

    4,096 images on one H200 take 0.17 ms, with matrix products 2.1 ms. 32 images on 2 CPU cores
    take 0.4 ms, with matrix products 3 to 4 ms.
    """
    if not (images.requires_grad and torch.is_grad_enabled()):
        return _gather(images, view)
    if view.centres is not None:  # a copy, so that later in-place changes cannot affect gradients
        view = view._replace(centres=view.centres.detach().clone())
    patches: Tensor = _Gather.apply(images, view)  # type: ignore[no-untyped-call]
    return patches


def spread(gradient: Tensor, shape: torch.Size, view: View) -> Tensor:
    """Compute gradients of images of `shape` from patch gradients: the transpose of `gather`."""
    # Tracers and transforms include the batched gradients of a Jacobian.
    if is_traced(gradient) or not compiled_code_reads(gradient):
        return spread_plain(gradient, shape, view)
    if not (gradient.requires_grad and torch.is_grad_enabled()):
        return _spread(gradient, shape, view)
    images: Tensor = _Spread.apply(gradient, shape, view)  # type: ignore[no-untyped-call]
    return images


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, view: View) -> Tensor:
        ctx.shape, ctx.view = images.shape, view
        return _gather(images, view)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return spread(gradient, ctx.shape, ctx.view), None


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, shape: torch.Size, view: View) -> Tensor:
        # The transpose of the transpose is the op without the constant's contribution.
        ctx.view = view if isinstance(view.padding, str) else view._replace(padding=0.0)
        return _spread(gradient, shape, view)

    @staticmethod
    def backward(ctx: Any, images: Tensor) -> tuple[Tensor, None, None]:
        return resample(images, ctx.view), None, None


def _gather(images: Tensor, view: View) -> Tensor:
    if images.is_cuda:
        from foveate.resampling.triton_kernel import gather_patches
    else:
        from foveate.resampling.c_kernel import gather_patches
    return gather_patches(images, view)


def _spread(gradient: Tensor, shape: torch.Size, view: View) -> Tensor:
    if gradient.is_cuda:
        from foveate.resampling.triton_kernel import spread_patches
    else:
        from foveate.resampling.c_kernel import spread_patches
    return spread_patches(gradient, shape, view)
