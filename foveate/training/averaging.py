"""The exponential moving average of a network's weights during training."""

import copy

import torch
from torch import nn


class WeightAverage:
    """An exponential moving average of the weights and buffers of a network in training.

    The average is a network of its own, `net`, and starts at the current weights. Validating it
    never changes the trained weights, whose memory captured CUDA graphs refer to, and which
    checkpoints store at any time. In each step, the average is multiplied by `decay`.
    """

    def __init__(self, net: nn.Module, decay: float) -> None:
        self.net, self.decay = copy.deepcopy(net), decay
        own, trained = (
            dict(n.named_parameters()) | dict(n.named_buffers()) for n in (self.net, net)
        )
        state = net.state_dict()  # other buffers are constants, and masks can be infinite
        real = [k for k, v in trained.items() if k in state and v.is_floating_point()]
        rest = [k for k, v in trained.items() if k in state and not v.is_floating_point()]
        self._averages, self._copies = ([own[k].detach() for k in names] for names in (real, rest))
        self._values, self._others = (
            [trained[k].detach() for k in names] for names in (real, rest)
        )

    def update(self, step: int) -> None:
        """Move the average towards the current weights, after each step of the optimiser.

        In the first steps the decay is at most (1 + step) / (10 + step), so that the initial
        weights do not dominate the average of a short run; `step` counts from 0. Integer buffers
        are copied.
        """
        decay = min(self.decay, (1 + step) / (10 + step))
        # On a GPU, a few launches on the current stream, without synchronisation.
        torch._foreach_lerp_(self._averages, self._values, 1 - decay)
        if self._copies:
            torch._foreach_copy_(self._copies, self._others)
