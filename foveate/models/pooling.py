"""Pool the logits of all scale channels."""
# Shape letters: B batch, S scale channel, K classes.

import math
from typing import Literal

from torch import Tensor, nn

from foveate.errors import ConfigError

Pool = Literal["max", "avg", "logsumexp", "concat", "probabilities"]


def pool_scales(outputs: Tensor, pool: Pool) -> Tensor:
    """Pool the logits of scale channels, independently of the order of the channels.

    Rescaling an image shifts its responses from channel to channel, so the result is invariant to
    scale. ``"probabilities"`` averages the softmax probabilities of the channels and returns the
    logarithm of this mean.

    Args:
        outputs: Logits of the channels, shape ``(B, S, K)``.
        pool: ``"max"``, ``"avg"``, ``"logsumexp"`` or ``"probabilities"``.

    Returns:
        Pooled logits, shape ``(B, K)``.

    Raises:
        ConfigError: If ``pool`` is another name. ``"concat"`` has learned weights and requires
            [`ScaleChannels`][foveate.models.channels.ScaleChannels].

    Examples:
        >>> import torch
        >>> pool_scales(torch.tensor([[[1.0, 5.0], [3.0, 1.0]]]), "max")
        tensor([[3., 5.]])
    """
    match pool:
        case "max":
            return outputs.max(1).values  # the gradient of amax, compiled in bf16, can be 0 / 0
        case "avg":
            return outputs.mean(1)
        case "logsumexp":
            return outputs.logsumexp(1)
        case "probabilities":  # softmax of this logarithm is the mean probability
            return outputs.log_softmax(2).logsumexp(1) - math.log(outputs.shape[1])
    raise ConfigError(f"pool must be max, avg, logsumexp or probabilities, got {pool!r}")


def class_logits(channels: Tensor, label: Tensor) -> Tensor:
    """Return the logits (B, S) of a class per image, (B,), in every channel (B, S, K)."""
    return channels.gather(2, label[:, None, None].expand(-1, channels.shape[1], 1)).squeeze(2)


class Mixing(nn.Linear):
    """Linear layer from the logits (B, S, K) of all channels to (B, K); not scale-invariant."""

    def __init__(self, scales: int, classes: int) -> None:
        super().__init__(scales * classes, classes)

    def forward(self, outputs: Tensor) -> Tensor:
        """Combine the logits (B, S, K) of the channels into logits (B, K)."""
        return super().forward(outputs.flatten(1))
