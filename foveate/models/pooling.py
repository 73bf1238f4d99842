"""From the outputs of all scale channels to one output."""
# Shape letters: B batch, S scale channel, K classes.

import math
from typing import Literal, get_args

from torch import Tensor, nn

from foveate.errors import ConfigError

Pool = Literal["max", "avg", "logsumexp", "concat", "probabilities"]


def pool_scales(outputs: Tensor, pool: Pool) -> Tensor:
    """Reduce (B, S, K) to (B, K) by an operation that does not ask which scale is which."""
    match pool:
        case "max":
            return outputs.max(1).values  # not amax: compiled in bf16, its gradient can be 0 / 0
        case "avg":
            return outputs.mean(1)
        case "logsumexp":
            return outputs.logsumexp(1)
        case "probabilities":  # the logarithm of their mean, which softmax takes back
            return outputs.log_softmax(2).logsumexp(1) - math.log(outputs.shape[1])
    raise ConfigError(f"pool must be max, avg, logsumexp or probabilities here, got {pool!r}")


class Mixing(nn.Linear):
    """A learned mixture of all outputs of all channels: (B, S, K) to (B, K); not invariant."""

    def __init__(self, scales: int, classes: int) -> None:
        super().__init__(scales * classes, classes)

    def forward(self, outputs: Tensor) -> Tensor:
        """Mix (B, S, K) outputs into (B, K)."""
        return super().forward(outputs.flatten(1))


def check_pool(pool: str) -> None:
    """Refuse a pool that does not exist."""
    if pool not in get_args(Pool):
        raise ConfigError(f"pool must be one of {', '.join(get_args(Pool))}, got {pool!r}")
