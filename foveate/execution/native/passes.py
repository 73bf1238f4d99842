"""Forward and backward pass through the compiled stages of a trunk."""
# Shape letters: N images, C image channel, H W pixels, O filters.

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from foveate.execution.exact import Block
from foveate.execution.native.stages import Buffers, Field, empty_cpu, parts_of, stage

GRADIENTS = ("weight_gradient", "bias_gradient", "norm_weight_gradient", "norm_bias_gradient")

Fields = dict[str, Field]


class First(NamedTuple):
    """The first convolution with its norm folded in, and the norm and moments used for it."""

    weight: Tensor  # (9 C, O)
    bias: Tensor  # (O,)
    norm: Tensor  # (4, O): mean, gain, shift, 1 / standard deviation
    moments: Tensor  # mean (9 C,) and covariance (9 C, 9 C) of 3 × 3 windows, in training

    def fields(self) -> Fields:
        """Return the fields of a stage that runs this convolution."""
        return {"first": self.weight, "first_bias": self.bias}


@torch.no_grad()
def fold(block: Block, images: Tensor) -> First:
    """Fold the norm of the first block into its convolution.

    In training mode the statistics of the norm are computed from the images.
    """
    conv, norm = block
    count, colours, height, width = images.shape
    taps, filters = 9 * colours, conv.out_channels
    moments = empty_cpu(1 + taps, taps, dtype=torch.float64)
    first = First(empty_cpu(taps, filters), empty_cpu(filters), empty_cpu(4, filters), moments)
    sides: Fields = {"height": height - 2, "width": width - 2, "stride": 1, "from": filters}
    made: Fields = {**first.fields(), "norm": first.norm, "moments": moments}
    fields = {**_planes(images), **sides, **_layers(block), **made}
    if norm is None or not norm.training:
        stage("fold", count, **fields)
        return first
    # Subtract a value near the mean first, to limit cancellation in the covariance.
    shift = images.reshape(-1)[:: max(1, images.numel() // 4096)].mean()
    sums = empty_cpu(parts_of(count), 1 + taps, taps, dtype=torch.float64)
    stage("moments", count, **fields, shift=shift, sums=sums)
    return first


class Forward:
    """Forward pass of images (N, C, H, W) through the blocks, with the saved feature maps.

    `maps` (N, H, W, O) are the raw outputs of the convolutions, of which only the pixels in `boxes`
    (N, 4) and one other are stored (see native/boxes.h), and `norms` (4, O) their norms. The maps
    are in buffers that are valid as long as this object exists.
    """

    def __init__(self, blocks: Sequence[Block], images: Tensor, first: First | None = None) -> None:
        self.blocks, self.images, self.buffers = blocks, images, Buffers()
        self.sides = sides_of(blocks, images)
        self.training = [norm is not None and norm.training for _, norm in blocks]
        self.maps: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.boxes: list[Tensor] = []
        self.first = fold(blocks[0], images) if first is None else first

    def run(self) -> Tensor:
        """Run all stages and return the last feature map (N, O, H, W)."""
        count = self.images.shape[0]
        read: Fields = {**_planes(self.images), **self.first.fields()}
        for at, block in enumerate(self.blocks[1:], 1):
            made = self.buffers.allocate(count, *self.sides[at], block[0].out_channels)
            norm = empty_cpu(4, block[0].out_channels)
            boxes = empty_cpu(count, 4, dtype=torch.int64)
            fields = {**read, **self.sizes(at), **_layers(block), **_sums(made), "boxes": boxes}
            stage("next" if self.maps else "first", count, **fields, map=made, norm=norm)
            self.maps.append(made)
            self.norms.append(norm)
            self.boxes.append(boxes)
            read = {"below": made, "below_norm": norm, "below_boxes": boxes}
        result = empty_cpu(count, made.shape[3], *self.sides[-1])
        stage("last", count, **read, **_ends(made), result=result)
        return result

    def sizes(self, at: int) -> Fields:
        """Return the input size, channels and stride of the convolution of a block."""
        conv, (height, width) = self.blocks[at][0], self.sides[at - 1]
        channels: Fields = {"from": conv.in_channels, "to": conv.out_channels}
        return {"height": height, "width": width, "stride": conv.stride[0], **channels}


class Backward:
    """Backward pass, given the inputs and saved maps of the forward pass."""

    def __init__(
        self, forward: Forward, images: Tensor, parameters: Sequence[Tensor], maps: Sequence[Tensor]
    ) -> None:
        self.forward, self.images, self.maps = forward, images, maps
        left = iter(parameters)
        self.parameters = [[*islice(left, 2 if n is None else 4)] for _, n in forward.blocks]
        self.gradients = [[empty_cpu(*p.shape) for p in own] for own in self.parameters]
        self.buffers = Buffers()

    def run(self, result_slope: Tensor) -> list[Tensor]:
        """Return the gradients in the order of the parameters."""
        count, last = self.images.shape[0], len(self.maps)
        read = self._below(last)
        stage("last_back", count, **read, **_ends(self.maps[-1]), result=result_slope.contiguous())
        for at in range(last, 1, -1):
            fields = self._convolution(at, read)
            read = self._below(at - 1)
            stage("next_back", count, **fields, **read)
        self._run_first(read)
        return [gradient for own in self.gradients for gradient in own]

    def _run_first(self, read: Fields) -> None:
        """Run the second block and the first, whose activations are recomputed."""
        count, first = self.images.shape[0], self.forward.first
        planes, parts = _planes(self.images), parts_of(count)
        sums: Fields = {
            "first_sums": empty_cpu(parts, *first.weight.shape),
            "first_bias_sums": empty_cpu(parts, *first.bias.shape),
        }
        fields = {**self._convolution(1, read), **planes, **first.fields(), **sums}
        stage("first_back", count, **fields)
        weight, bias = self.parameters[0][:2]
        made_of: Fields = {"weight": weight.contiguous(), "bias": bias, "moments": first.moments}
        norm: Fields = {"norm": first.norm, "training": self.forward.training[0]}
        gradients = dict(zip(GRADIENTS, self.gradients[0], strict=False))
        fields = {**planes, "from": weight.shape[0], **made_of, **norm, **sums, **gradients}
        stage("unfold", count, **fields)

    def _below(self, at: int) -> Fields:
        """Return the fields of the map that a stage reads, with buffers for its gradients."""
        below, norm = self.maps[at - 1], self.forward.norms[at - 1]
        room: Fields = {
            "below_boxes": self.forward.boxes[at - 1],
            "below_slope": self.buffers.allocate(*below.shape),
            "below_unnorm": torch.empty_like(norm),
            **dict(zip(GRADIENTS[2:], self.gradients[at][2:], strict=False)),
        }
        training = self.forward.training[at]
        return {"below": below, "below_norm": norm, "training": training, **room, **_sums(below)}

    def _convolution(self, at: int, read: Fields) -> Fields:
        """Return the fields for the backward pass of a block's convolution.

        `read` contains the fields of the block's output map, from `_below`.
        """
        weight, parts = self.parameters[at][0].contiguous(), parts_of(self.images.shape[0])
        fields: Fields = {
            "map": read["below"],
            "boxes": read["below_boxes"],
            "slope": read["below_slope"],
            "unnorm": read["below_unnorm"],
            "weight": weight,
            "weight_sums": self.buffers.allocate(parts, *weight.shape),
            "bias_sums": empty_cpu(parts, weight.shape[0]),
            **dict(zip(GRADIENTS[:2], self.gradients[at][:2], strict=True)),
        }
        return {**self.forward.sizes(at), **fields}


def sides_of(blocks: Sequence[Block], images: Tensor) -> list[tuple[int, int]]:
    """Return height and width after each convolution."""
    height, width = images.shape[2:]
    sides = []
    for conv, _ in blocks:
        height, width = ((n - 3) // conv.stride[0] + 1 for n in (height, width))
        sides.append((height, width))
    return sides


def _layers(block: Block) -> Fields:
    """Return the parameters of a block and the running statistics of its norm."""
    conv, norm = block
    fields: Fields = {"weight": conv.weight.contiguous(), "bias": conv.bias}
    if norm is None:
        return fields
    assert norm.momentum is not None
    return {
        **fields,
        "norm_weight": norm.weight,
        "norm_bias": norm.bias,
        "running_mean": norm.running_mean,
        "running_variance": norm.running_var,
        "momentum": norm.momentum,
        "eps": norm.eps,
        "training": norm.training,
    }


def _planes(images: Tensor) -> Fields:
    sizes: Fields = {"plane": images.shape[2:].numel(), "pitch": images.shape[3]}
    return {"images": images, "colours": images.shape[1], **sizes}


def _ends(last: Tensor) -> Fields:
    return {"height": last.shape[1], "width": last.shape[2], "from": last.shape[3], "stride": 1}


def _sums(like: Tensor) -> Fields:
    """Allocate two partial sums over a map (N, H, W, O)."""
    sums, squares = empty_cpu(2, parts_of(like.shape[0]), like.shape[3], dtype=torch.float64)
    return {"sums": sums, "squares": squares}
