"""Many grids on one canvas: nothing overlaps, nothing moves, the answers are the same."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foveate.execution import canvas
from foveate.execution.canvas import argmax_windows, fill_canvas, pack_grids, split_maps, windows_at
from foveate.models.zoo import create_model

sides = st.lists(st.tuples(st.integers(7, 30), st.integers(7, 30)), min_size=1, max_size=12)


@given(sides)
def test_grids_lie_inside_the_canvas_and_apart(grids):
    layout = pack_grids(grids, 4)
    count = torch.zeros(layout.height, layout.width)
    for (top, left, height, width), grid in zip(layout.places, grids, strict=True):
        assert (height, width) == grid
        assert top % 4 == left % 4 == 0
        part = count[top : top + height, left : left + width]
        assert part.shape == (height, width)
        part += 1
    assert int(count.max()) == 1


def test_painting_and_cutting_give_back_the_grids():
    grids = [torch.randn(2, 3, n, n + 4) for n in (28, 44, 36)]
    layout = pack_grids([(g.shape[2], g.shape[3]) for g in grids], 4)
    painted = fill_canvas(grids, layout)
    for grid, part in zip(grids, split_maps(painted, layout, size=1, stride=1), strict=True):
        assert torch.equal(grid, part)


def test_the_strongest_window_lies_within_a_grid_and_is_found_on_the_canvas():
    size, stride = 8, 4
    grids = [torch.randn(3, 2, n, n + 4) for n in (8, 24, 16)]
    layout = pack_grids([(g.shape[2], g.shape[3]) for g in grids], 4)
    painted = fill_canvas(grids, layout)
    tall, wide = ((n - size) // stride + 1 for n in painted.shape[-2:])
    maps = torch.randn(3, 5, tall, wide)
    parts = split_maps(maps, layout, size, stride)
    chosen = argmax_windows(maps, layout, size, stride)
    highest = torch.cat([part.flatten(2) for part in parts], 2).amax(2)
    assert torch.equal(maps.flatten(2).gather(2, chosen[..., None])[..., 0], highest)
    found = windows_at(painted, chosen, size, stride)
    for b in range(3):
        for k in range(5):
            top, left = int(chosen[b, k]) // wide * stride, int(chosen[b, k]) % wide * stride
            expected = painted[b, :, top : top + size, left : left + size]
            assert torch.equal(found[b, k], expected)


def test_the_papers_grids_waste_less_than_a_twentieth():
    layout = canvas.layout_of(create_model("swmax"), 112, 112)
    used = sum(p.height * p.width for p in layout.places)
    assert used > 0.95 * layout.height * layout.width


def logits_from(net, prepared):
    return canvas.outputs(net, prepared).logits


def test_equal_networks_share_canvases():
    one, other = create_model("swmax").eval(), create_model("swmax").eval()
    other.load_state_dict(one.state_dict())
    images = torch.randn(1, 1, 112, 112)
    prepared = canvas.prepare(one, images, torch.float32)
    torch.testing.assert_close(logits_from(other, prepared), one(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize("shapes", [[(97, 100), (100, 100)], [(61, 62), (61, 64)]])
def test_images_of_similar_shapes_keep_their_own_layouts(shapes):
    """Two layouts may have canvases of one shape, as those of 61 × 62 and 61 × 64 pixels do."""
    net = create_model("swmax").double().eval()
    layouts = [canvas.layout_of(net, *shape) for shape in shapes]
    assert layouts[0] != layouts[1]
    assert (layouts[0][:2] == layouts[1][:2]) == (shapes[0][0] == 61)
    images = [torch.randn(2, 1, *shape).double() for shape in shapes]
    prepared = [canvas.prepare(net, some, torch.float64) for some in images]
    for some, ready in zip(images, prepared, strict=True):
        torch.testing.assert_close(logits_from(net, ready), net(some), atol=1e-12, rtol=0)


def test_few_layouts_are_kept(monkeypatch):
    monkeypatch.setattr(canvas, "MOST_LAYOUTS", 3)
    net = create_model("swmax")
    for height in range(40, 50):
        canvas.layout_of(net, height, 40)
        assert len(canvas._layouts) <= 3


def test_a_layout_is_returned_if_another_thread_clears_them_all(monkeypatch):
    class Cleared(dict):
        """Cleared by another thread as soon as something is added."""

        def __setitem__(self, key, value):
            pass

    monkeypatch.setattr(canvas, "_layouts", Cleared())
    assert canvas.layout_of(create_model("swmax"), 40, 40).places


@pytest.mark.parametrize("pool", ["max", "avg"])
@pytest.mark.parametrize("shape", [(112, 112), (61, 90)])
def test_channels_from_a_canvas_are_those_of_every_scale_alone(pool, shape):
    net = create_model("swmax", pool=pool).double().eval()
    images = torch.randn(2, 1, *shape).double()
    with torch.no_grad():
        expected = net.channels(images)
        found = canvas.outputs(net, canvas.prepare(net, images, torch.float64)).channels
    assert torch.equal(found.argmax(2), expected.argmax(2))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [28, 29, 30, 31])
def test_windows_need_not_be_a_multiple_of_the_stride(size):
    net = create_model("swmax", size=size, dropout=0.0).double().train()
    images = torch.randn(2, 1, 40, 52).double()
    found = canvas.outputs(net, canvas.prepare(net, images, torch.float64)).logits
    torch.testing.assert_close(found, net(images), atol=1e-12, rtol=0)


def test_batch_norm_keeps_off_the_canvas():
    images = torch.randn(1, 1, 40, 40)
    assert canvas.fits(create_model("swmax").train(), images)
    assert not canvas.fits(create_model("swmax", batch_norm=True).train(), images)
