"""One pass of a training step: the tensors of a batch and the kernels to launch, in order.

In this package, slopes are gradients with respect to activations.
"""
# Shape letters: B images, S scale channels, N = B S patches, m windows along an axis, K classes.

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foveate.execution import fused_layout
from foveate.execution.fused_layout import (
    CHANNELS,
    COLUMNS,
    Packing,
    Part,
    StepLayout,
    launch_options,
)
from foveate.execution.triton_common import power
from foveate.models.channels import ScaleChannels

if TYPE_CHECKING:
    from foveate.execution.fused import FusedGradients

COMPILERS = 8  # kernels that are compiled at the same time


class StepPass:
    """One forward and backward pass over a batch: its tensors and the kernels to launch.

    Kernels are launched when all of them are known, so that new ones are compiled together.

    Attributes:
        cut: Rows of 4 × 4 pixels of all patches of an image, selected by `indices` if there are
            `per` rows of each image, and those of the batch if `per` is 0.
    """

    cut: Tensor
    per = 0

    def __init__(
        self,
        owner: "FusedGradients",
        layout: StepLayout,
        labels: Tensor,
        indices: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> None:
        from foveate.execution import triton_head, triton_step, triton_trunk

        self.kernels, self.trunk, self.head = triton_step, triton_trunk, triton_head
        self.launches = list[tuple[Any, ...]]()
        self.owner, self.layout, self.labels, self.indices = owner, layout, labels, indices
        self.inputs = inputs
        self.flat, self.slopes = owner.flat, owner.slopes
        self.workspace = self.flat.new_empty(layout.size)
        self.filters = 4 * owner.blocks[0][0].out_channels
        self.shared = owner.pool in ("avg", "winners")  # one dropout mask for all patches
        ones = layout.ones[: layout.images if self.shared else layout.patches]
        self.mask = owner.backbone.dropout(ones)
        self.weights = self.pack(owner.packing, self._bf16(len(owner.packing.table)))

    def pack(self, packing: Packing, packed: Tensor) -> list[Tensor]:
        """Copy the layers of a packing to a tensor, whose type they get."""
        self._over("pack", len(packed), self.kernels.pack, self.flat, packing.table, packed)
        return [
            packed[start : start + shape.numel()].view(shape)
            for start, shape in zip(packing.starts, packing.shapes, strict=False)
        ]

    def run(self, smoothing: float) -> Tensor:
        """Run all kernels, and return the mean loss."""
        owner, layout = self.owner, self.layout
        folded, kept = self.fold()
        positions = layout.patches * layout.sides[1] ** 2
        self.active = self._bf16(positions * self.filters)
        self._over(
            "first", positions, self.trunk.first_block_kernel, self.cut, self.indices, folded,
            folded[16 * self.filters :], self.active, PER=self.per, WIDTH=16, FILTERS=self.filters,
        )  # fmt: skip
        self.maps, self.coefficients = [self.active], [folded]
        for layer in range(1, len(owner.blocks)):
            self._convolve(layer)
        losses, slope = self._classify(smoothing)
        for layer in range(len(owner.blocks) - 1, 1, -1):
            self._normalise_slopes(layer, slope)
            slope = self._convolve_back(layer, slope)
        self._normalise_slopes(1, slope)
        loss = self._gradients(slope, kept, losses)
        if not layout.compiled and self.flat.is_cuda:
            compile_together(self.launches, self.flat.device)
        layout.compiled = True
        for kernel, grid, given, options in self.launches:
            kernel[grid](*given, **options)
        return loss

    def fold(self) -> tuple[Tensor, Tensor | None]:
        """Set `cut`; return weight and shift of the first block, and the moments of the windows."""
        raise NotImplementedError

    def normalise(self, layer: int, part: Part, parts: Tensor) -> Tensor:
        """Return gain, offset, mean and inverse deviation of a norm, and track them."""
        raise NotImplementedError

    def _convolve(self, layer: int) -> None:
        """Compute the map of a layer and the coefficients of its norm."""
        layout, conv = self.layout, self.owner.blocks[layer][0]
        below, width = self.filters if layer == 1 else conv.in_channels, conv.out_channels
        side, area = layout.sides[layer], layout.patches * layout.sides[layer + 1] ** 2
        part, parts = self._parts(f"moments {layer}")
        found = self._bf16(area * width)
        self.launch(
            self.kernels.convolve, (part.number,), self.maps[-1], self.coefficients[-1],
            self.weights[layer - 1], found, parts, area, part.steps, HEIGHT=side, WIDTH=side,
            IN=below, OUT=width, SIDE=2 if layer == 1 else 3, STRIDE=layout.strides[layer],
            NORM=layer > 1, IN_P=power(below), OUT_P=power(width), **launch_options("convolve"),
        )  # fmt: skip
        self.maps.append(found)
        self.coefficients.append(self.normalise(layer, part, parts))

    def _classify(self, smoothing: float) -> tuple[Tensor, Tensor]:
        """Compute the loss of each image and the slopes of the last norm's output."""
        owner, layout = self.owner, self.layout
        net, last = owner.net, len(self.maps) - 1
        hidden, head = owner.backbone.hidden, owner.backbone.head
        mixing = net.mixing if isinstance(net, ScaleChannels) else None
        images, patches, features = layout.images, layout.patches, hidden.in_features
        rectified, slope = self._bf16(patches * features), self._bf16(patches * features)
        units, unit_slopes = (self._bf16(patches * layout.units) for _ in range(2))
        logits, logit_slopes = (self._bf16(patches * layout.classes) for _ in range(2))
        pooled_slopes, losses = self._bf16(images * layout.classes), self.flat.new_empty(images)
        part, parts = self._parts(f"slopes {last}")
        self.launch(
            self.head.classify, (part.number,), self.maps[-1], self.coefficients[-1],
            self.weights[last], self.flat, self.mask, self.weights[last + 1], self.labels,
            self.indices,
            rectified, units, unit_slopes, logits, logit_slopes, pooled_slopes, slope, parts,
            losses, images, smoothing, HIDDEN_BIAS=owner.at(hidden.bias),
            HEAD_BIAS=owner.at(head.bias), MIXING=owner.at(mixing.weight) if mixing else 0,
            MIXING_BIAS=owner.at(mixing.bias) if mixing else 0, POOL=owner.pool,
            CHANNELS=layout.channels, ROWS=layout.rows, OUT=owner.blocks[-1][0].out_channels,
            FEATURES=features, UNITS=hidden.out_features, UNITS_P=layout.units,
            CLASSES=head.out_features, CLASSES_P=layout.classes, SHARED=self.shared,
            **launch_options("classify"),
        )  # fmt: skip
        self._product("hidden", unit_slopes, layout.units, rectified, features, patches)
        self._product("head", logit_slopes, layout.classes, units, layout.units, patches)
        if mixing is not None:
            self._product(
                "mixing", pooled_slopes, layout.classes, logits, mixing.in_features, images
            )
        return losses, slope

    def _product(
        self, name: str, left: Tensor, width: int, right: Tensor, columns: int, rows: int
    ) -> None:
        """Sum the gradient of a linear layer from slopes (rows, width) and inputs."""
        part, parts = self._parts(name)
        self.launch(
            self.head.product, (part.number, -(-columns // COLUMNS)), left, right, parts, rows,
            part.steps, LEFT=width, RIGHT=columns, LEFT_P=width, COLUMNS=COLUMNS,
            **launch_options("product"),
        )  # fmt: skip

    def _normalise_slopes(self, layer: int, slope: Tensor) -> None:
        """Turn the slopes of a norm's output into those of its input, in place."""
        width, normed = self.owner.blocks[layer][0].out_channels, self.owner.normed
        area = self.layout.patches * self.layout.sides[layer + 1] ** 2
        part, parts = self._parts(f"slopes {layer}")
        found = self.flat.new_empty(3 * width)
        self.launch(
            self.kernels.slope_statistics, (-(-width // CHANNELS),), parts,
            self.coefficients[layer], found, self.slopes, part.number, area,
            **self.owner.where(layer), POSITIONS=part.size // (2 * width), NORM=normed,
            CHANNELS=CHANNELS, PARTS=fused_layout.PARTS,
        )  # fmt: skip
        if normed:
            self._over(
                "slopes", area, self.kernels.normalise_slopes, slope, self.maps[layer], found,
                OUT=width, OUT_P=power(width),
            )  # fmt: skip

    def _convolve_back(self, layer: int, slope: Tensor) -> Tensor:
        """Sum the gradient of a convolution, and return the slopes of the norm before it."""
        layout, conv = self.layout, self.owner.blocks[layer][0]
        below, width, stride = conv.in_channels, conv.out_channels, layout.strides[layer]
        given, coefficients = self.maps[layer - 1], self.coefficients[layer - 1]
        side, columns = layout.sides[layer], power(3 * below)
        shape = {"HEIGHT": side, "WIDTH": side, "IN": below, "OUT": width, "STRIDE": stride}
        shape["OUT_P"] = power(width)
        part, parts = self._parts(f"weight {layer}")
        self.launch(
            self.kernels.weight_gradient, (part.number, 3), given, coefficients, slope, parts,
            layout.patches * layout.sides[layer + 1] ** 2, part.steps, **shape,
            COLUMNS=columns, **launch_options("weight", columns * power(width)),
        )  # fmt: skip
        part, parts = self._parts(f"slopes {layer - 1}")
        found = torch.empty_like(given)
        self.launch(
            self.kernels.input_gradient, (part.number // stride**2, stride**2), slope,
            self.weights[layer - 1], given, coefficients, found, parts, layout.patches, part.steps,
            **shape, IN_P=power(below), **launch_options("input"),
        )  # fmt: skip
        return found

    def _gradients(self, slope: Tensor, kept: Tensor | None, losses: Tensor) -> Tensor:
        """Compute the gradients of the first two blocks, add all parts, and return the loss."""
        owner, layout = self.owner, self.layout
        side, width = layout.sides[1], owner.blocks[1][0].out_channels
        part, parts = self._parts("pair")
        self.launch(
            self.trunk.pair_kernel, (part.number,), self.cut, self.indices, self.active, slope,
            self.weights[0], parts, layout.patches * side**2, part.steps, HEIGHT=side, WIDTH=side,
            PIXELS=16, FILTERS=self.filters, OUT=width, SIDE=2, ROWS=16,
            COLUMNS=power(4 * width), PER=self.per, **launch_options("pair"),
        )  # fmt: skip
        self._over(
            "collect", len(self.slopes), self.head.collect, self.workspace, layout.table,
            self.slopes, PARTS=fused_layout.SUMMED,
        )  # fmt: skip
        loss = self.flat.new_empty(())
        self.launch(
            self.kernels.unfold, (1,), self.slopes[owner.total :], self.flat, kept, self.slopes,
            losses, loss, layout.images, owner.blocks[0][1].eps if owner.normed else 0.0,
            **owner.where(0, "weight_at"), NORM=owner.normed, BLOCK=128,
        )  # fmt: skip
        return loss

    def _parts(self, name: str) -> tuple[Part, Tensor]:
        part = self.layout.parts[name]
        return part, self.workspace[part.start :]

    def _bf16(self, size: int) -> Tensor:
        return fused_layout.bf16(self.flat, size)

    def launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        """Launch a kernel when all of them are known."""
        self.launches.append((kernel, grid, given, options))

    def _over(self, name: str, total: int, kernel: Any, *given: Tensor, **shape: Any) -> None:
        """Launch a kernel with one program for each block of `total` positions."""
        options = launch_options(name)
        grid = (-(-total // options["BLOCK"]),)
        self.launch(kernel, grid, *given, total, **shape, **options)


class WindowsPass(StepPass):
    """The pass of a network with batch norms over windows that are prepared once."""

    def fold(self) -> tuple[Tensor, Tensor]:
        """Fold the first norm into the first convolution."""
        layout, norm = self.layout, self.owner.blocks[0][1]
        self.cut, means, squares = self.inputs
        self.per = layout.channels * layout.sides[1] ** 2
        folded, kept = self.flat.new_empty(17 * self.filters), self.flat.new_empty(272 + 144)
        self.launch(
            self.kernels.fold, (1,), self.flat, means, squares, self.indices,
            norm.running_mean, norm.running_var, norm.num_batches_tracked, folded, kept,
            layout.images, 4 * layout.images * self.per, norm.momentum, norm.eps,
            **self.owner.where(0, "weight_at", "bias_at"), num_warps=8,
        )  # fmt: skip
        return folded, kept

    def normalise(self, layer: int, part: Part, parts: Tensor) -> Tensor:
        """Compute the coefficients of a norm from the moments of its map."""
        conv, norm = self.owner.blocks[layer]
        area = self.layout.patches * self.layout.sides[layer + 1] ** 2
        found = self.flat.new_empty(4 * conv.out_channels)
        self.launch(
            self.kernels.statistics, (-(-conv.out_channels // CHANNELS),), parts, self.flat,
            norm.running_mean, norm.running_var, norm.num_batches_tracked, found, part.number,
            area, norm.momentum, norm.eps, **self.owner.where(layer, "bias_at"),
            CHANNELS=CHANNELS, PARTS=fused_layout.PARTS,
        )  # fmt: skip
        return found


def compile_together(launches: list[tuple[Any, ...]], device: torch.device) -> None:
    """Compile the kernels of all launches at the same time; Triton takes one after the other."""
    from triton import AsyncCompileMode

    def load(found: Any) -> None:
        with torch.cuda.device(device):
            _ = found.run  # builds the launcher, with a C compiler, and loads the kernel

    with ThreadPoolExecutor(COMPILERS) as pool:
        with AsyncCompileMode(pool):
            for kernel, grid, given, options in launches:
                kernel.warmup(*given, grid=grid, **options)
        ready = [kernel.warmup(*given, grid=grid, **o) for kernel, grid, given, o in launches]
        list(pool.map(load, {id(found): found for found in ready}.values()))
