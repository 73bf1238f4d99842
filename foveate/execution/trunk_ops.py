"""The first blocks of a trunk as differentiable functions, in bf16 on a GPU by Triton kernels.

The kernels are custom operators, so that `torch.compile` and CUDA graphs can contain them. Whether
a kernel applies depends on device, dtypes and shapes; otherwise PyTorch's operators are used.
"""
# Shape letters: R rows, C image channel, O filters, N images, I input channels, H W pixels.

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input

KERNEL_DEVICES: tuple[str, ...] = ("cuda",) if find_spec("triton") else ()
MOST_PATCHES = 1088  # 64 images in 17 channels; measured with 32 and 128 images, see `_Convolution`
MOST_VALUES = 2**31 - 2**20  # the kernels compute 32-bit offsets, also of the rest of a last block
LARGEST_SUM = 64 * 128  # float32 sums that a program keeps in registers


class Launch(NamedTuple):
    """Launch parameters of a kernel: positions per block, programs, warps and pipeline stages."""

    block: int
    programs: int
    warps: int
    stages: int


def autocast_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype in which convolutions of a tensor are computed."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def two_blocks(cut: Tensor, weight: Tensor, shift: Tensor, second: Tensor, bias: Tensor) -> Tensor:
    """Compute the first block on windows (N, m, m, 16 C), then a convolution of its activations.

    The first block has weight (4 O, 16 C) and shift (4 O,), and is computed in the precision of the
    windows, also under autocast.
    """
    rows, dtype = cut.flatten(0, 2), autocast_dtype(cut)
    with torch.autocast(cut.device.type, enabled=False):
        if _supports_pair(rows, weight, second, dtype):
            found: Tensor = _TwoBlocks.apply(cut, weight, shift, second, bias)  # type: ignore[no-untyped-call]
            return found
        # Flat, because an in-place ReLU on a view would copy these activations, the largest ones.
        active = torch.relu_(F.linear(rows, weight, shift))
    return convolved(_grid(active, cut), second, bias)


def _grid(active: Tensor, cut: Tensor) -> Tensor:
    """View activations (R, 4 O) of windows (N, m, m, 16 C) as images (N, 4 O, m, m)."""
    count, tall, wide, _ = cut.shape
    return active.view(count, tall, wide, active.shape[1]).permute(0, 3, 1, 2)


def convolved(images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply an unpadded convolution of stride 1 to (N, I, H, W), in the autocast dtype."""
    dtype = autocast_dtype(images)
    kernel = _supports_kernel(images, weight, dtype)
    slow = weight.shape[2] == 3 and weight.shape[1] < 32 and len(images) <= MOST_PATCHES
    if bias is None or not (kernel or slow):
        return F.conv2d(images, weight, bias)
    given = (images.to(dtype), weight, bias, kernel)
    found: Tensor = _Convolution.apply(*given)  # type: ignore[no-untyped-call]
    return found


def _supports_pair(rows: Tensor, weight: Tensor, second: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernels of the first two blocks apply: float32 rows, to be rounded to bf16."""
    (above, filters, side, _), width = second.shape, rows.shape[1]
    exact = rows.dtype == weight.dtype == torch.float32 and not rows.requires_grad
    shaped = filters in (16, 32, 64) and width % 16 == 0 and width <= 64  # more exceed registers
    shaped = shaped and above % 8 == 0 and 16 <= side * side * above <= 64
    sized = 0 < len(rows) * max(filters, width) < MOST_VALUES
    kind = rows.device.type in KERNEL_DEVICES and dtype == torch.bfloat16
    return kind and exact and shaped and sized


def _supports_kernel(images: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel for the weight gradient of a convolution applies.

    It suits few channels: on one H200 it takes 44 µs for the third convolution of FovAvg with batch
    128, cuDNN and the sum of the bias 150 µs. For the 64 channels of the second it is no faster.
    """
    (filters, channels), side = weight.shape[:2], weight.shape[2]
    tall, wide = power(side * channels), power(side * filters)
    shaped = filters % 8 == channels % 8 == 0 and tall <= 64
    sized = 0 < len(images) * max(filters, channels) * images.shape[2:].numel() < MOST_VALUES
    kind = images.device.type in KERNEL_DEVICES and dtype == torch.bfloat16
    return kind and shaped and sized and tall * wide <= LARGEST_SUM


def power(number: int) -> int:
    """Return the smallest power of two that is at least 16 and not below a number."""
    return max(16, 1 << (number - 1).bit_length())


class _TwoBlocks(torch.autograd.Function):
    """The first block and a convolution in bf16, whose gradients one kernel computes.

    The gradient of the activations is used where it is computed, and never stored.
    """

    @staticmethod
    def forward(
        ctx: Any, cut: Tensor, weight: Tensor, shift: Tensor, second: Tensor, bias: Tensor
    ) -> Tensor:
        rows, rounded = cut.flatten(0, 2), second.bfloat16()
        active = _grid(call_operator(first_block, rows, weight, shift), cut)
        ctx.save_for_backward(rows, active, rounded)
        return F.conv2d(active, rounded, bias.bfloat16())

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[None, Tensor, Tensor, Tensor, Tensor]:
        rows, active, second = ctx.saved_tensors
        filters, channels, side, _ = second.shape
        sizes = (second.numel(), filters, channels * rows.shape[1], channels)
        sums = call_operator(pair_gradient, rows, active, slopes, second).split(sizes)
        slope = sums[0].view(channels, side, side, filters).permute(3, 0, 1, 2)
        return None, sums[2].view(channels, -1), sums[3], slope, sums[1]


class _Convolution(torch.autograd.Function):
    """A convolution of stride 1 with a fast weight gradient, by a kernel or as a matrix product.

    cuDNN's deterministic kernel for 16 filters converts to float32. This takes 96 of the 480 µs of
    a FovAvg training step with batch 32 on one H200. With batch 128 cuDNN is faster than the matrix
    product: a step takes 0.996 ms instead of 1.029.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor, kernel: bool) -> Tensor:
        rounded = weight.to(images.dtype)
        ctx.save_for_backward(images, rounded)
        ctx.kernel, ctx.dtype = kernel, weight.dtype
        return F.conv2d(images, rounded, bias.to(images.dtype))

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, Tensor, Tensor, None]:
        images, weight = ctx.saved_tensors
        back = conv2d_input(images.shape, weight, slopes) if ctx.needs_input_grad[0] else None
        if ctx.kernel:
            slope, total = _by_kernel(images, slopes, weight.shape[2])
        else:
            slope, total = _by_product(images, slopes)
        return back, slope.to(ctx.dtype), total.to(ctx.dtype), None


def _by_kernel(images: Tensor, slopes: Tensor, side: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (O, I, side, side) and bias (O,) in float32."""
    channels, filters = images.shape[1], slopes.shape[1]
    sums: Tensor = call_operator(kernel_gradient, images, slopes, side)
    slope = sums[:-filters].view(side, channels, side, filters).permute(3, 1, 2, 0)
    return slope, sums[-filters:]


def _by_product(images: Tensor, slopes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight (O, I, 3, 3) and bias (O,) in the dtype of the images."""
    windows = images.permute(0, 2, 3, 1).unfold(1, 3, 1).unfold(2, 3, 1)  # (N, h, w, I, 3, 3)
    rows = windows.flatten(3).flatten(0, 2)
    slope = slopes.permute(0, 2, 3, 1).flatten(0, 2).mT @ rows
    return slope.unflatten(1, (images.shape[1], 3, 3)), slopes.sum((0, 2, 3))


def call_operator(operator: Any, *given: Any) -> Any:
    """Call an operator, or its function if nothing is compiled: operators import the compiler."""
    return (operator if torch.compiler.is_compiling() else operator._init_fn)(*given)


@torch.library.custom_op("foveate::first_block", mutates_args=())
def first_block(rows: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    """Compute relu(rows (R, 16 C) @ weight.mT + shift) in float32, rounded to bf16: (R, 4 O)."""
    from foveate.execution import triton_trunk

    with torch.cuda.device_of(rows):  # Triton launches on the current device
        return triton_trunk.first_block(rows, weight, shift)


@torch.library.custom_op("foveate::kernel_gradient", mutates_args=())
def kernel_gradient(images: Tensor, slopes: Tensor, side: int) -> Tensor:
    """Compute the gradients of weight and bias, as one flat tensor; see `triton_trunk`."""
    from foveate.execution import triton_trunk

    with torch.cuda.device_of(images):  # Triton launches on the current device
        return triton_trunk.kernel_gradient(images, slopes, side)


@torch.library.custom_op("foveate::pair_gradient", mutates_args=())
def pair_gradient(rows: Tensor, active: Tensor, slopes: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradients of the first two blocks, as one flat tensor; see `triton_trunk`."""
    from foveate.execution import triton_trunk

    with torch.cuda.device_of(rows):  # Triton launches on the current device
        return triton_trunk.pair_gradient(rows, active, slopes, weight)


@first_block.register_fake
def _active(rows: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
    return rows.new_empty(len(rows), len(weight), dtype=torch.bfloat16)


@kernel_gradient.register_fake
def _kernel_sums(images: Tensor, slopes: Tensor, side: int) -> Tensor:
    size = slopes.shape[1] * (side * side * images.shape[1] + 1)
    return images.new_empty(size, dtype=torch.float32)


@pair_gradient.register_fake
def _pair_sums(rows: Tensor, active: Tensor, slopes: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(weight.numel() + len(weight) + active.shape[1] * (rows.shape[1] + 1))
