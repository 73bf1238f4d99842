"""Loss and gradients of a sliding network with max pooling, by Triton kernels in bf16.

A maximum is the logit of one window and has the gradient of that window. The kernels of
`canvas_search` find the strongest window of each class, and those of `fused` compute the gradients
of these windows.
"""
# Shape letters: B images, K classes, H W pixels, T tiles.

import torch
from torch import Tensor, nn

from foveate.execution import canvas, canvas_search
from foveate.execution.exact import exact_convnet, plain_blocks
from foveate.execution.fused import MOST_CHANNELS, FusedGradients, is_trainable
from foveate.execution.fused_layout import Packing
from foveate.execution.fused_pass import StepPass
from foveate.execution.plan import Prepared
from foveate.execution.triton_common import MOST_VALUES, power
from foveate.models.sliding import SlidingChannels

BLOCK = 512  # values of a window that are copied at a time


def find_winners(net: nn.Module, images: Prepared, batch: int) -> "FusedWinners | None":
    """Return the gradients of a sliding network, or None if the kernels do not apply."""
    backbone = exact_convnet(net)
    sliding = isinstance(net, SlidingChannels) and net.pool == "max" and images.plan is canvas
    if backbone is None or not sliding:
        return None
    given, classes = images.inputs[0], backbone.head.out_features
    with torch.autocast(given.device.type, torch.bfloat16):
        searched = canvas_search.applies(backbone, given)
    supported = (
        searched and given.shape[1] == 1,
        all(norm is None for _, norm in plain_blocks(backbone.trunk)),
        1 < classes <= MOST_CHANNELS and backbone.size % 2 == 0,
        batch * max(classes * 16 * backbone.size**2, given[0].numel()) < MOST_VALUES,
        is_trainable(net, backbone, given.device),
    )
    return FusedWinners(net) if all(supported) else None


class FusedWinners(FusedGradients):
    """Loss and gradients of a sliding network without batch norm."""

    pool = "winners"

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        device = self.flat.device
        layers = canvas_search.arranged(self.backbone, lambda p: self.places(p) + 1)
        layers = [layer - 1 for layer in layers]
        self.products, self.biases = Packing(layers[::2], device), Packing(layers[1::2], device)
        # The first block on rows of 4 × 4 pixels, and for the others gain 1 and offset, mean 0 and
        # inverse deviation 1 instead of a norm.
        exact = [torch.cat([layers[0].flatten(), layers[1]])]
        for conv, _ in self.blocks[1:]:
            bias = self.places(conv.bias)  # type: ignore[arg-type]
            one, zero = torch.full_like(bias, -2), torch.full_like(bias, -1)
            exact.append(torch.cat([one, bias, zero, one]))
        self.exact = Packing(exact, device)

    def begin(self, inputs: tuple[Tensor, ...], labels: Tensor, indices: Tensor) -> "WinnersPass":
        """Return the pass over the prepared images at `indices`."""
        backbone = self.backbone
        layout = self.layout(len(indices), backbone.head.out_features, backbone.size // 2 - 1)
        return WinnersPass(self, layout, labels, indices, inputs)


class WinnersPass(StepPass):
    """The pass over the strongest window of each class, which the pass finds first."""

    owner: FusedWinners

    def fold(self) -> tuple[Tensor, None]:
        """Find and cut the strongest windows; there is no norm to fold."""
        owner, layout, net = self.owner, self.layout, self.owner.net
        whole, size, every = self.inputs
        assert isinstance(net, SlidingChannels)
        products, biases, self.exact = (
            self.pack(packing, self.flat.new_empty(len(packing.table), dtype=dtype))
            for packing, dtype in (
                (owner.products, torch.bfloat16),
                (owner.biases, torch.float32),
                (owner.exact, torch.float32),
            )
        )
        chosen, needed = (t.index_select(0, self.indices) for t in (whole, every))
        places = canvas.layout_of(net, *size.shape[2:]).places
        layers = [layer for pair in zip(products, biases, strict=True) for layer in pair]
        side, backbone = layout.sides[1], owner.backbone
        found = canvas_search.search(
            chosen, needed, layers, canvas_search.padded(self.mask),
            *canvas_search.numbers(backbone, places), launch=self.launch,
        )  # fmt: skip
        height, width = chosen.shape[2:]
        self.cut = self.flat.new_empty(layout.patches * side**2 * 16)
        tiles = found[0].shape[1]
        self.launch(
            self.kernels.cut_winners, (layout.images, layout.channels), *found, chosen, self.cut,
            TILES=tiles, TILES_P=power(tiles), CLASSES=layout.channels,
            CLASSES_P=found[0].shape[2], HEIGHT=height, WIDTH=width,
            ACROSS=(width - backbone.size) // backbone.stride + 1, STRIDE=backbone.stride,
            SIDE=side, BLOCK=BLOCK,
        )  # fmt: skip
        return self.exact[0], None

    def normalise(self, layer: int, *_: object) -> Tensor:
        """Return the coefficients that add the bias."""
        return self.exact[layer]
