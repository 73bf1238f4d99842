"""The trunk of a `ConvNet` on CPUs, forward and backward, in compiled stages; the same numbers.

One stage reads a map patch by patch, norms and rectifies it, and convolves it, all within the
cache; the backward stages repeat the cheap parts of this instead of keeping their results. Batch
norm of the first convolution is folded into its weights, as in `fast`.

Measured on 2 quiet cores with AVX-512, FovAvg of 17 channels, batch 32: see `benchmarks/channels`.
"""
# Shape letters: N images, C image channel, H W pixels, O filters.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from foveate.models import fast, native

MULTIPLE = 16  # of filters in every convolution

Array: TypeAlias = NDArray[np.float64]


class Block(NamedTuple):
    """A convolution and the norm behind it, if there is one."""

    conv: nn.Conv2d
    norm: nn.BatchNorm2d | None


@dataclass(frozen=True)
class Norm:
    """How a map is normed: float64 arrays (O,), in NumPy because they are small."""

    mean: Array
    spread: Array  # 1 / sqrt(variance + eps)
    gain: Array
    shift: Array
    moving: bool  # the mean and the variance are those of the batch
    count: int  # values per filter

    def factors(self) -> Tensor:
        """Mean, gain and shift (3, O), for the stages that read the map."""
        return _stack(self.mean, self.gain, self.shift)

    def unnorm(self, total: Array, product: Array) -> Tensor:
        """Factors (4, O) that turn the slope of a map into its gradient.

        Given are the sums of the slope, and of the slope times the deviation from the mean.
        """
        share = self.gain / self.count if self.moving else np.zeros_like(self.gain)
        return _stack(self.gain, -share * self.spread**2 * product, self.mean, -share * total)


def _stack(*rows: Array) -> Tensor:
    return torch.from_numpy(np.array(rows, dtype=np.float32))


def applies(trunk: nn.Sequential, images: Tensor) -> bool:
    """Whether the stages can stand in for the trunk; if not, take the plain path."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or type(images) is not Tensor:
        return False
    if torch.is_autocast_enabled("cpu") or torch._C._are_functorch_transforms_active():
        return False
    wanted = images.requires_grad and torch.is_grad_enabled()
    if wanted or images.device.type != "cpu" or images.dtype != torch.float32:
        return False
    found = blocks(trunk)
    return found is not None and _fits(found, images) and native.library() is not None


def run(trunk: nn.Sequential, images: Tensor) -> Tensor:
    """Run the whole trunk on images (N, C, H, W). Running statistics are updated as always."""
    found = blocks(trunk)
    assert found is not None
    images = images.detach().contiguous()
    count = images.shape[0] * (images.shape[2] - 2) * (images.shape[3] - 2)
    weight, bias = fast.fold_norm(trunk, lambda: window_moments(images), count)
    parameters = [weight, bias]
    for conv, norm in found[1:]:
        parameters += [conv.weight, conv.bias]  # type: ignore[list-item]
        parameters += [] if norm is None else [norm.weight, norm.bias]
    if torch.is_grad_enabled() and any(p.requires_grad for p in parameters):
        return _Trunk.apply(images, found, *parameters)  # type: ignore[no-any-return,no-untyped-call]
    return _forward(images, found, weight, bias, native.Buffers())[0]


def blocks(trunk: nn.Sequential) -> tuple[Block, ...] | None:
    """The blocks of a trunk, or None where a layer is not of the known kind or has hooks."""
    found: list[Block] = []
    for layer in trunk:
        if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
            return None
        if type(layer) is nn.Conv2d and _is_plain(layer):
            found.append(Block(layer, None))
        elif type(layer) is nn.BatchNorm2d and found and found[-1].norm is None and _tracks(layer):
            found[-1] = Block(found[-1].conv, layer)
        elif type(layer) is not nn.ReLU:
            return None
    return tuple(found)


def _is_plain(conv: nn.Conv2d) -> bool:
    shape = (conv.kernel_size, conv.padding, conv.dilation, conv.groups)
    square = conv.stride in ((1, 1), (2, 2)) and conv.weight.dtype == torch.float32
    whole = conv.out_channels % MULTIPLE == 0 and conv.bias is not None
    return shape == ((3, 3), (0, 0), (1, 1), 1) and square and whole


def _tracks(norm: nn.BatchNorm2d) -> bool:
    tracked = norm.track_running_stats and norm.momentum is not None
    return tracked and norm.affine and norm.weight.dtype == torch.float32


def _fits(found: Sequence[Block], images: Tensor) -> bool:
    if len(found) < 2 or images.ndim != 4 or images.shape[1] != found[0].conv.in_channels:
        return False
    sides = sizes(found, images)
    last = images.shape[0] * sides[-1][0] * sides[-1][1]
    return found[0].conv.stride == (1, 1) and min(min(side) for side in sides) > 0 and last > 1


def sizes(found: Sequence[Block], images: Tensor) -> list[tuple[int, int]]:
    """Height and width behind each convolution."""
    height, width = images.shape[2:]
    made = []
    for conv, _ in found:
        height, width = ((n - 3) // conv.stride[0] + 1 for n in (height, width))
        made.append((height, width))
    return made


@torch.no_grad()
def window_moments(images: Tensor) -> fast.Moments:
    """Mean (9 C,) and covariance (9 C, 9 C) of all 3 × 3 windows of images (N, C, H, W)."""
    count, colours, height, width = images.shape
    # About a shift near the mean, so that the subtraction below cancels little.
    shift = images.reshape(-1)[:: max(1, images.numel() // 4096)].mean()
    parts, taps = native.parts_of(count), 9 * colours
    lib = native.library()
    assert lib is not None
    sums = torch.zeros(parts, taps, lib.lanes(), dtype=torch.float64)
    squares = torch.zeros(parts, taps, taps, lib.lanes(), dtype=torch.float64)
    native.stage(
        "moments", count, images=images, shift=shift, colours=colours, height=height - 2,
        width=width - 2, sums=sums, squares=squares,
    )  # fmt: skip
    windows = count * (height - 2) * (width - 2)
    mean, upper = sums.sum((0, 2)) / windows, squares.sum((0, 3)).triu() / windows
    square = upper + upper.triu(1).T
    return fast.Moments((mean + shift).float(), (square - mean[:, None] * mean).float())


class _Trunk(torch.autograd.Function):
    """The stages as one function of the weights; images get no gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, found: Sequence[Block], *parameters: Tensor) -> Tensor:
        """Run the trunk and keep the maps."""
        first, bias = parameters[:2]
        ctx.buffers = native.Buffers()
        result, maps, norms = _forward(images, found, first, bias, ctx.buffers)
        ctx.found, ctx.norms = found, norms
        weights = [conv.weight for conv, _ in found[1:]]
        ctx.save_for_backward(images, first, bias, *weights, *maps)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """Gradients of the folded first convolution, then of each block's weights in turn."""
        images, first, bias, *rest = ctx.saved_tensors
        depth = len(ctx.found) - 1
        back = _Backward(ctx.found, ctx.norms, images, first, bias, rest[:depth], rest[depth:])
        return None, None, *back.run(slope)


def _forward(
    images: Tensor, found: Sequence[Block], first: Tensor, bias: Tensor, buffers: native.Buffers
) -> tuple[Tensor, list[Tensor], list[Norm]]:
    """The result (N, O, H, W), and the maps (N, H, W, O) and norms behind each convolution."""
    count, sides = images.shape[0], sizes(found, images)
    read: dict[str, native.Field] = {**_planes(images)}
    read |= {"first": first.detach().permute(1, 2, 3, 0).contiguous(), "first_bias": bias.detach()}
    maps: list[Tensor] = []
    norms: list[Norm] = []
    for kind, block, before, side in zip(
        ["first", *["next"] * len(found)], found[1:], sides, sides[1:], strict=False
    ):
        made = buffers.take(count, *side, block.conv.out_channels)
        means, squares = _sums(count, made.shape[3])
        native.stage(
            kind, count, **read, **_dimensions(block.conv, before), map=made, sums=means,
            weight=block.conv.weight.detach().permute(2, 3, 1, 0).contiguous(), squares=squares,
            bias=_bias(block.conv),
        )  # fmt: skip
        norm = _norm(block.norm, means.numpy(), squares.numpy(), count, side)
        maps, norms = [*maps, made], [*norms, norm]
        read = {"below": made, "below_norm": norm.factors()}
    result = torch.empty(count, made.shape[3], *side)
    ends = {"height": side[0], "width": side[1], "from": made.shape[3]}
    native.stage("last", count, **read, **ends, result=result)
    return result, maps, norms


def _sums(count: int, filters: int) -> Tensor:
    """Room for two sums (parts, O)."""
    return torch.zeros(2, native.parts_of(count), filters, dtype=torch.float64)


def _planes(images: Tensor) -> dict[str, native.Field]:
    colours, height, width = images.shape[1:]
    return {"images": images, "colours": colours, "plane": height * width}


def _dimensions(conv: nn.Conv2d, before: tuple[int, int]) -> dict[str, int]:
    shape = {"from": conv.in_channels, "to": conv.out_channels, "stride": conv.stride[0]}
    return {"height": before[0], "width": before[1], **shape}


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias.detach().contiguous()


def _norm(
    norm: nn.BatchNorm2d | None, means: Array, squares: Array, count: int, side: tuple[int, int]
) -> Norm:
    """The norm of a map, given each part's mean and sum of squared deviations (parts, O)."""
    values = count * side[0] * side[1]
    if norm is None:
        one, nought = np.ones_like(means[0]), np.zeros_like(means[0])
        return Norm(nought, one, one, nought, False, values)
    assert norm.running_mean is not None and norm.running_var is not None
    if norm.training:
        mean, variance = _combine(means, squares, count, values)
        fast.track(norm, torch.from_numpy(mean), torch.from_numpy(variance), values)
    else:
        mean, variance = _array(norm.running_mean), _array(norm.running_var)
    spread = 1 / np.sqrt(variance + norm.eps)
    gain, shift = _array(norm.weight) * spread, _array(norm.bias)
    return Norm(mean, spread, gain, shift, norm.training, values)


def _array(tensor: Tensor) -> Array:
    return tensor.detach().numpy().astype(np.float64)


def _combine(means: Array, squares: Array, count: int, values: int) -> tuple[Array, Array]:
    """Mean and variance (O,) of all parts; part k begins at patch ⌊count k / parts⌋."""
    begins = np.arange(len(means) + 1) * count // len(means)
    share = np.diff(begins)[:, None] / count
    mean = (share * means).sum(0)
    return mean, squares.sum(0) / values + (share * (means - mean) ** 2).sum(0)


@dataclass(frozen=True)
class _Backward:
    """What the forward stages kept, and the way back through it."""

    found: Sequence[Block]
    norms: Sequence[Norm]
    images: Tensor
    first: Tensor
    bias: Tensor
    weights: Sequence[Tensor]
    maps: Sequence[Tensor]
    buffers: native.Buffers = field(default_factory=native.Buffers)

    def run(self, result_slope: Tensor) -> list[Tensor | None]:
        """Give the gradients in the order of the parameters."""
        count, (high, wide, last) = self.images.shape[0], self.maps[-1].shape[1:]
        slope, sums, products = self._masked(len(self.maps) - 1)
        native.stage(
            "last_back", count, below=self.maps[-1], below_norm=self.norms[-1].factors(),
            height=high, width=wide, result=result_slope.contiguous(), below_slope=slope,
            sums=sums, squares=products, **{"from": last},
        )  # fmt: skip
        gradients: list[Tensor | None] = []
        for at in range(len(self.maps) - 1, 0, -1):
            total, product = sums.numpy().sum(0), products.numpy().sum(0)
            below, sums, products = self._masked(at - 1)
            fields = self._shared(at, slope, total, product)
            native.stage(
                "next_back", count, **fields, below=self.maps[at - 1], below_slope=below,
                below_norm=self.norms[at - 1].factors(), sums=sums, squares=products,
            )  # fmt: skip
            gradients = self._gradients(at, fields, total, product) + gradients
            slope = below
        total, product = sums.numpy().sum(0), products.numpy().sum(0)
        return self._run_first(slope, total, product) + gradients

    def _masked(self, at: int) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the slope of a map and its sums."""
        like = self.maps[at]
        sums, products = _sums(like.shape[0], like.shape[3])
        return self.buffers.take(*like.shape), sums, products

    def _run_first(self, slope: Tensor, total: Array, product: Array) -> list[Tensor | None]:
        count, colours, filters = *self.images.shape[:2], self.first.shape[0]
        parts = native.parts_of(count)
        weight, bias = torch.zeros(parts, colours, 3, 3, filters), torch.zeros(parts, filters)
        fields = self._shared(0, slope, total, product)
        native.stage(
            "first_back", count, **fields, **_planes(self.images),
            first=self.first.permute(1, 2, 3, 0).contiguous(), first_bias=self.bias,
            first_sums=weight, first_bias_sums=bias,
        )  # fmt: skip
        rest = self._gradients(0, fields, total, product)
        return [weight[0].permute(3, 0, 1, 2).contiguous(), bias[0], *rest]

    def _shared(
        self, at: int, slope: Tensor, total: Array, product: Array
    ) -> dict[str, native.Field]:
        conv, parts = self.found[at + 1].conv, native.parts_of(self.images.shape[0])
        before = sizes(self.found, self.images)[at]
        sums = self.buffers.take(parts, conv.out_channels, 3, 3, conv.in_channels)
        return {
            **_dimensions(conv, before),
            "map": self.maps[at],
            "slope": slope,
            "unnorm": self.norms[at].unnorm(total, product),
            "weight": self.weights[at].permute(0, 2, 3, 1).contiguous(),
            "weight_sums": sums.zero_(),
            "bias_sums": torch.zeros(parts, conv.out_channels),
        }

    def _gradients(
        self, at: int, fields: dict[str, native.Field], total: Array, product: Array
    ) -> list[Tensor | None]:
        weight, bias = fields["weight_sums"], fields["bias_sums"]
        assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
        found: list[Tensor | None] = [weight[0].permute(0, 3, 1, 2).contiguous(), bias[0]]
        if self.found[at + 1].norm is None:
            return found
        return [*found, *_stack(product * self.norms[at].spread, total)]
