"""Sliding-window scale channels: the base network applied densely to each rescaled image."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes, h w positions.

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, cast, get_args

import torch
from torch import Tensor, nn

from foveate.checks import check_choice
from foveate.errors import ConfigError
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.models.pooling import pool_scales
from foveate.resampling import Padding, check_images
from foveate.resampling.definition import PatchSpec, axis_matrices, full_precision
from foveate.scales import ScaleGrid, as_scales

SlidingPool = Literal["max", "avg"]
PADDINGS = ("border", "reflect")


class SlidingChannels(nn.Module):
    """Slide a `ConvNet` over the image at every scale; pool over space, then over scale.

    With ``pool="max"`` this is the paper's SWMax network. The channel of scale s resamples the
    image by 1/s, on a grid large enough for windows centred on the image edge. The central window
    of the grid gives the logits of `ScaleChannels` with the same weights.

    Args:
        backbone: Network with the methods ``dense`` and ``draw_mask`` and the attributes ``size``
            and ``stride``, such as `ConvNet`.
        scales: Scales of the channels, increasing.
        pool: ``"max"`` or ``"avg"``, over space and over scale.
        padding: Values outside the image: ``"border"`` or ``"reflect"``.
        antialias: Whether to low-pass filter before downsampling.

    Shape:
        - Input: ``(B, C, H, W)``, any height and width.
        - Output: ``(B, K)``.

    Raises:
        ConfigError: If an argument is invalid, or the backbone has no ``dense`` or ``draw_mask``.

    Examples:
        >>> import torch
        >>> from foveate import ScaleGrid, SlidingChannels
        >>> from foveate.models.backbone import ConvNet
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
        check_choice("pool of sliding windows", pool, get_args(SlidingPool))
        if not hasattr(backbone, "dense") or not hasattr(backbone, "draw_mask"):
            kind = type(backbone).__name__
            raise ConfigError(
                f"SlidingChannels requires a backbone with dense() and draw_mask(), got {kind}"
            )
        check_choice("padding of sliding windows", padding, PADDINGS)
        self.backbone = backbone
        self.scales = as_scales(scales)
        self.pool, self.padding, self.antialias = pool, padding, antialias

    def maps(self, images: Tensor) -> list[Tensor]:
        """Compute the logits of every window.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            One map of logits per scale, shape ``(B, K, h, w)``.
        """
        check_images(images)
        mask = self.backbone.draw_mask(images)
        return [self.backbone.dense(grid, mask) for grid in self.grids(images)]

    def grids(self, images: Tensor) -> Iterator[Tensor]:
        """Resample images at each scale, with the size adapted to the stride of the backbone.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Yields:
            The resampled images of one scale after the other.
        """
        for scale in self.scales:
            yield _rescaled(self, images, scale)

    def channels(self, images: Tensor) -> Tensor:
        """Compute the logits of every channel, pooled over space.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            Logits of the channels, shape ``(B, S, K)``.
        """
        return self.pool_space(self.maps(images))

    def pool_space(self, maps: Sequence[Tensor]) -> Tensor:
        """Pool maps of logits over space.

        Args:
            maps: One map of logits per scale, shape ``(B, K, h, w)``, as `maps` returns them.

        Returns:
            Logits of the channels, shape ``(B, S, K)``.
        """
        over_space = [m.flatten(2) for m in maps]
        if self.pool == "max":
            return torch.stack([m.max(2).values for m in over_space], 1)
        return torch.stack([m.mean(2) for m in over_space], 1)

    def combine(self, outputs: Tensor) -> Tensor:
        """Pool the logits of the channels over scale.

        Args:
            outputs: Logits of the channels, shape ``(B, S, K)``.

        Returns:
            Logits, shape ``(B, K)``.
        """
        return pool_scales(outputs, self.pool)

    def forward(self, images: Tensor) -> Tensor:
        """Compute the logits of images.

        Args:
            images: Batch of images, shape ``(B, C, H, W)``.

        Returns:
            Logits, shape ``(B, K)``.
        """
        return self.combine(self.channels(images))


class LocalMaps(NamedTuple):
    """Logits and estimated object scale at every image position, as `local_maps` returns them.

    Attributes:
        logits: Logits pooled over scale, shape ``(B, K, h, w)``.
        scales: Scale at which the strongest class responds, shape ``(B, h, w)``.

    Examples:
        >>> import torch
        >>> from foveate import create_model, local_maps
        >>> maps = local_maps(create_model("fovmax").eval(), torch.zeros(1, 1, 32, 32), step=16)
        >>> bool(maps.scales.min() >= 0.5), bool(maps.scales.max() <= 8)
        (True, True)
    """

    logits: Tensor
    scales: Tensor


def local_maps(
    net: ScaleChannels | SlidingChannels,
    images: Tensor,
    step: int = 4,
    *,
    dense: Callable[[ConvNet, Tensor], Tensor] | None = None,
) -> LocalMaps:
    """Classify every position of an image and estimate the object scale there.

    Position (i, j) is the image point ``((i + 0.5) * step, (j + 0.5) * step)``. Its logits are the
    maximum over scale of the channels' logits at that point, so they are invariant to scaling about
    it. The network is evaluated at one window every ``stride`` pixels of the resampled image, and
    logits in between are interpolated linearly. The network can have been trained on centred
    objects only.

    Args:
        net: Scale channels around a `ConvNet`.
        images: Batch of images, shape ``(B, C, H, W)``.
        step: Distance between positions in pixels.
        dense: Replacement for `ConvNet.dense`, for example a faster function with equal results.

    Returns:
        Logits ``(B, K, h, w)``, and the scale ``(B, h, w)`` at which the strongest class responds,
        as [`LocalMaps`][foveate.models.sliding.LocalMaps].

    Raises:
        ConfigError: If the backbone is not a `ConvNet`, or ``step`` is larger than the image.

    Examples:
        >>> import torch
        >>> from foveate import create_model, local_maps
        >>> net = create_model("fovmax").eval()
        >>> maps = local_maps(net, torch.zeros(2, 1, 64, 64), step=16)
        >>> maps.logits.shape, maps.scales.shape
        (torch.Size([2, 10, 4, 4]), torch.Size([2, 4, 4]))
    """
    backbone = net.backbone
    if not isinstance(backbone, ConvNet):
        kind = type(backbone).__name__
        raise ConfigError(f"local_maps requires a ConvNet as backbone, got {kind}")
    check_images(images)
    if not 1 <= step <= min(images.shape[-2:]):
        raise ConfigError(f"step must be from 1 to {min(images.shape[-2:])} pixels, got {step}")
    best, chosen = torch.tensor(-torch.inf).to(images), torch.tensor(0.0).to(images)
    for scale in net.scales:
        grid = _rescaled(net, images, scale)
        windows = backbone.dense(grid) if dense is None else dense(backbone, grid)
        logits = _at_places(windows, images, scale * backbone.stride, step)
        chosen = torch.where(logits > best, scale, chosen)
        best = torch.maximum(best, logits)
    winner = best.argmax(1, keepdim=True)
    return LocalMaps(best, chosen.gather(1, winner).squeeze(1))


def _rescaled(net: ScaleChannels | SlidingChannels, images: Tensor, scale: float) -> Tensor:
    """Resample whole images by 1/scale to a size that fits the stride of the backbone.

    The result is large enough for windows centred on the image edge.
    """
    check_choice("padding of sliding windows", net.padding, PADDINGS)
    check_images(images)
    backbone = cast(ConvNet, net.backbone)
    sides = []
    for length in images.shape[-2:]:
        size = extent(length / scale, backbone.size, backbone.stride)
        spec = PatchSpec((scale,), size, net.padding, net.antialias)
        sides.append(axis_matrices(length, spec, None, images.device)[0].to(images))
    with full_precision(images):
        return sides[0] @ (images @ sides[1].mT)


def extent(visible: float, size: int, stride: int) -> int:
    """Return the side of a grid with windows centred on both ends and the middle of `visible`."""
    return size + 2 * stride * math.ceil(visible / (2 * stride) - 1e-9)


def _at_places(logits: Tensor, images: Tensor, spacing: float, step: int) -> Tensor:
    """Interpolate logits (B, K, h, w), `spacing` image pixels apart, at every position."""
    sides = []
    for positions, length in zip(logits.shape[-2:], images.shape[-2:], strict=True):
        places = (torch.arange(length // step, dtype=torch.float64) + 0.5) * step
        index = (places - length / 2) / spacing + (positions - 1) / 2
        offset = index[:, None] - torch.arange(positions)
        sides.append((1 - offset.abs()).clamp_min(0).to(logits))
    return sides[0] @ (logits @ sides[1].mT)
