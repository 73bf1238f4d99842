"""The compiled normalisation gives the bits of PyTorch's operations."""
# Shape letters: H W pixels.

import native_trunks
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.data.recipes import Recipe
from foveate.native import calls
from foveate.native.normalise import can_normalise, normalise_pixels

_needs_a_compiler = native_trunks._needs_a_compiler  # a fixture for every test


def random_picture(height, width):
    """An image (3, H, W) in the memory layout (H, W, 3), as decoders return it."""
    values = torch.Generator().manual_seed(height + 100 * width)
    return torch.randint(
        256, (height, width, 3), dtype=torch.uint8, generator=values
    ).permute(2, 0, 1)  # fmt: skip


levels = st.tuples(*[st.floats(0.01, 2)] * 3)


@given(height=st.integers(1, 40), width=st.integers(1, 70), mean=levels, std=levels)
def test_it_gives_the_bits_of_the_operations(height, width, mean, std):
    recipe, picture = Recipe(name="photo", mean=mean, std=std), random_picture(height, width)
    planes = picture.contiguous()
    assert can_normalise(picture) and not (can_normalise(planes) and height * width > 1)
    found = recipe.normalise(picture)
    assert found.is_contiguous() and found.dtype == torch.float32
    factor = 1 / (255 * torch.tensor(std))[:, None, None]
    expected = planes.float() * factor - (torch.tensor(mean) / torch.tensor(std))[:, None, None]
    assert torch.equal(found, expected) and torch.equal(recipe.normalise(planes), expected)


@pytest.mark.parametrize("threads", [2, 5])
def test_the_same_bits_for_any_number_of_threads(threads, monkeypatch):
    picture, factor, offset = random_picture(33, 57), torch.rand(3), torch.rand(3)
    once = normalise_pixels(picture, factor, offset)
    monkeypatch.setattr(calls.torch, "get_num_threads", lambda: threads)
    assert torch.equal(normalise_pixels(picture, factor, offset), once)


def test_other_images_are_left_to_pytorch(monkeypatch):
    picture = random_picture(8, 6)
    assert can_normalise(picture)
    assert not can_normalise(picture.float()) and not can_normalise(picture[:, ::2])
    assert not can_normalise(picture[None]) and not can_normalise(picture[:1])
    with torch.device("meta"):
        assert not can_normalise(torch.empty_like(picture, device="meta"))
    monkeypatch.setenv("FOVEATE_NATIVE", "0")
    assert not can_normalise(picture)
