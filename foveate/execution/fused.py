"""Loss and gradients of a `ConvNet`, alone or in scale channels, by Triton kernels in bf16.

`FusedGradients` replaces the forward and backward pass of a training step, and updates the running
statistics. On one H200 a step of FovAvg with 17 channels and batch 128 takes 0.435 ms, and 0.771 ms
compiled by PyTorch with kernels for the first blocks. Only these kernels are compiled, so a run
starts sooner.
"""
# Shape letters: B images, S scale channels, N = B S patches, m windows along an axis, K classes.

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate.execution import windows
from foveate.execution.exact import Block, exact_convnet, plain_blocks
from foveate.execution.plan import Prepared
from foveate.execution.trunk_ops import LARGEST_SUM, MOST_VALUES, Launch
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels

KERNEL_DEVICES: tuple[str, ...] = ("cuda",) if find_spec("triton") else ()
POOLS = ("avg", "max", "logsumexp", "concat")
MOST_UNITS, MOST_CLASSES, MOST_CHANNELS, MOST_FEATURES = 128, 64, 64, 2**16
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
PARTS = 128  # parts of a norm that are added at a time
SUMMED = 16  # parts of a gradient that are added at a time
PIECE = 2048  # elements of a parameter that are copied at a time
CHANNELS = 8  # channels of a norm per program
COLUMNS = 64  # columns of a product per program
COMPILERS = 8  # kernels that are compiled at the same time


def find_fused(net: nn.Module, images: Prepared, batch: int) -> "FusedGradients | None":
    """Return the gradients of a network in training mode, or None if the kernels do not apply.

    `images` are prepared, and `batch` is the largest number of them in a step.
    """
    backbone = exact_convnet(net)
    if backbone is None or images.plan is not windows or len(images.inputs) != 3:
        return None
    cut = images.inputs[0]
    supported = (
        cut.dtype == torch.float32 and cut.shape[-1] == 16 and cut.shape[1] <= MOST_CHANNELS,
        batch * cut[0, ..., 0].numel() * 64 < MOST_VALUES,
        type(net) is ConvNet or _pools(net, cut.shape[1]),
        is_trainable(net, backbone, cut.device),
        all(norm is not None for _, norm in plain_blocks(backbone.trunk)),
    )
    return FusedGradients(net) if all(supported) else None


def is_trainable(net: nn.Module, backbone: ConvNet, device: torch.device) -> bool:
    """Whether the kernels support the layers of a network, and all of them are trained."""
    supported = (
        device.type in KERNEL_DEVICES,
        all(_is_plain(parameter, device) for parameter in net.parameters()),
        all(module.training for module in net.modules()),
        backbone.hidden.in_features <= MOST_FEATURES,
        backbone.hidden.out_features <= MOST_UNITS and backbone.head.out_features <= MOST_CLASSES,
        _suits(plain_blocks(backbone.trunk)),
    )
    return all(supported)


def _is_plain(parameter: nn.Parameter, device: torch.device) -> bool:
    trained = parameter.requires_grad and parameter.device == device
    return trained and parameter.dtype == torch.float32 and parameter.is_contiguous()


def _pools(net: nn.Module, channels: int) -> bool:
    """Whether the kernels have the pool of scale channels; that of one channel is no layer."""
    pool = net.pool if type(net) is ScaleChannels else ""
    return pool in POOLS and (channels > 1 or pool != "concat")


def _suits(blocks: tuple[Block, ...]) -> bool:
    """Whether the kernels support the convolutions: few channels, and norms with momentum."""
    widths = [conv.out_channels for conv, _ in blocks]
    normed = all(norm is None or norm.momentum is not None for _, norm in blocks)
    return normed and widths[0] in (4, 8, 16) and 4 <= widths[1] <= 16 and max(widths) <= 64


class _Part(NamedTuple):
    """Partial sums in the workspace: first place, number of parts, size of one, blocks of one."""

    start: int
    number: int
    size: int
    steps: int


class FusedGradients:
    """Loss and gradients of one network; a call sets ``grad`` of its parameters.

    The gradients are views of one tensor, which every call overwrites.
    """

    def __init__(self, net: nn.Module) -> None:
        backbone = exact_convnet(net)
        assert backbone is not None
        self.net, self.backbone = net, backbone
        self.blocks: list[tuple[nn.Conv2d, Any]] = list(plain_blocks(backbone.trunk))
        self.normed = self.blocks[0][1] is not None
        self.parameters = list(net.parameters())
        device, sizes = self.parameters[0].device, [p.numel() for p in self.parameters]
        self.starts = {id(p): sum(sizes[:k]) for k, p in enumerate(self.parameters)}
        self.total = sum(sizes)
        self.flat = torch.zeros(self.total, device=device)
        # After the gradients come those of the folded first block. The biases before a norm have
        # no effect on the loss: their gradients stay 0.
        self.slopes = torch.zeros(self.total + 68 * self.blocks[0][0].out_channels, device=device)
        self.gradients = self._views(self.slopes)
        pairs = zip(self._views(self.flat), self.parameters, strict=True)
        pieces = [[t.detach().view(-1).split(PIECE) for t in pair] for pair in pairs]
        self.copied = [part for target, _ in pieces for part in target]
        self.copied_from = [part for _, source in pieces for part in source]
        self.packing = Packing(self._layers(), device)
        self.layouts: dict[tuple[int, int], StepLayout] = {}

    def __call__(
        self, images: Prepared, labels: Tensor, indices: Tensor | None, smoothing: float
    ) -> Tensor:
        """Compute the mean loss of the images at `indices`, and the gradients of all weights."""
        if indices is None:
            indices = torch.arange(len(labels), device=labels.device)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad(), torch.cuda.device_of(labels):  # Triton launches on this device
            torch._foreach_copy_(self.copied, self.copied_from)
            return self.begin(images.inputs, labels, indices).run(smoothing)

    @property
    def pool(self) -> str:
        """The pool of scale channels; empty for a network on the whole image."""
        return self.net.pool if isinstance(self.net, ScaleChannels) else ""

    def begin(self, inputs: tuple[Tensor, ...], labels: Tensor, indices: Tensor) -> "StepPass":
        """Return the pass over the prepared images at `indices`."""
        layout = self.layout(len(indices), *inputs[0].shape[1:3])
        return WindowsPass(self, layout, labels, indices, inputs)

    def layout(self, images: int, channels: int, side: int) -> "StepLayout":
        """Return the layout for a number of images, made once."""
        if (images, side) not in self.layouts:
            self.layouts[images, side] = StepLayout(self, images, channels, side)
        return self.layouts[images, side]

    def at(self, parameter: Tensor | None) -> int:
        """Return the place of a parameter in the flat tensors."""
        return self.starts[id(parameter)]

    def where(self, layer: int, *more: str) -> dict[str, int]:
        """Return the places of a block's norm, and of `more`, as arguments of a kernel.

        Without a norm, the offset is the bias of the convolution.
        """
        conv, norm = self.blocks[layer]
        found = {"gain_at": 0, "offset_at": self.at(conv.bias)}
        if norm is not None:
            found = {"gain_at": self.at(norm.weight), "offset_at": self.at(norm.bias)}
        other = {"weight_at": conv.weight, "bias_at": conv.bias}
        found |= {name: self.at(other[name]) for name in more}
        return found | {"OUT": conv.out_channels}

    def places(self, parameter: Tensor) -> Tensor:
        """Return the place of each element of a parameter, in its shape."""
        start = self.at(parameter)
        return torch.arange(start, start + parameter.numel()).view(parameter.shape)

    def _views(self, flat: Tensor) -> list[Tensor]:
        parts = flat[: self.total].split([p.numel() for p in self.parameters])
        return [part.view_as(p) for part, p in zip(parts, self.parameters, strict=True)]

    def grouped(self) -> Tensor:
        """Return the places of the second weight as a 2 × 2 convolution, (O, y, x, I), or -1."""
        places = windows.regroup_second(self.places(self.blocks[1][0].weight) + 1)
        found: Tensor = places.permute(0, 2, 3, 1) - 1
        return found

    def hidden(self) -> Tensor:
        """Return the places of the hidden weight, with the features of a position together."""
        places = self.places(self.backbone.hidden.weight)
        found: Tensor = places.unflatten(1, (-1, self.backbone.side**2)).mT.flatten(1)
        return found

    def _layers(self) -> list[Tensor]:
        """Return the order in which the kernels read the weights of each layer."""
        after = [self.places(conv.weight).permute(0, 2, 3, 1) for conv, _ in self.blocks[2:]]
        return [self.grouped(), *after, self.hidden(), self.places(self.backbone.head.weight)]


class Packing:
    """An order in which the kernels read parameters, copied by the kernel `pack`.

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

    def __init__(self, owner: FusedGradients, images: int, channels: int, side: int) -> None:
        self.images, self.channels, self.patches = images, channels, images * channels
        blocks, self.size, self.parts = owner.blocks, 0, dict[str, _Part]()
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
        self.rows = _power(channels) if channels > 1 else 16
        programs = images if channels > 1 else -(-images // self.rows)
        features = owner.backbone.hidden.in_features
        self._reserve(f"slopes {last}", programs, 2 * features, 1)
        pair = 4 * widths[0] * (4 * widths[1] + 17) + widths[1]
        self._add("pair", "pair", self.patches * side**2, pair)
        units, classes = owner.backbone.hidden.out_features, owner.backbone.head.out_features
        self.units, self.classes = _power(units), _power(classes)
        self._add("hidden", "product", self.patches, self.units * (features + 1))
        self._add("head", "product", self.patches, self.classes * (self.units + 1))
        self._add("mixing", "product", images, self.classes * (channels * classes + 1))
        self.table = self._table(owner).to(owner.flat.device)
        self.ones = owner.flat.new_ones(self.patches, units)
        self.compiled = False

    def _add(self, name: str, kernel: str, positions: int, size: int, kinds: int = 1) -> None:
        """Reserve the partial sums of a kernel, for `kinds` times its programs."""
        launch = LAUNCHES[kernel]
        blocks = -(-positions // launch.block)
        steps = -(-blocks // launch.programs)
        self._reserve(name, -(-blocks // steps) * kinds, size, steps)

    def _reserve(self, name: str, count: int, size: int, steps: int) -> None:
        self.parts[name] = _Part(self.size, count, size, steps)
        self.size += count * size

    def _table(self, owner: FusedGradients) -> Tensor:
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
        after = grouped.numel() + len(grouped)  # the gradient of the bias is not summed
        enter("pair", torch.arange(owner.total, len(owner.slopes)), after)
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
        self, owner: FusedGradients, layout: StepLayout, labels: Tensor, indices: Tensor
    ) -> None:
        from foveate.execution import triton_step, triton_trunk

        self.kernels, self.trunk = triton_step, triton_trunk
        self.launches = list[tuple[Any, ...]]()
        self.owner, self.layout, self.labels, self.indices = owner, layout, labels, indices
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
        """Set `cut`, and return the first block on its rows and the moments of the windows."""
        raise NotImplementedError

    def normalise(self, layer: int, part: _Part, parts: Tensor) -> Tensor:
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
            NORM=layer > 1, IN_P=_power(below), OUT_P=_power(width), **_options("convolve"),
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
            self.kernels.classify, (part.number,), self.maps[-1], self.coefficients[-1],
            self.weights[last], self.flat, self.mask, self.weights[last + 1], self.labels,
            self.indices,
            rectified, units, unit_slopes, logits, logit_slopes, pooled_slopes, slope, parts,
            losses, images, smoothing, HIDDEN_BIAS=owner.at(hidden.bias),
            HEAD_BIAS=owner.at(head.bias), MIXING=owner.at(mixing.weight) if mixing else 0,
            MIXING_BIAS=owner.at(mixing.bias) if mixing else 0, POOL=owner.pool,
            CHANNELS=layout.channels, ROWS=layout.rows, OUT=owner.blocks[-1][0].out_channels,
            FEATURES=features, UNITS=hidden.out_features, UNITS_P=layout.units,
            CLASSES=head.out_features, CLASSES_P=layout.classes, SHARED=self.shared,
            **_options("classify"),
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
            self.kernels.product, (part.number, -(-columns // COLUMNS)), left, right, parts, rows,
            part.steps, LEFT=width, RIGHT=columns, LEFT_P=width, COLUMNS=COLUMNS,
            **_options("product"),
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
            CHANNELS=CHANNELS, PARTS=PARTS,
        )  # fmt: skip
        if normed:
            self._over(
                "slopes", area, self.kernels.normalise_slopes, slope, self.maps[layer], found,
                OUT=width, OUT_P=_power(width),
            )  # fmt: skip

    def _convolve_back(self, layer: int, slope: Tensor) -> Tensor:
        """Sum the gradient of a convolution, and return the slopes of the norm before it."""
        layout, conv = self.layout, self.owner.blocks[layer][0]
        below, width, stride = conv.in_channels, conv.out_channels, layout.strides[layer]
        given, coefficients = self.maps[layer - 1], self.coefficients[layer - 1]
        side, columns = layout.sides[layer], _power(3 * below)
        shape = {"HEIGHT": side, "WIDTH": side, "IN": below, "OUT": width, "STRIDE": stride}
        shape["OUT_P"] = _power(width)
        part, parts = self._parts(f"weight {layer}")
        self.launch(
            self.kernels.weight_gradient, (part.number, 3), given, coefficients, slope, parts,
            layout.patches * layout.sides[layer + 1] ** 2, part.steps, **shape,
            COLUMNS=columns, **_options("weight", columns * _power(width)),
        )  # fmt: skip
        part, parts = self._parts(f"slopes {layer - 1}")
        found = torch.empty_like(given)
        self.launch(
            self.kernels.input_gradient, (part.number // stride**2, stride**2), slope,
            self.weights[layer - 1], given, coefficients, found, parts, layout.patches, part.steps,
            **shape, IN_P=_power(below), **_options("input"),
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
            COLUMNS=_power(4 * width), BIAS=False, PER=self.per, **_options("pair"),
        )  # fmt: skip
        self._over(
            "collect", len(self.slopes), self.kernels.collect, self.workspace, layout.table,
            self.slopes, PARTS=SUMMED,
        )  # fmt: skip
        loss = self.flat.new_empty(())
        self.launch(
            self.kernels.unfold, (1,), self.slopes[owner.total :], self.flat, kept, self.slopes,
            losses, loss, layout.images, owner.blocks[0][1].eps if owner.normed else 0.0,
            **owner.where(0, "weight_at"), NORM=owner.normed, BLOCK=128,
        )  # fmt: skip
        return loss

    def _parts(self, name: str) -> tuple[_Part, Tensor]:
        part = self.layout.parts[name]
        return part, self.workspace[part.start :]

    def _bf16(self, size: int) -> Tensor:
        return _bf16(self.flat, size)

    def launch(self, kernel: Any, grid: tuple[int, ...], *given: Any, **options: Any) -> None:
        """Launch a kernel when all of them are known."""
        self.launches.append((kernel, grid, given, options))

    def _over(self, name: str, total: int, kernel: Any, *given: Tensor, **shape: Any) -> None:
        """Launch a kernel with one program for each block of `total` positions."""
        options = _options(name)
        grid = (-(-total // options["BLOCK"]),)
        self.launch(kernel, grid, *given, total, **shape, **options)


class WindowsPass(StepPass):
    """The pass of a network with batch norms over windows that are prepared once."""

    def __init__(
        self,
        owner: FusedGradients,
        layout: StepLayout,
        labels: Tensor,
        indices: Tensor,
        inputs: tuple[Tensor, ...],
    ) -> None:
        super().__init__(owner, layout, labels, indices)
        self.cut, self.means, self.squares = inputs
        self.per = layout.channels * layout.sides[1] ** 2

    def fold(self) -> tuple[Tensor, Tensor]:
        """Fold the first norm into the first convolution."""
        layout, norm = self.layout, self.owner.blocks[0][1]
        folded, kept = self.flat.new_empty(17 * self.filters), self.flat.new_empty(272 + 144)
        self.launch(
            self.kernels.fold, (1,), self.flat, self.means, self.squares, self.indices,
            norm.running_mean, norm.running_var, norm.num_batches_tracked, folded, kept,
            layout.images, 4 * layout.images * self.per, norm.momentum, norm.eps,
            **self.owner.where(0, "weight_at", "bias_at"), num_warps=8,
        )  # fmt: skip
        return folded, kept

    def normalise(self, layer: int, part: _Part, parts: Tensor) -> Tensor:
        """Compute the coefficients of a norm from the moments of its map."""
        conv, norm = self.owner.blocks[layer]
        area = self.layout.patches * self.layout.sides[layer + 1] ** 2
        found = self.flat.new_empty(4 * conv.out_channels)
        self.launch(
            self.kernels.statistics, (-(-conv.out_channels // CHANNELS),), parts, self.flat,
            norm.running_mean, norm.running_var, norm.num_batches_tracked, found, part.number,
            area, norm.momentum, norm.eps, **self.owner.where(layer, "bias_at"),
            CHANNELS=CHANNELS, PARTS=PARTS,
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


def _options(name: str, sums: int = 0) -> dict[str, Any]:
    """Return the launch parameters of a kernel that keeps `sums` float32 sums in registers."""
    launch = LAUNCHES[name]
    warps = launch.warps * (2 if sums > LARGEST_SUM else 1)
    return {"BLOCK": launch.block, "num_warps": warps, "num_stages": launch.stages}


def _bf16(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.bfloat16)


def _power(number: int) -> int:
    """Return the smallest power of two that is at least 16 and not below a number."""
    return max(16, 1 << (number - 1).bit_length())
