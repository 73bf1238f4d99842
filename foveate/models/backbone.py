"""The paper's base network: unpadded 3 × 3 convolutions, then two fully connected layers."""
# Shape letters: N patches, C image channel, P patch pixels, K classes, h w positions.

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from foveate.errors import ConfigError


class ConvNet(nn.Module):
    """The paper's base network: unpadded 3 × 3 convolutions and two linear layers.

    Every second convolution has stride 2. ``features=(16, 16, 32, 32)`` with ``size=28`` is the
    paper's backbone of a scale channel. ``features=(16, 16, 16, 16, 32, 32, 32, 32)`` with
    ``size=112`` is its plain CNN.

    Args:
        features: Number of filters of each convolution.
        size: Width and height P of the input in pixels.
        channels: Number of image channels C.
        classes: Number of classes K.
        hidden: Number of hidden units between the two linear layers.
        batch_norm: Whether batch norm follows each convolution. Without it, weights are
            initialised with Xavier's uniform distribution.
        dropout: Dropout probability of the hidden units.

    Attributes:
        size: Width and height of the input in pixels.
        stride: Total stride of the convolutions in pixels.
        side: Width and height of the last feature map.

    Shape:
        - Input: ``(N, C, P, P)``.
        - Output: ``(N, K)``.

    Raises:
        ConfigError: If ``size`` is too small for the number of convolutions.

    Examples:
        >>> import torch
        >>> net = ConvNet(features=(16, 16, 32, 32), size=28, classes=10).eval()
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        features: Sequence[int] = (16, 16, 32, 32),
        size: int = 28,
        *,
        channels: int = 1,
        classes: int = 10,
        hidden: int = 100,
        batch_norm: bool = True,
        dropout: float = 0.15,
    ) -> None:
        super().__init__()
        self.size = size
        self.stride = 2 ** (len(features) // 2)
        self.side = size
        layers: list[nn.Module] = []
        for index, (before, after) in enumerate(zip((channels, *features), features, strict=False)):
            stride = 1 + index % 2
            self.side = (self.side - 3) // stride + 1
            layers.append(nn.Conv2d(before, after, 3, stride=stride))
            if batch_norm:
                layers.append(nn.BatchNorm2d(after))
            layers.append(nn.ReLU(inplace=True))
        self.trunk = nn.Sequential(*layers)
        if self.side < 1:
            depth = len(features)
            raise ConfigError(f"size={size} is too small for {depth} convolutions; increase it")
        self.hidden = nn.Linear(features[-1] * self.side**2, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)
        if not batch_norm:
            self.apply(_balance)

    def forward(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute the logits of images with exactly ``size`` pixels.

        Args:
            images: Images or patches, shape ``(N, C, P, P)``.
            mask: Dropout mask from `draw_mask`, as in `classify`.

        Returns:
            Logits, shape ``(N, K)``.
        """
        return self.classify(self.trunk(images), mask)

    def classify(self, features: Tensor, mask: Tensor | None = None) -> Tensor:
        """Apply the linear layers to the last feature map.

        Args:
            features: Output of the convolutions, shape ``(N, F, side, side)``.
            mask: Dropout mask from `draw_mask`, shape ``(n, hidden)``. Each row applies to N / n
                consecutive entries of ``features``. By default, dropout is independent for each.

        Returns:
            Logits, shape ``(N, K)``.
        """
        hidden = F.relu(self.hidden(features.flatten(1)))
        if mask is None:
            hidden = self.dropout(hidden)
        else:
            each = hidden.shape[0] // max(1, mask.shape[0])
            hidden = (hidden.unflatten(0, (mask.shape[0], each)) * mask[:, None]).flatten(0, 1)
        return self.head(hidden)  # type: ignore[no-any-return]

    def draw_mask(self, images: Tensor) -> Tensor | None:
        """Draw a dropout mask that all windows of an image share.

        Args:
            images: Batch of N images; only its length, dtype and device are used.

        Returns:
            Mask of shape ``(N, hidden)``, or None if dropout is inactive.
        """
        if not self.dropout.training:
            return None
        return self.dropout(images.new_ones(images.shape[0], self.hidden.out_features))  # type: ignore[no-any-return]

    def dense(self, images: Tensor, mask: Tensor | None = None) -> Tensor:
        """Classify every window of ``size`` pixels, ``stride`` pixels apart.

        The convolutions are computed once for all windows. Dropout removes the same hidden units
        in all windows of an image.

        Args:
            images: Images of at least ``size`` pixels, shape ``(N, C, H, W)``.
            mask: Dropout mask from `draw_mask`; by default a new one.

        Returns:
            Logits, shape ``(N, K, h, w)``.

        Raises:
            ConfigError: If the images are smaller than ``size`` pixels.
        """
        features = self.trunk(self.covered(images))
        mask = self.draw_mask(images) if mask is None else mask
        windows = features.unfold(2, self.side, 1).unfold(3, self.side, 1)  # (N, F, h, w, P, P)
        count, _, tall, wide = windows.shape[:4]
        outputs = self.classify(windows.permute(0, 2, 3, 1, 4, 5).flatten(0, 2), mask)
        return outputs.unflatten(0, (count, tall, wide)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]

    def covered(self, images: Tensor) -> Tensor:
        """Crop images at the bottom and right to the pixels covered by complete windows.

        Args:
            images: Images of at least ``size`` pixels, shape ``(N, C, H, W)``.

        Returns:
            The cropped images, whose windows of ``size`` pixels are ``stride`` pixels apart.

        Raises:
            ConfigError: If the images are smaller than ``size`` pixels.
        """
        sides = []
        for length in images.shape[-2:]:
            if length < self.size:
                raise ConfigError(
                    f"images must have at least {self.size} pixels a side, got {length}"
                )
            sides.append(length - (length - self.size) % self.stride)
        return images[..., : sides[0], : sides[1]]


def _balance(layer: nn.Module) -> None:
    """Initialise weights to preserve the variance of activations and gradients without a norm.

    SWMax after one epoch on 16,000 images at scale 2: 93 % validation accuracy, against 56 % with
    PyTorch's default initialisation.
    """
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(layer.weight)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)
