"""The base network slid over the whole of each rescaled image, and what can be made of that."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes, h w positions.

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.resampling import Padding, check_images, sampling_matrices
from foveate.scales import ScaleGrid, as_scales

SlidingPool = Literal["max", "avg"]


class SlidingChannels(nn.Module):
    """Slide a `ConvNet` over the image at every scale; pool over space, then over scale (SWMax).

    Channel s resamples the image by 1/s, on a grid wide enough for windows centred on the edge of
    the image. The window in the middle of the grid gives the logits of `ScaleChannels` with the
    same weights.

    Args:
        backbone: Network with `dense`, `draw_mask`, `size` and `stride`, as `ConvNet` has them.
        scales: Scales of the channels, increasing.
        pool: "max" or "avg", over space and over scale.
        padding: What windows see outside the image: "border" or "reflect".
        antialias: Whether to filter before downsampling.

    Shape:
        - Input: ``(B, C, H, W)``, any height and width.
        - Output: ``(B, K)``.

    Example:
        >>> net = SlidingChannels(ConvNet(batch_norm=False), ScaleGrid(1, 4, per_octave=1)).eval()
        >>> net(torch.zeros(2, 1, 112, 112)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        backbone: ConvNet,
        scales: ScaleGrid | Sequence[float] = PAPER_SCALES,
        pool: SlidingPool = "max",
        *,
        padding: Padding = "border",
        antialias: bool = False,
    ) -> None:
        super().__init__()
        if pool not in ("max", "avg"):
            raise ConfigError(f"pool must be max or avg for a sliding window, got {pool!r}")
        if not hasattr(backbone, "dense") or not hasattr(backbone, "draw_mask"):
            kind = type(backbone).__name__
            raise ConfigError(
                f"a sliding window needs a backbone with dense() and draw_mask(), {kind} has not"
            )
        _check_padding(padding)
        self.backbone = backbone
        self.scales = as_scales(scales)
        self.pool, self.padding, self.antialias = pool, padding, antialias

    def maps(self, images: Tensor) -> list[Tensor]:
        """Return the logits at every position, (B, K, h, w) for each scale."""
        check_images(images)
        mask = self.backbone.draw_mask(images)
        return [self.backbone.dense(grid, mask) for grid in self.grids(images)]

    def grids(self, images: Tensor) -> Iterator[Tensor]:
        """Rescale images (B, C, H, W) to each scale, on a grid that windows tile evenly."""
        for scale in self.scales:
            yield rescaled(images, scale, self.backbone, self.padding, self.antialias)

    def channels(self, images: Tensor) -> Tensor:
        """Return the logits of every channel, pooled over space: (B, S, K)."""
        return self.pool_space(self.maps(images))

    def pool_space(self, maps: Sequence[Tensor]) -> Tensor:
        """Pool maps (B, K, h, w), one for each scale, over space: (B, S, K)."""
        over_space = [m.flatten(2) for m in maps]
        if self.pool == "max":
            return torch.stack([m.max(2).values for m in over_space], 1)
        return torch.stack([m.mean(2) for m in over_space], 1)

    def combine(self, outputs: Tensor) -> Tensor:
        """Pool the logits (B, S, K) of the channels over scale: (B, K)."""
        return outputs.max(1).values if self.pool == "max" else outputs.mean(1)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, K)."""
        return self.combine(self.channels(images))


class LocalMaps(NamedTuple):
    """Logits (B, K, h, w) and estimated scales (B, h, w) of every place: see `local_maps`."""

    logits: Tensor
    scales: Tensor


def local_maps(
    net: ScaleChannels | SlidingChannels,
    images: Tensor,
    step: int = 4,
    *,
    dense: Callable[[ConvNet, Tensor], Tensor] | None = None,
) -> LocalMaps:
    """Classify every place of an image, and estimate the scale of the object there.

    Place (i, j) is the image point ``((i + 0.5) * step, (j + 0.5) * step)``. Its logits are the
    maximum over scale of the channels' logits at that point, so they are invariant to scaling about
    it. Logits come from `dense`, one window every `stride` pixels of the rescaled image, and are
    interpolated linearly in between. The network may have been trained on centred objects only.

    Args:
        net: Scale channels around a `ConvNet`.
        images: Batch of images, shape ``(B, C, H, W)``.
        step: Distance between places in pixels.
        dense: Function that computes the same as `ConvNet.dense`, for example faster.

    Returns:
        Logits ``(B, K, h, w)``, and the scale ``(B, h, w)`` at which the strongest class responds.

    Raises:
        ConfigError: If the backbone is not a `ConvNet`, or `step` does not fit the image.
    """
    backbone, dense = net.backbone, dense or ConvNet.dense
    if not isinstance(backbone, ConvNet):
        kind = type(backbone).__name__
        raise ConfigError(f"local_maps needs a backbone with dense(), {kind} has none")
    check_images(images)
    if not 1 <= step <= min(images.shape[-2:]):
        raise ConfigError(f"step must be from 1 to the {min(images.shape[-2:])} pixels, got {step}")
    best, chosen = torch.tensor(-torch.inf).to(images), torch.tensor(0.0).to(images)
    for scale in net.scales:
        grid = rescaled(images, scale, backbone, net.padding, net.antialias)
        logits = _at_places(dense(backbone, grid), images, scale * backbone.stride, step)
        chosen = torch.where(logits > best, scale, chosen)
        best = torch.maximum(best, logits)
    winner = best.argmax(1, keepdim=True)
    return LocalMaps(best, chosen.gather(1, winner).squeeze(1))


def rescaled(
    images: Tensor,
    scale: float,
    backbone: ConvNet,
    padding: Padding = "border",
    antialias: bool = False,
) -> Tensor:
    """Show the whole images at zoom 1/scale on a grid that windows of the backbone tile evenly.

    The grid is wide enough for windows centred on the very edge of the image.
    """
    _check_padding(padding)
    check_images(images)
    sides = [
        sampling_matrices(
            length,
            [scale],
            extent(length / scale, backbone.size, backbone.stride),
            padding,
            antialias,
            dtype=images.dtype,
            device=images.device,
        )[0]
        for length in images.shape[-2:]
    ]
    with torch.autocast(images.device.type, enabled=False):
        return sides[0] @ (images @ sides[1].mT)


def extent(visible: float, size: int, stride: int) -> int:
    """Pixels of a grid with windows centred on both ends of `visible` pixels and on its middle."""
    return size + 2 * stride * math.ceil(visible / (2 * stride) - 1e-9)


def _at_places(logits: Tensor, images: Tensor, spacing: float, step: int) -> Tensor:
    """Interpolate logits (B, K, h, w), `spacing` image pixels apart, at every place."""
    sides = []
    for positions, length in zip(logits.shape[-2:], images.shape[-2:], strict=True):
        places = (torch.arange(length // step, dtype=torch.float64) + 0.5) * step
        index = (places - length / 2) / spacing + (positions - 1) / 2
        offset = index[:, None] - torch.arange(positions)
        sides.append((1 - offset.abs()).clamp_min(0).to(logits))
    return sides[0] @ (logits @ sides[1].mT)


def _check_padding(padding: Padding) -> None:
    if padding not in ("border", "reflect"):
        raise ConfigError(f"a sliding window pads with border or reflect, got {padding!r}")
