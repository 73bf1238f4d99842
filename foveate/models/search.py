"""Search images for off-centre objects: a network at a grid of centres, from coarse to fine."""
# Shape letters: B batch, N centres, S scale channel, C image channel, H W pixels, P patch pixels,
# K classes, h w places of the coarse grid.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foveate.checks import is_number
from foveate.errors import ConfigError
from foveate.resampling import check_images

if TYPE_CHECKING:
    from foveate.models.channels import ScaleChannels

AT_ONCE = 1 << 24  # values of the patches and images that are held at a time: 64 MB in float32
MAX_PLACES = 1 << 20  # centres of the coarse grid of one image
MAX_REFINE = 20


class SearchResult(NamedTuple):
    """The strongest response in each image of a batch.

    Attributes:
        classes: Predicted class, shape ``(B,)``.
        centres: Centre (y, x) of the winning window in pixels, shape ``(B, 2)``.
        windows: Side of the winning window in pixels, shape ``(B,)``.
        confidence: Probability of the class, by the logits of the winning channel at the winning
            centre, shape ``(B,)``.
        logits: Logits at every place of the coarse grid, shape ``(B, K, h, w)``, if asked for.
    """

    classes: Tensor
    centres: Tensor
    windows: Tensor
    confidence: Tensor
    logits: Tensor | None = None


class _Responses(NamedTuple):
    """The best class at each of N places (y, x), counted from the middle of the image."""

    places: Tensor
    values: Tensor
    classes: Tensor
    channels: Tensor
    confidence: Tensor

    def best(self, count: int) -> _Responses:
        """Return the `count` strongest places; of equal ones the first."""
        order = self.values.argsort(descending=True, stable=True)[:count]
        return _Responses(*(field[order] for field in self))


class _Search(NamedTuple):
    """A network on one image (1, C, H, W), with places that are `unit` pixels apart."""

    net: ScaleChannels
    forward: Callable[[Tensor], Tensor]
    image: Tensor
    unit: float
    at_once: int

    def run(self, places: Tensor, maps: list[Tensor] | None = None) -> _Responses:
        """Evaluate the places (N, 2), `at_once` at a time; append their logits to `maps`."""
        return _joined([self._run(part, maps) for part in places.split(self.at_once)])

    def _run(self, places: Tensor, maps: list[Tensor] | None) -> _Responses:
        centres = _centres(places, self.image, self.unit)
        images = self.image.expand(len(places), -1, -1, -1)
        channels = self.forward(self.net.patches(images, centres))
        pooled = self.net.combine(channels)
        if maps is not None:
            maps.append(pooled)
        values, classes = pooled.max(1)
        wanted = classes[:, None, None]
        winners = channels.gather(2, wanted.expand(-1, channels.shape[1], 1)).argmax(1)
        winning = channels[torch.arange(len(places), device=channels.device), winners[:, 0]]
        confidence = winning.float().softmax(1).gather(1, wanted[..., 0])
        return _Responses(places, values, classes, winners[:, 0], confidence[:, 0])

    def coarse_to_fine(
        self, grid: Tensor, refine: int, beam: int, maps: list[Tensor] | None
    ) -> _Responses:
        """Evaluate a coarse grid (N, 2), then about the best places with half the step."""
        best = self.run(grid, maps).best(beam)
        around = torch.cartesian_prod(*[torch.arange(-1, 2, device=grid.device)] * 2)
        around = around[around.any(1)]  # the place itself has been evaluated
        for level in reversed(range(refine)):
            near = (best.places[:, None] + around * 2**level).flatten(0, 1).unique(dim=0)
            near = near[_inside(near, self.image, self.unit)]
            best = _joined([best, self.run(near)]).best(beam) if len(near) else best
        return best.best(1)


def search(
    net: ScaleChannels,
    images: Tensor,
    step: float | None = None,
    *,
    refine: int = 3,
    beam: int = 8,
    maps: bool = False,
    batch_size: int | None = None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> SearchResult:
    """Find the strongest response over centres and scales; see `ScaleChannels.search`.

    A function that computes `net.forward_patches` faster may be passed as `forward`.
    """
    step = net.size * net.scales[0] if step is None else step
    _check(net, images, step, refine, beam, batch_size)
    unit, held = step / 2**refine, images[0].numel()
    held += len(net.scales) * images.shape[1] * net.size**2
    reach = [math.floor(length / 2 / step + 1e-9) for length in images.shape[2:]]
    sides = [torch.arange(-k, k + 1, device=images.device) * 2**refine for k in reach]
    found, logits = [], []
    with torch.no_grad():
        for image in images.split(1):
            job = _Search(
                net, forward or net.forward_patches, image, unit, batch_size or AT_ONCE // held or 1
            )
            own: list[Tensor] | None = [] if maps else None
            found.append(job.coarse_to_fine(torch.cartesian_prod(*sides), refine, beam, own))
            logits += [torch.cat(own).T.unflatten(1, [2 * k + 1 for k in reach])] if own else []
    best = _joined(found)
    windows = torch.tensor([net.size * scale for scale in net.scales], device=images.device)
    return SearchResult(
        best.classes,
        _centres(best.places, images, unit),
        windows[best.channels],
        best.confidence,
        torch.stack(logits) if maps else None,
    )


def _joined(parts: Sequence[_Responses]) -> _Responses:
    return _Responses(*map(torch.cat, zip(*parts, strict=True)))


def _centres(places: Tensor, images: Tensor, unit: float) -> Tensor:
    """Points (N, 2) of the image in pixels; place (0, 0) is its middle."""
    middle = torch.tensor(images.shape[2:], device=images.device) / 2
    return middle + places * unit


def _inside(places: Tensor, images: Tensor, unit: float) -> Tensor:
    """Whether each of the places (N, 2) is in the image or on its edge."""
    ends = torch.tensor(images.shape[2:], device=images.device) / (2 * unit)
    return (places.abs() <= ends + 1e-6).all(1)


def _check(
    net: ScaleChannels,
    images: Tensor,
    step: float,
    refine: int,
    beam: int,
    batch_size: int | None,
) -> None:
    check_images(images)
    if not len(images):
        raise ConfigError("there are no images to search, got a batch of 0")
    if net.training:
        raise ConfigError("the network is in training mode: call net.eval() before search")
    if not is_number(step) or step <= 0:
        raise ConfigError(f"step must be a number of pixels above 0, got {step!r}")
    for name, value, least, most in (
        ("refine", refine, 0, MAX_REFINE),
        ("beam", beam, 1, MAX_PLACES),
        ("batch_size", 1 if batch_size is None else batch_size, 1, MAX_PLACES),
    ):
        if type(value) is not int or not least <= value <= most:
            raise ConfigError(f"{name} must be a whole number from {least} to {most}, got {value}")
    places = math.prod(length / step + 1 for length in images.shape[2:])
    if places > MAX_PLACES:
        raise ConfigError(
            f"step={step:g} gives {places:,.0f} places per image, the limit is {MAX_PLACES:,}; "
            "use a larger step"
        )
