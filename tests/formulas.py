"""Images given by a formula, so that they exist at every scale, and bounds that follow from it."""
# Shape letters: B batch, C image channel, H W pixels, P patch pixels, N Gaussians per image.

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Blobs:
    """Images f: sums of N Gaussians, with no symmetry, on a plane whose origin is their middle."""

    height: torch.Tensor  # (B, C, N)
    y: torch.Tensor
    x: torch.Tensor
    sigma: torch.Tensor

    def at(self, y, x):
        """The values (B, C, len(y), len(x)) at the points y × x of the plane."""
        rows = torch.exp(-(((y - self.y[..., None]) / self.sigma[..., None]) ** 2) / 2)
        columns = torch.exp(-(((x - self.x[..., None]) / self.sigma[..., None]) ** 2) / 2)
        return torch.einsum("bcn,bcnp,bcnq->bcpq", self.height, rows, columns)

    def image(self, H, W, scale=1.0, about=None):
        """The pixels of f(x / scale), its origin at the image point `about` or in the middle."""
        y, x = (H / 2, W / 2) if about is None else about
        rows = torch.arange(H, dtype=torch.float64) + 0.5 - y
        columns = torch.arange(W, dtype=torch.float64) + 0.5 - x
        return self.at(rows / scale, columns / scale)

    def patch(self, scale, size):
        """What a channel of this scale would see of f if there were no pixels: (B, C, P, P)."""
        at = (torch.arange(size, dtype=torch.float64) + 0.5 - size / 2) * scale
        return self.at(at, at)

    def interpolation_error(self, scale=1.0):
        """How far bilinear interpolation of `image(scale=scale)` can be from f: (B,).

        h² / 8 · max|f''| on each axis with h = 1 pixel; a Gaussian has max|f''| = height / sigma².
        """
        curvature = (self.height.abs() / self.sigma**2).sum(2).amax(1)
        return 2 * curvature / 8 / scale**2


def blobs(sigma, spread, *, batch=3, channels=1, count=4, seed=0):
    """Random `Blobs`: widths of `sigma` to 2 `sigma`, middles up to `spread` from the origin."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(low, high):
        shape = (batch, channels, count)
        return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

    return Blobs(
        uniform(-1, 1), *(uniform(-spread, spread) for _ in "yx"), uniform(sigma, 2 * sigma)
    )


def shake(net, seed=0):
    """Give the net random weights, biases and batch-norm statistics, in float64 and eval mode."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(like, low, high):
        return low + (high - low) * torch.rand(like.shape, generator=generator, dtype=like.dtype)

    net.double().eval()
    with torch.no_grad():
        for layer in net.modules():
            if isinstance(layer, nn.Conv2d | nn.Linear):
                reach = (3 / layer.weight[0].numel()) ** 0.5
                layer.weight.copy_(uniform(layer.weight, -reach, reach))
                layer.bias.copy_(uniform(layer.bias, -0.1, 0.1))
            if isinstance(layer, nn.BatchNorm2d):
                for values in (layer.weight, layer.running_var):
                    values.copy_(uniform(values, 0.5, 1.5))
                for values in (layer.bias, layer.running_mean):
                    values.copy_(uniform(values, -0.2, 0.2))
    return net


def sensitivity(backbone, start, end, points=3):
    """The sup-norm Lipschitz constant of each logit between two batches of patches: (N, K).

    It is the largest sum of |d logit / d pixel| over the pixels, on the way from `start` to `end`.
    (The product of the layers' own constants is a bound too, but a thousand times too large.)
    """
    constants = []
    for part in torch.linspace(0, 1, points).tolist():
        patches = torch.lerp(start, end, part).requires_grad_()
        logits = backbone(patches)
        gradients = [torch.autograd.grad(k.sum(), patches, retain_graph=True)[0] for k in logits.mT]
        constants.append(torch.stack([g.abs().flatten(1).sum(1) for g in gradients], 1))
    return torch.stack(constants).amax(0).detach()
