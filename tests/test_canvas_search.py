"""The kernels for windows of a canvas equal the dense network, and leave out only background."""

import pytest
import torch
from interpreted import DEVICE, load

from foveate.execution import canvas, canvas_search
from foveate.execution.canvas_search import grid_slices, needed_windows, strongest
from foveate.models.backbone import ConvNet
from foveate.models.sliding import SlidingChannels

load("foveate.execution.triton_canvas")
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
HALF = 2.0**-8  # rounding to bf16


def network(channels=1, classes=5, size=28, features=(16, 16, 32, 32)):
    torch.manual_seed(0)
    options = {"hidden": 20, "channels": channels, "classes": classes, "batch_norm": False}
    return SlidingChannels(ConvNet(features, size, **options), (0.5, 1.0, 2.0)).to(DEVICE).eval()


def pictures(channels=1, side=40, count=2):
    """Objects of several sizes off the centre, on a constant background."""
    images = torch.full((count, channels, side, side), -0.7629)
    for which, image in enumerate(images):
        image[:, 4 + which : 13 + 2 * which, 20:27] = torch.randn(channels, 9 + which, 7)
    return images.to(DEVICE)


def prepared(net, images):
    layout = canvas.layout_of(net, *images.shape[-2:])
    filled = canvas.fill_canvas(list(net.grids(images)), layout).bfloat16()
    return filled, layout.places


def every_window(places):
    boxes = [
        (top // 4, (top + h - 28) // 4, left // 4, (left + w - 28) // 4)
        for top, left, h, w in places
    ]
    return torch.tensor(boxes, dtype=torch.int32, device=DEVICE).expand(2, -1, -1).contiguous()


@pytest.mark.parametrize("channels", [1, 3])
def test_the_strongest_windows_are_those_of_the_dense_network(channels):
    net, images = network(channels), torch.randn(2, channels, 37, 44, device=DEVICE)
    filled, places = prepared(net, images)
    mask = torch.rand(2, 20, device=DEVICE).bfloat16()
    needed = needed_windows(filled, places, 28, 4)
    assert torch.equal(needed, every_window(places))
    values, positions = strongest(net.backbone, filled, needed, mask, places)
    exact = net.double().backbone.dense(filled.double(), mask.double())
    across = exact.shape[-1]
    for part, (top, left, height, width) in zip(grid_slices(places, 28, 4), places, strict=True):
        rows = slice(top // 4, (top + height - 28) // 4 + 1)
        columns = slice(left // 4, (left + width - 28) // 4 + 1)
        largest = exact[..., rows, columns].flatten(2).amax(2)
        # Each of the four blocks, the hidden layer and the weights are rounded to bf16.
        bound = 8 * HALF * exact.abs().max()
        found, tile = values[:, part].max(1)
        assert torch.all((found - largest).abs() <= bound)
        place = positions[:, part].gather(1, tile[:, None]).squeeze(1).long()
        inside = (place // across >= rows.start) & (place // across < rows.stop)
        assert torch.all(inside & (place % across >= columns.start))
        assert torch.all(place % across < columns.stop)
        there = exact.flatten(2).gather(2, place[..., None]).squeeze(2)
        assert torch.all((there - found).abs() <= bound)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, at NaN
def test_windows_that_show_only_background_change_nothing(monkeypatch):
    net, images = network(), pictures()
    # Values that are not computed must not be used.
    empty = torch.Tensor.new_empty

    def poisoned(tensor, *size, **options):
        new = empty(tensor, *size, **options)
        return new.fill_(torch.nan) if new.is_floating_point() else new

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    filled, places = prepared(net, images)
    needed = needed_windows(filled, places, 28, 4)
    counts = [(n[..., 1] - n[..., 0] + 1) * (n[..., 3] - n[..., 2] + 1) for n in
              (needed, every_window(places))]  # fmt: skip
    assert torch.all(counts[0].sum(1) < counts[1].sum(1))
    few = strongest(net.backbone, filled, needed, None, places)[0]
    every = strongest(net.backbone, filled, every_window(places), None, places)[0]
    for part in grid_slices(places, 28, 4):
        assert torch.equal(few[:, part].amax(1), every[:, part].amax(1))


def test_a_window_is_needed_if_it_shows_content_or_is_the_only_background():
    filled = torch.zeros(4, 2, 60, 44)
    filled[1, 1, 32, 43] = 1.0  # windows of rows 4 to 32 and columns 16 to 43
    filled[2, 0, 40:] = 1.0  # all columns
    filled[3] = torch.randn(2, 60, 44)
    needed = needed_windows(filled, [(0, 0, 60, 44)], 28, 4)[:, 0].tolist()
    # The first row of windows without content is needed as well, if there is one.
    assert needed[1] == [1, 8, 4, 4]
    assert needed[2] == [3, 8, 0, 4]
    assert needed[3] == [0, 8, 0, 4]
    first, last, before, after = needed[0]
    assert 0 <= first <= last <= 8 and 0 <= before <= after <= 4


def test_windows_with_content_are_found_one_by_one():
    for _ in range(20):
        filled = torch.zeros(1, 1, 36 + 28, 40)
        top, left = int(torch.randint(64, ())), int(torch.randint(40, ()))
        filled[0, 0, top : top + int(torch.randint(1, 20, ())), left : left + 3] = 1.0
        first, last, before, after = needed_windows(filled, [(0, 0, 64, 40)], 28, 4)[0, 0].tolist()
        windows = filled.unfold(2, 28, 4).unfold(3, 28, 4).flatten(4)[0, 0]
        for (row, column), content in zip(
            torch.cartesian_prod(torch.arange(10), torch.arange(4)).tolist(),
            windows.any(-1).flatten().tolist(),
            strict=True,
        ):
            inside = first <= row <= last and before <= column <= after
            assert inside or not content
        everywhere = windows.any(-1).all()
        constant = ~windows[first : last + 1, before : after + 1].any(-1)
        assert everywhere or constant.any()


def test_other_networks_and_dtypes_keep_the_definition():
    images = torch.zeros(1, 1, 64, 64, device=DEVICE)
    assert not canvas_search.applies(network().backbone, images)  # float32
    assert not canvas_search.applies(network(features=(24, 16)).backbone, images.bfloat16())
    if DEVICE == "cpu":
        assert not canvas_search.applies(network().backbone, images.bfloat16())
