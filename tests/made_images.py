"""Random images for the tests."""

import torch


def random_images(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(shape, generator=generator, dtype=torch.float64) - 1).to(dtype)
