"""Search images for off-centre objects: evaluate a network at centres from coarse to fine."""
# Shape letters: B batch, N centres, S scale channel, C image channel, H W pixels, P patch pixels,
# K classes, h w positions of the coarse grid.

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from foveate.checks import is_number
from foveate.errors import ConfigError
from foveate.models.pooling import class_logits
from foveate.resampling import check_images

if TYPE_CHECKING:
    from foveate.models.channels import ScaleChannels

AT_ONCE = 1 << 24  # patch and image values in memory at a time: 64 MB in float32
MAX_PLACES = 1 << 20  # positions of the coarse grid of one image
MAX_REFINE = 20
Advance: TypeAlias = Callable[[int], None]
"""Function that is called with a number of finished steps."""
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Advance]]
"""Context manager that shows progress, given what is counted and the number of steps."""


def no_progress(what: str, total: int) -> AbstractContextManager[Advance]:
    """Show no progress."""
    return nullcontext(lambda count: None)


class SearchResult(NamedTuple):
    """Strongest response in each image of a batch, as `ScaleChannels.search` returns it.

    Attributes:
        classes: Predicted class index, shape ``(B,)``.
        centres: Centre (y, x) of the selected window in pixels, shape ``(B, 2)``.
        windows: Side of the selected window in pixels, shape ``(B,)``.
        confidence: Softmax probability of the predicted class in the selected channel at the
            selected centre, shape ``(B,)``.
        logits: Logits at every position of the coarse grid, shape ``(B, K, h, w)``, or None unless
            the search was called with ``maps=True``.

    Examples:
        >>> import torch
        >>> from foveate import create_model
        >>> net = create_model("fovmax").eval()
        >>> found = net.search(torch.zeros(1, 1, 64, 64), step=32, refine=0, maps=True)
        >>> found.windows.shape, found.logits.shape
        (torch.Size([1]), torch.Size([1, 10, 3, 3]))
    """

    classes: Tensor
    centres: Tensor
    windows: Tensor
    confidence: Tensor
    logits: Tensor | None = None


class _Responses(NamedTuple):
    """The best class at each of N positions (y, x), relative to the image centre."""

    places: Tensor
    values: Tensor
    classes: Tensor
    channels: Tensor
    confidence: Tensor

    def best(self, count: int) -> _Responses:
        """Return the `count` strongest positions; ties keep the earlier one."""
        order = self.values.argsort(descending=True, stable=True)[:count]
        return _Responses(*(field[order] for field in self))


class _Search(NamedTuple):
    """A network on one image (1, C, H, W), at positions in units of `unit` pixels."""

    net: ScaleChannels
    channels: Callable[[Tensor, Tensor], Tensor]
    image: Tensor
    unit: float
    at_once: int

    def run(
        self, places: Tensor, maps: list[Tensor] | None = None, advance: Advance = lambda n: None
    ) -> _Responses:
        """Evaluate positions (N, 2), `at_once` at a time; append their logits to `maps`."""
        found = []
        for part in places.split(self.at_once):
            found.append(self._run(part, maps))
            advance(len(part))
        return _joined(found)

    def _run(self, places: Tensor, maps: list[Tensor] | None) -> _Responses:
        centres = _centres(places, self.image, self.unit)
        images = self.image.expand(len(places), -1, -1, -1)
        channels = self.channels(images, centres)
        pooled = self.net.combine(channels)
        if maps is not None:
            maps.append(pooled)
        values, classes = pooled.max(1)
        winners = class_logits(channels, classes).argmax(1)
        winning = channels[torch.arange(len(places), device=channels.device), winners]
        confidence = winning.float().softmax(1).gather(1, classes[:, None])
        return _Responses(places, values, classes, winners, confidence[:, 0])

    def coarse_to_fine(
        self, grid: Tensor, refine: int, beam: int, maps: list[Tensor] | None, advance: Advance
    ) -> _Responses:
        """Evaluate a coarse grid (N, 2), then neighbours of the best positions with half steps."""
        best = self.run(grid, maps, advance).best(beam)
        around = torch.cartesian_prod(*[torch.arange(-1, 2, device=grid.device)] * 2)
        around = around[around.any(1)]  # the position itself has been evaluated
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
    channels: Callable[[Tensor, Tensor], Tensor] | None = None,
    progress: Progress = no_progress,
) -> SearchResult:
    """Find the strongest response over centres and scales; see `ScaleChannels.search`.

    `channels` replaces `net.channels`, for example by a faster function with equal results.
    `progress` shows how many positions of the coarse grids have been evaluated.
    """
    step = net.size * net.scales[0] if step is None else step
    _check(net, images, step, refine, beam, batch_size)
    unit, held = step / 2**refine, images[0].numel()
    held += len(net.scales) * images.shape[1] * net.size**2
    reach = [math.floor(length / 2 / step + 1e-9) for length in images.shape[2:]]
    sides = [torch.arange(-k, k + 1, device=images.device) * 2**refine for k in reach]
    found, logits = [], []
    grid = torch.cartesian_prod(*sides)
    with torch.no_grad(), progress("positions", len(grid) * len(images)) as advance:
        for image in images.split(1):
            at_once = batch_size or AT_ONCE // held or 1
            job = _Search(net, channels or net.channels, image, unit, at_once)
            own: list[Tensor] | None = [] if maps else None
            found.append(job.coarse_to_fine(grid, refine, beam, own, advance))
            logits += [torch.cat(own).T.unflatten(1, [2 * k + 1 for k in reach])] if own else []
    best = _joined(found)
    windows = _pixels([net.size * scale for scale in net.scales], images)
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
    """Convert positions (N, 2) to image points in pixels; (0, 0) is the image centre."""
    return _pixels(images.shape[2:], images) / 2 + places * unit


def _pixels(lengths: Sequence[float], images: Tensor) -> Tensor:
    """Return lengths in float32: in bf16, which can be the default, 301 pixels are 302."""
    return torch.tensor(lengths, dtype=torch.float32, device=images.device)


def _inside(places: Tensor, images: Tensor, unit: float) -> Tensor:
    """Whether each of the positions (N, 2) is inside the image or on its edge."""
    ends = _pixels(images.shape[2:], images) / (2 * unit)
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
        raise ConfigError("images must contain at least one image, got an empty batch")
    if net.training:
        raise ConfigError("the network is in training mode; call net.eval() before search")
    if not is_number(step) or step <= 0:
        raise ConfigError(f"step must be a positive number of pixels, got {step!r}")
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
            f"step={step:g} gives {places:,.0f} positions per image, the limit is {MAX_PLACES:,}; "
            "use a larger step"
        )
