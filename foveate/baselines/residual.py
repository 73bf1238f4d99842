"""Small residual network for patches of 32 pixels: the backbone of `fovplus` on CIFAR-10.

Follows Page, "How to Train Your ResNet" (2018), with half the filters and without his batch norm
settings: four stages of one 3 × 3 convolution each, whose last three halve the resolution by a
maximum, and a residual block of two convolutions in the second and the last stage.
"""
# Shape letters: N patches, C image channel, P patch pixels, K classes.

from torch import Tensor, nn

WIDTH = 32  # filters of the first convolution; each stage has twice as many as the one before


class Residual(nn.Module):
    """Add the input to the output of a sequence of modules."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.change = nn.Sequential(*modules)

    def forward(self, features: Tensor) -> Tensor:
        """Compute the sum, with the shape of the input (N, C, P, P)."""
        return features + self.change(features)  # type: ignore[no-any-return]


def network(*, channels: int, classes: int, width: int = WIDTH) -> nn.Sequential:
    """Build the network; 1,646,122 weights for colour images and 10 classes.

    It maps patches (N, C, P, P) of at least 8 pixels to logits (N, K). The first convolution has
    `width` filters.
    """
    w = width
    return nn.Sequential(
        *_block(channels, w),
        *_block(w, 2 * w), nn.MaxPool2d(2),
        Residual(*_block(2 * w, 2 * w), *_block(2 * w, 2 * w)),
        *_block(2 * w, 4 * w), nn.MaxPool2d(2),
        *_block(4 * w, 8 * w), nn.MaxPool2d(2),
        Residual(*_block(8 * w, 8 * w), *_block(8 * w, 8 * w)),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * w, classes),
    )  # fmt: skip


def _block(before: int, after: int) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(before, after, 3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(after), nn.ReLU(inplace=True)
