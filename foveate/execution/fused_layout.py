"""Launches of the kernels of a training step, and the sizes of their tensors and partial sums."""
# Shape letters: B images, S scale channels, N = B S patches, m windows along an axis, K classes.

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foveate.execution.triton_common import power

if TYPE_CHECKING:
    from foveate.execution.fused import FusedGradients


class Launch(NamedTuple):
    """Launch parameters of a kernel: positions per block, programs, warps and pipeline stages."""

    block: int
    programs: int
    warps: int
    stages: int


# The fastest of 3 to 12 launches on one H200 for FovAvg with batches of 16 and 128 images.
LAUNCHES = {
    "pack": Launch(1024, 0, 4, 1),
    "first": Launch(128, 0, 4, 1),
    "convolve": Launch(128, 528, 4, 1),
    "slopes": Launch(64, 0, 4, 1),
    "input": Launch(128, 528, 4, 1),
    "weight": Launch(128, 132, 4, 2),
    "pair": Launch(64, 264, 4, 3),
    "classify": Launch(128, 0, 4, 2),
    "product": Launch(64, 8, 4, 2),
    "collect": Launch(32, 0, 4, 1),
}
"""Launches by kernel; `programs` is 0 where each block is one program."""
LARGEST_SUM = 64 * 128  # float32 sums that a program with the usual number of warps keeps
PARTS = 128  # parts of a norm that are added at a time
SUMMED = 16  # parts of a gradient that are added at a time
CHANNELS = 8  # channels of a norm per program
COLUMNS = 64  # columns of a product per program


class Part(NamedTuple):
    """Partial sums in the workspace: first place, number of parts, size of one, blocks of one."""

    start: int
    number: int
    size: int
    steps: int


class Packing:
    """The order in which kernels read some parameters; the kernel `pack` copies them.

    Attributes:
        table: Place of each element among all parameters, -1 for 0, or -2 for 1.
        starts: Where each layer begins, aligned to 16 bytes.
        shapes: Shape of each layer.
    """

    def __init__(self, layers: Sequence[Tensor], device: torch.device) -> None:
        self.starts, self.shapes = [0], [layer.shape for layer in layers]
        for layer in layers:
            self.starts.append(-(-(self.starts[-1] + layer.numel()) // 8) * 8)
        table = torch.full((self.starts[-1],), -1, dtype=torch.int32)
        for start, layer in zip(self.starts, layers, strict=False):
            table[start : start + layer.numel()] = layer.flatten()
        self.table = table.to(device)


class StepLayout:
    """Sizes of the maps and of the partial sums for one number of images.

    Attributes:
        sides: Width and height of the input of each convolution, the second one's on 2 × 2 groups.
        parts: Partial sums by name.
        size: Size of the workspace of all partial sums.
        table: First place, step and number of the partial sums of each gradient, for `collect`.
    """

    def __init__(self, owner: "FusedGradients", images: int, channels: int, side: int) -> None:
        self.images, self.channels, self.patches = images, channels, images * channels
        blocks, self.size, self.parts = owner.blocks, 0, dict[str, Part]()
        widths = [conv.out_channels for conv, _ in blocks]
        self.sides, self.strides = [0, side, side - 1], [1, 1]
        self.strides += [conv.stride[0] for conv, _ in blocks[2:]]
        for stride in self.strides[2:]:
            self.sides.append((self.sides[-1] - 3) // stride + 1)
        last = len(blocks) - 1
        for layer in range(1, last + 1):
            area = self.patches * self.sides[layer + 1] ** 2
            self._add(f"moments {layer}", "convolve", area, 2 * widths[layer])
            if layer > 1:
                kernels = 9 * widths[layer] * widths[layer - 1]
                self._add(f"weight {layer}", "weight", area, kernels)
                stride = self.strides[layer]
                inputs = self.patches * (-(-self.sides[layer] // stride)) ** 2
                self._add(f"slopes {layer - 1}", "input", inputs, 2 * widths[layer - 1], stride**2)
        self.rows = power(channels) if channels > 1 else 16
        programs = images if channels > 1 else -(-images // self.rows)
        features = owner.backbone.hidden.in_features
        self._reserve(f"slopes {last}", programs, 2 * features, 1)
        pair = 4 * widths[0] * (4 * widths[1] + 17)
        self._add("pair", "pair", self.patches * side**2, pair)
        units, classes = owner.backbone.hidden.out_features, owner.backbone.head.out_features
        self.units, self.classes = power(units), power(classes)
        self._add("hidden", "product", self.patches, self.units * (features + 1))
        self._add("head", "product", self.patches, self.classes * (self.units + 1))
        self._add("mixing", "product", images, self.classes * (channels * classes + 1))
        self.table = self._table(owner).to(owner.flat.device)
        self.ones = owner.flat.new_ones(self.patches, units)
        self.compiled = False

    def _add(self, name: str, kernel: str, positions: int, size: int, kinds: int = 1) -> None:
        """Reserve memory for the partial sums of a kernel, which is launched in `kinds` grids."""
        launch = LAUNCHES[kernel]
        blocks = -(-positions // launch.block)
        steps = -(-blocks // launch.programs)
        self._reserve(name, -(-blocks // steps) * kinds, size, steps)

    def _reserve(self, name: str, count: int, size: int, steps: int) -> None:
        self.parts[name] = Part(self.size, count, size, steps)
        self.size += count * size

    def _table(self, owner: "FusedGradients") -> Tensor:
        table = torch.zeros(3, len(owner.slopes), dtype=torch.int64)

        def enter(name: str, places: Tensor, start: int = 0) -> None:
            """Enter elements whose sums lie one after the other in a part; -1 is none."""
            part, flat = self.parts[name], places.flatten()
            entry = torch.stack([
                part.start + start + torch.arange(len(flat)),
                torch.full_like(flat, part.size), torch.full_like(flat, part.number),
            ])  # fmt: skip
            table[:, flat[flat >= 0]] = entry[:, flat >= 0]

        for layer, (conv, _) in enumerate(owner.blocks[2:], 2):
            enter(f"weight {layer}", owner.places(conv.weight).permute(2, 0, 3, 1))
        grouped = owner.grouped()  # (O, y, x, I), summed as (I, y, x, O)
        enter("pair", grouped.permute(3, 1, 2, 0))
        enter("pair", torch.arange(owner.total, len(owner.slopes)), grouped.numel())
        backbone = owner.backbone
        hidden, head = backbone.hidden, backbone.head
        enter("hidden", owner.hidden())
        enter("hidden", owner.places(hidden.bias), self.units * hidden.in_features)
        short = torch.full((head.out_features, self.units), -1)
        short[:, : hidden.out_features] = owner.places(head.weight)
        enter("head", short)
        enter("head", owner.places(head.bias), self.classes * self.units)
        if (mixing := getattr(owner.net, "mixing", None)) is not None:
            enter("mixing", owner.places(mixing.weight))
            enter("mixing", owner.places(mixing.bias), self.classes * mixing.in_features)
        return table.int()


def launch_options(name: str, sums: int = 0) -> dict[str, Any]:
    """Return the launch parameters of a kernel that keeps `sums` float32 sums in registers."""
    launch = LAUNCHES[name]
    warps = launch.warps * (2 if sums > LARGEST_SUM else 1)
    return {"BLOCK": launch.block, "num_warps": warps, "num_stages": launch.stages}


def bf16(like: Tensor, size: int) -> Tensor:
    """Return an uninitialised tensor for activations, slopes or rounded weights."""
    return like.new_empty(size, dtype=torch.bfloat16)
