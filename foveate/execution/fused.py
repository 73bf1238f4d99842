"""The training step of a `ConvNet`, alone or in scale channels, by few kernels of its own.

`FusedGradients` computes the loss and the gradients of all weights, and updates the running
statistics, as `loss_of` and `backward` do in bf16. There is nothing to compile but the kernels, so
a run starts sooner, and a step takes half the time of the compiled one.
"""
# Shape letters: B images, S scale channels, N = B S patches, m windows along an axis, K classes.

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.execution import windows
from foveate.execution.exact import Block, exact_convnet, plain_blocks
from foveate.execution.plan import Prepared
from foveate.execution.trunk_ops import MOST_VALUES
from foveate.models.backbone import ConvNet
from foveate.models.channels import ScaleChannels

KERNEL_DEVICES: tuple[str, ...] = ("cuda",) if find_spec("triton") else ()
POOLS = ("avg", "max", "logsumexp", "concat")
MOST_UNITS, MOST_CLASSES, MOST_CHANNELS = 128, 64, 64


class Launch(NamedTuple):
    """Launch parameters: positions per block, most programs, warps and pipeline stages."""

    block: int
    programs: int
    warps: int
    stages: int


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
"""Chosen on one H200; `programs` is 0 where each block is one program."""
PARTS = 128  # parts of a norm that are added at a time
SUMMED = 64  # parts of a gradient that are added at a time
PIECE = 2048  # elements of a parameter that are copied at a time
CHANNELS = 8  # channels of a norm per program
COLUMNS = 64  # columns of a product per program


def find_fused(net: nn.Module, images: Prepared) -> "FusedGradients | None":
    """Return the fused gradients of a network in training mode, or None if it has none."""
    return FusedGradients(net) if _supports(net, images) else None


def _supports(net: nn.Module, images: Prepared) -> bool:
    """Whether the kernels reproduce the training step of a network on prepared images."""
    backbone = exact_convnet(net)
    if backbone is None or images.plan is not windows or len(images.inputs) != 3:
        return False
    cut = images.inputs[0]
    kind = cut.device.type in KERNEL_DEVICES and cut.dtype == torch.float32
    single = cut.shape[-1] == 16 and cut.shape[1] <= MOST_CHANNELS
    parameters = all(
        p.requires_grad
        and p.dtype == torch.float32
        and p.is_contiguous()
        and p.device == cut.device
        for p in net.parameters()
    )
    modes = all(m.training for m in net.modules())
    pooled = type(net) is ConvNet or (type(net) is ScaleChannels and net.pool in POOLS)
    pooled = pooled and not (cut.shape[1] == 1 and getattr(net, "pool", "") == "concat")
    linear = backbone.hidden.out_features <= MOST_UNITS
    linear = linear and backbone.head.out_features <= MOST_CLASSES
    blocks = plain_blocks(backbone.trunk)
    return kind and single and parameters and modes and pooled and linear and _suits(blocks)


def _suits(blocks: tuple[Block, ...]) -> bool:
    """Whether the kernels support the convolutions: few channels, and norms with momentum."""
    widths = [conv.out_channels for conv, _ in blocks]
    normed = all(norm is not None and norm.momentum is not None for _, norm in blocks)
    first = widths[0] in (4, 8, 16) and 4 <= widths[1] <= 16
    return normed and first and max(widths) <= 64


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
        layers = self._layers()
        self.packed_at = [0]
        for layer in layers:  # aligned to 16 bytes
            self.packed_at.append(-(-(self.packed_at[-1] + layer.numel()) // 8) * 8)
        order = torch.full((self.packed_at[-1],), -1, dtype=torch.int32)
        for start, layer in zip(self.packed_at, layers, strict=False):
            order[start : start + layer.numel()] = layer.flatten()
        self.order = order.to(device)
        self.layouts: dict[tuple[int, int], _Layout] = {}

    def __call__(
        self, images: Prepared, labels: Tensor, indices: Tensor | None, smoothing: float
    ) -> Tensor:
        """Compute the mean loss of the images at `indices`, and the gradients of all weights."""
        if indices is None:
            indices = torch.arange(len(labels), device=labels.device)
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        key = len(indices), images.inputs[0].shape[1]
        if key not in self.layouts:
            self.layouts[key] = _Layout(self, *key, images.inputs[0].shape[2])
        with torch.no_grad(), torch.cuda.device_of(labels):  # Triton launches on this device
            return _run(self, self.layouts[key], images.inputs, labels, indices, smoothing)

    def at(self, parameter: Tensor | None) -> int:
        """Return the place of a parameter in the flat tensors."""
        return self.starts[id(parameter)]

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
        found: Tensor = places.unflatten(1, (-1, self.backbone.side**2)).mT.flatten(1)  # type: ignore[no-untyped-call]
        return found

    def _layers(self) -> list[Tensor]:
        """Return the order in which the kernels read the weights of each layer."""
        after = [self.places(conv.weight).permute(0, 2, 3, 1) for conv, _ in self.blocks[2:]]
        return [self.grouped(), *after, self.hidden(), self.places(self.backbone.head.weight)]


class _Layout:
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
        self.sides, self.strides = (
            [0, side, side - 1],
            [1, 1, *(c.stride[0] for c, _ in blocks[2:])],
        )
        for stride in self.strides[2:]:
            self.sides.append((self.sides[-1] - 3) // stride + 1)
        last = len(blocks) - 1
        largest = self.patches * side**2 * 4 * widths[0]
        if largest >= MOST_VALUES:
            raise ConfigError(f"batches of {images} images are too large for a GPU; reduce batch")
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
        self._add("pair", "pair", self.patches * side**2, 4 * widths[0] * (4 * widths[1] + 17))
        units, classes = owner.backbone.hidden.out_features, owner.backbone.head.out_features
        self.units, self.classes = _power(units), _power(classes)
        self._add("hidden", "product", self.patches, self.units * (features + 1))
        self._add("head", "product", self.patches, self.classes * (self.units + 1))
        self._add("mixing", "product", images, self.classes * (channels * classes + 1))
        self.table = self._table(owner).to(owner.flat.device)
        self.ones = owner.flat.new_ones(self.patches, units)

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


def _run(
    owner: FusedGradients, layout: _Layout, inputs: tuple[Tensor, ...], labels: Tensor,
    indices: Tensor, smoothing: float,
) -> Tensor:  # fmt: skip
    """Run all kernels of a forward and a backward pass, and return the mean loss."""
    from foveate.execution import triton_step as kernels

    cut, means, squares = inputs
    flat, slopes, backbone = owner.flat, owner.slopes, owner.backbone
    images, channels, patches = layout.images, layout.channels, layout.patches
    torch._foreach_copy_(owner.copied, owner.copied_from)
    packed = _bf16(flat, len(owner.order))
    _over("pack", len(owner.order), kernels.pack, flat, owner.order, packed)
    weights = [packed[start:] for start in owner.packed_at]
    workspace = flat.new_empty(layout.size)

    def parts(name: str) -> Tensor:
        return workspace[layout.parts[name].start :]

    pool = owner.net.pool if isinstance(owner.net, ScaleChannels) else ""
    shared = pool == "avg"
    hidden, head = backbone.hidden, backbone.head
    mask = backbone.dropout(layout.ones[: images if shared else patches])

    # The first two blocks.
    side, (first, norm) = layout.sides[1], owner.blocks[0]
    filters, per = 4 * first.out_channels, channels * side**2
    folded, kept = flat.new_empty(17 * filters), flat.new_empty(272 + 144)
    kernels.fold[(1,)](
        flat, means, squares, indices, norm.running_mean, norm.running_var,
        norm.num_batches_tracked, folded, kept, images, 4 * patches * side**2, norm.momentum,
        norm.eps, WEIGHT=owner.at(first.weight), BIAS=owner.at(first.bias),
        GAIN=owner.at(norm.weight), OFFSET=owner.at(norm.bias), OUT=first.out_channels,
        OUT_P=first.out_channels, num_warps=8,
    )  # fmt: skip
    active = _bf16(flat, patches * side**2 * filters)
    _over(
        "first", patches * side**2, kernels.first_block, cut, indices, folded, active, PER=per,
        FILTERS=filters,
    )  # fmt: skip
    maps, coefficients = [active], [folded]
    for layer, (conv, norm) in enumerate(owner.blocks[1:], 1):
        here, above, width = layout.sides[layer], layout.sides[layer + 1], conv.out_channels
        below = filters if layer == 1 else conv.in_channels
        area, part = patches * above**2, layout.parts[f"moments {layer}"]
        found = _bf16(flat, area * width)
        kernels.convolve[(part.number,)](
            maps[-1], coefficients[-1], weights[layer - 1], found, parts(f"moments {layer}"), area,
            part.steps, HEIGHT=here, WIDTH=here, IN=below, OUT=width, SIDE=2 if layer == 1 else 3,
            STRIDE=layout.strides[layer], NORM=layer > 1, IN_P=_power(below), OUT_P=_power(width),
            **_options("convolve"),
        )  # fmt: skip
        coefficient = flat.new_empty(4 * width)
        kernels.statistics[(-(-width // CHANNELS),)](
            parts(f"moments {layer}"), flat, norm.running_mean, norm.running_var,
            norm.num_batches_tracked, coefficient, part.number, area, norm.momentum, norm.eps,
            BIAS=owner.at(conv.bias), GAIN=owner.at(norm.weight), OFFSET=owner.at(norm.bias),
            OUT=width, CHANNELS=CHANNELS, PARTS=PARTS,
        )  # fmt: skip
        maps.append(found)
        coefficients.append(coefficient)

    # The linear layers and the loss.
    last, features = len(maps) - 1, hidden.in_features
    mixing = getattr(owner.net, "mixing", None)
    rectified = _bf16(flat, patches * features)
    units, unit_slopes = (_bf16(flat, patches * layout.units) for _ in range(2))
    logits, logit_slopes = (_bf16(flat, patches * layout.classes) for _ in range(2))
    pooled_slopes, slope = _bf16(flat, images * layout.classes), _bf16(flat, patches * features)
    losses = flat.new_empty(images)
    kernels.classify[(layout.parts[f"slopes {last}"].number,)](
        maps[-1], coefficients[-1], weights[last], flat, mask, weights[last + 1], labels, indices,
        rectified, units, unit_slopes, logits, logit_slopes, pooled_slopes, slope,
        parts(f"slopes {last}"), losses, images, smoothing, HIDDEN_BIAS=owner.at(hidden.bias),
        HEAD_BIAS=owner.at(head.bias), MIXING=owner.at(mixing.weight) if mixing else 0,
        MIXING_BIAS=owner.at(mixing.bias) if mixing else 0, POOL=pool, CHANNELS=channels,
        ROWS=layout.rows, OUT=owner.blocks[-1][0].out_channels, FEATURES=features,
        UNITS=hidden.out_features, UNITS_P=layout.units, CLASSES=head.out_features,
        CLASSES_P=layout.classes, SHARED=shared, **_options("classify"),
    )  # fmt: skip

    def product(
        name: str, left: Tensor, width: int, right: Tensor, columns: int, rows: int
    ) -> None:
        part = layout.parts[name]
        kernels.product[(part.number, -(-columns // COLUMNS))](
            left, right, parts(name), rows, part.steps, LEFT=width, RIGHT=columns, LEFT_P=width,
            COLUMNS=COLUMNS, **_options("product"),
        )  # fmt: skip

    product("hidden", unit_slopes, layout.units, rectified, features, patches)
    product("head", logit_slopes, layout.classes, units, layout.units, patches)
    if mixing is not None:
        width = channels * head.out_features
        product("mixing", pooled_slopes, layout.classes, logits, width, images)

    # The convolutions, from the last to the first.
    for layer in range(last, 0, -1):
        conv, norm = owner.blocks[layer]
        width, below = conv.out_channels, conv.in_channels
        area, part = patches * layout.sides[layer + 1] ** 2, layout.parts[f"slopes {layer}"]
        found = flat.new_empty(3 * width)
        kernels.slope_statistics[(-(-width // CHANNELS),)](
            parts(f"slopes {layer}"), coefficients[layer], found, slopes, part.number, area,
            GAIN=owner.at(norm.weight), OFFSET=owner.at(norm.bias), OUT=width,
            POSITIONS=part.size // (2 * width), CHANNELS=CHANNELS, PARTS=PARTS,
        )  # fmt: skip
        _over(
            "slopes", area, kernels.normalise_slopes, slope, maps[layer], found, OUT=width,
            OUT_P=_power(width),
        )  # fmt: skip
        here, stride = layout.sides[layer], layout.strides[layer]
        if layer == 1:
            break
        shape = {"HEIGHT": here, "WIDTH": here, "IN": below, "OUT": width, "STRIDE": stride}
        part = layout.parts[f"weight {layer}"]
        kernels.weight_gradient[(part.number, 3)](
            maps[layer - 1], coefficients[layer - 1], slope, parts(f"weight {layer}"), area,
            part.steps, **shape, COLUMNS=_power(3 * below), OUT_P=_power(width),
            **_options("weight"),
        )  # fmt: skip
        part, given = layout.parts[f"slopes {layer - 1}"], slope
        slope = torch.empty_like(maps[layer - 1])
        kernels.input_gradient[(part.number // stride**2, stride**2)](
            given, weights[layer - 1], maps[layer - 1], coefficients[layer - 1], slope,
            parts(f"slopes {layer - 1}"), patches, part.steps, **shape, IN_P=_power(below),
            OUT_P=_power(width), **_options("input"),
        )  # fmt: skip
    part, width = layout.parts["pair"], owner.blocks[1][0].out_channels
    kernels.pair_gradient[(part.number,)](
        cut, indices, active, slope, weights[0], parts("pair"), patches * side**2, part.steps,
        PATCHES=channels, HEIGHT=side, WIDTH=side, FILTERS=filters, OUT=width,
        COLUMNS=_power(4 * width), **_options("pair"),
    )  # fmt: skip
    _over("collect", len(slopes), kernels.collect, workspace, layout.table, slopes, PARTS=SUMMED)
    first, norm = owner.blocks[0]
    loss = flat.new_empty(())
    kernels.unfold[(1,)](
        slopes[owner.total :], flat, kept, slopes, losses, loss, images, norm.eps,
        WEIGHT=owner.at(first.weight), GAIN=owner.at(norm.weight), OFFSET=owner.at(norm.bias),
        OUT=first.out_channels, OUT_P=first.out_channels, BLOCK=128,
    )  # fmt: skip
    return loss


def _over(name: str, total: int, kernel: Any, *given: Tensor, **shape: Any) -> None:
    """Launch a kernel with one program for each block of `total` positions."""
    options = _options(name)
    kernel[(-(-total // options["BLOCK"]),)](*given, total, **shape, **options)


def _options(name: str) -> dict[str, Any]:
    launch = LAUNCHES[name]
    return {"BLOCK": launch.block, "num_warps": launch.warps, "num_stages": launch.stages}


def _bf16(like: Tensor, size: int) -> Tensor:
    return like.new_empty(size, dtype=torch.bfloat16)


def _power(number: int) -> int:
    """Return the smallest power of two that is at least 16 and not below a number."""
    return max(16, 1 << (number - 1).bit_length())
