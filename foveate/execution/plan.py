"""One door to speed: the plan by which a network is computed, chosen by one rule.

`outputs(net, prepare(net, images))` equals `net(images)` for every network. A plan is a module with
the functions of `Plan`, and one line in `PLANS`. Deleting both removes it.
"""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes.

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from foveate.execution import canvas, convnet, definition, patches, windows
from foveate.execution.exact import exact_convnet
from foveate.execution.precision import Precision, cast, dtype_of
from foveate.models.channels import ScaleChannels
from foveate.models.outputs import Outputs
from foveate.models.search import SearchResult
from foveate.models.search import search as plain_search
from foveate.models.sliding import LocalMaps
from foveate.models.sliding import local_maps as plain_local_maps
from foveate.tracing import watched

Inputs = tuple[Tensor, ...]


class Plan(Protocol):
    """One way to compute networks."""

    DEVICES: tuple[str, ...]
    """Types of devices on which it is faster than the plans after it."""

    def fits(self, net: nn.Module, images: Tensor) -> bool:
        """Whether it gives the numbers of `net(images)` for images (B, C, H, W)."""

    def prepare(self, net: nn.Module, images: Tensor, dtype: torch.dtype) -> Inputs:
        """Compute what does not depend on the weights: tensors with an entry for each image."""

    def outputs(self, net: nn.Module, inputs: Inputs) -> Outputs:
        """Run the network on prepared images."""


PLANS: tuple[Plan, ...] = (canvas, windows, convnet, patches)
"""In order of preference; a network that none fits takes the `definition`."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """Images made ready for a network: the plan, and the tensors that it reads."""

    plan: Plan
    inputs: Inputs

    def __getitem__(self, chosen: Tensor) -> "Prepared":
        """Return the images at the indices `chosen` (B,)."""
        return replace(self, inputs=tuple(tensor[chosen] for tensor in self.inputs))


def choose(net: nn.Module, images: Tensor) -> Plan:
    """Return the first plan that gives the numbers of `net(images)`.

    Images that need a gradient, and operations that a transform or an export records, take the
    definition.
    """
    wanted = images.requires_grad and torch.is_grad_enabled()
    if wanted or watched(images) or images.ndim != 4:
        return definition
    kind = images.device.type
    found = (plan for plan in PLANS if kind in plan.DEVICES and plan.fits(net, images))
    return next(found, definition)


def prepare(net: nn.Module, images: Tensor, precision: Precision = "float32") -> Prepared:
    """Compute, once, what the network needs of images (B, C, H, W)."""
    plan = choose(net, images)
    return Prepared(plan, plan.prepare(net, images, dtype_of(precision)))


def outputs(net: nn.Module, prepared: Prepared) -> Outputs:
    """Run the network on prepared images."""
    return prepared.plan.outputs(net, prepared.inputs)


def logits(net: nn.Module, prepared: Prepared) -> Tensor:
    """Return the logits (B, K) of prepared images."""
    return outputs(net, prepared).logits


@torch.no_grad()
def predict(net: nn.Module, images: Tensor, precision: Precision = "float32") -> Outputs:
    """Run a network on images (B, C, H, W), without gradients."""
    with cast(precision, images.device):
        return outputs(net, prepare(net, images, precision))


@torch.no_grad()
def local_maps(net: convnet.Channels, images: Tensor, step: int = 4) -> LocalMaps:
    """Run `foveate.local_maps` without gradients, in a fast form where one applies."""
    fast = exact_convnet(net) is not None and not watched(images)
    return plain_local_maps(net, images, step, dense=convnet.dense if fast else None)


def search(net: ScaleChannels, images: Tensor, step: float | None = None) -> SearchResult:
    """Run `net.search`, in a fast form where one applies.

    The shipped digit networks take 0.2 to 0.35 of the time of `net.search` on a CPU.
    """

    def forward(patches: Tensor) -> Tensor:
        channels = convnet.outputs(net, (patches,)).channels
        assert channels is not None
        return channels

    fast = type(net) is ScaleChannels and not watched(images) and convnet.fits(net, images)
    return plain_search(net, images, step, forward=forward if fast else None)
