"""The network slid over the image: dense evaluation, SWMax, and local maps, against slow twins."""
# Shape letters: B batch, S scale channel, C image channel, H W pixels, K classes, h w positions.

from functools import partial

import made_images
import pytest
import torch
import torch.nn.functional as F
from formulas import blobs, sensitivity, shake
from torch import nn

from foveate.errors import ConfigError
from foveate.execution import canvas
from foveate.execution.plan import choose, logits, prepare
from foveate.models.backbone import ConvNet
from foveate.models.channels import PAPER_SCALES, ScaleChannels
from foveate.models.sliding import SlidingChannels, local_maps
from foveate.models.zoo import create_model

random_images = partial(made_images.random_images, dtype=torch.float64)
SIZE = 16
CASES = [(40, 40), (41, 40), (37, 52), (12, 9), (30, 5)]  # the last two are less than a window


def small_backbone(size=SIZE, channels=1, features=(4, 4)):
    return ConvNet(features, size, channels=channels, classes=3, hidden=6)


def pair(scales, **changes):
    """A sliding and a foveated network with the same weights."""
    sliding = shake(SlidingChannels(small_backbone(**changes), scales))
    return sliding, ScaleChannels(sliding.backbone, scales, sliding.backbone.size)


def slow_windows(net, images):
    """The logits of every window of every scale, crop by crop: (h, w, B, K) per scale."""
    size, stride, found = net.backbone.size, net.backbone.stride, []
    for scale in net.scales:
        extents = []
        for length in images.shape[-2:]:
            extent = size  # grows by a stride on either side until windows sit on the image's edge
            while extent - size < length / scale - 1e-6:
                extent += 2 * stride
            extents.append(extent)
        (tall, wide), (H, W) = extents, images.shape[-2:]
        theta = [[[wide * scale / W, 0, 0], [0, tall * scale / H, 0]]] * len(images)
        shape = (*images.shape[:2], tall, wide)
        grid = F.affine_grid(torch.tensor(theta, dtype=images.dtype), shape, align_corners=False)
        shown = F.grid_sample(images, grid, padding_mode="border", align_corners=False)
        corners = [
            (y, x)
            for y in range(0, tall - size + 1, stride)
            for x in range(0, wide - size + 1, stride)
        ]
        crops = torch.cat([shown[..., y : y + size, x : x + size] for y, x in corners])
        across = (wide - size) // stride + 1
        found.append(net.backbone(crops).unflatten(0, (-1, across, len(images))))
    return found


@pytest.mark.parametrize("features", [(4,), (4, 4), (4, 4, 4), (4, 4, 4, 4)])
@pytest.mark.parametrize("batch_norm", [True, False])
def test_dense_is_the_network_on_every_window(features, batch_norm):
    net = shake(ConvNet(features, 23, channels=2, classes=3, hidden=6, batch_norm=batch_norm))
    images, stride = random_images(2, 2, 37, 42), net.stride
    assert stride == 2 ** (len(features) // 2)
    answers = net.dense(images)
    assert answers.shape == (2, 3, (37 - 23) // stride + 1, (42 - 23) // stride + 1)
    for i in range(answers.shape[2]):
        for j in range(answers.shape[3]):
            crop = images[..., i * stride : i * stride + 23, j * stride : j * stride + 23]
            torch.testing.assert_close(answers[..., i, j], net(crop))


def test_dense_of_one_window_is_the_network():
    net = shake(ConvNet())
    images = random_images(2, 1, 28, 28)
    torch.testing.assert_close(net.dense(images)[..., 0, 0], net(images))


@pytest.mark.parametrize(("H", "W"), CASES)
def test_the_middle_window_is_the_foveated_channel(H, W):
    sliding, foveated = pair(PAPER_SCALES)
    assert len(sliding.scales) == 17
    images = random_images(2, 1, H, W)
    expected = foveated.channels(images)
    for s, answers in enumerate(sliding.maps(images)):
        h, w = answers.shape[-2:]
        assert h % 2 == w % 2 == 1
        torch.testing.assert_close(answers[..., h // 2, w // 2], expected[:, s])


def test_the_paper_network_in_the_middle_is_the_foveated_channel():
    sliding = shake(create_model("swmax"))
    foveated = ScaleChannels(sliding.backbone)
    images = random_images(1, 1, 112, 112)
    middle = [m[..., m.shape[-2] // 2, m.shape[-1] // 2] for m in sliding.maps(images)]
    torch.testing.assert_close(torch.stack(middle, 1), foveated.channels(images))


@pytest.mark.parametrize(("H", "W"), [(40, 33), (12, 9), (30, 5)])
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_swmax_is_the_maximum_over_all_windows_and_scales(H, W, pool):
    net, _ = pair([0.7, 1.0, 1.9, 4.0])
    net.pool = pool
    images = random_images(2, 1, H, W)
    windows = slow_windows(net, images)
    for answers, slow in zip(net.maps(images), windows, strict=True):
        torch.testing.assert_close(answers, slow.permute(2, 3, 0, 1))
    flat = [answers.flatten(0, 1) for answers in windows]
    if pool == "max":
        expected = torch.cat(flat).amax(0)
    else:
        expected = torch.stack([answers.mean(0) for answers in flat]).mean(0)
    torch.testing.assert_close(net(images), expected)


@pytest.mark.parametrize("shape", [(40, 33), (12, 9)])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_asking_the_winners_again_gives_the_logits_and_gradients_of_all_windows(shape, dropout):
    backbone = ConvNet(
        (4, 4), SIZE, channels=2, classes=3, hidden=6, batch_norm=False, dropout=dropout
    )
    net = SlidingChannels(backbone.double(), [0.7, 1.0, 1.9]).train()
    images = random_images(5, 2, *shape)
    found = []
    for compute in (net, lambda images: logits(net, prepare(net, images))):
        torch.manual_seed(1)
        answers = compute(images)
        loss = F.cross_entropy(answers, torch.tensor([0, 1, 2, 0, 1]))
        found.append([answers, *torch.autograd.grad(loss, list(net.parameters()))])
    for winner, plain in zip(*found, strict=True):
        torch.testing.assert_close(winner, plain, atol=1e-12, rtol=0)
    assert choose(net, images) is canvas


def test_dropout_leaves_out_the_same_units_everywhere_in_an_image():
    net = ConvNet((4,), SIZE, hidden=6, batch_norm=False, dropout=0.5).double().train()
    with torch.no_grad():
        net.hidden.weight.zero_()
        net.hidden.bias.fill_(1.0)
    answers = net.dense(random_images(40, 1, 24, 24))
    assert torch.equal(answers, answers[..., :1, :1].expand_as(answers))
    assert len(answers[:, 0, 0, 0].unique()) > 10


def test_every_pixel_is_seen_at_every_scale():
    net, _ = pair([0.7, 1.0, 1.9])
    images = random_images(1, 1, 37, 42).requires_grad_()
    for answers, scale in zip(net.maps(images), net.scales, strict=True):
        # A window ends up to a stride before its last pixel; beyond scale 1 pixels are skipped.
        seen = torch.autograd.grad(answers.sum(), images)[0][0, 0] != 0
        edge = round(2 * scale)
        assert seen[edge:-edge, edge:-edge].double().mean() > (0.99 if scale <= 1 else 0.8)


# Local maps


def places(images, step):
    H, W = images.shape[-2:]
    rows, columns = torch.arange(H // step), torch.arange(W // step)
    return [((i + 0.5) * step, (j + 0.5) * step) for i in rows.tolist() for j in columns.tolist()]


def slow_local(net, images, points):
    """The channels of the foveated network at each point: (points, B, S, K)."""
    centres = torch.tensor(points, dtype=torch.float64).repeat_interleave(len(images), 0)
    answers = net.channels(images.repeat(len(points), 1, 1, 1), centres)
    return answers.unflatten(0, (len(points), len(images)))


@pytest.mark.parametrize("kind", ["foveated", "sliding"])
@pytest.mark.parametrize(("H", "W"), [(28, 36), (36, 12), (28, 4)])
def test_local_maps_equal_the_channels_at_every_place(kind, H, W):
    """All places are middles of windows: H / 2 is 2 over a multiple of 4, windows are 4 s apart."""
    sliding, foveated = pair([0.5, 1.0], features=(4, 4, 4, 4), size=SIZE + 4)
    assert sliding.backbone.stride == 4
    images = random_images(2, 1, H, W)
    logits, scales = local_maps(foveated if kind == "foveated" else sliding, images, step=4)
    shape = (2, H // 4, W // 4)
    assert (logits.shape, scales.shape) == ((2, 3, *shape[1:]), shape)
    exact = slow_local(foveated, images, places(images, 4))
    best = exact.amax(2)
    torch.testing.assert_close(logits.flatten(2), best.permute(1, 2, 0))
    winner = best.argmax(-1)
    chosen = exact.argmax(2).gather(-1, winner[..., None])[..., 0]
    expected = torch.tensor(foveated.scales, dtype=torch.float64)[chosen].mT
    torch.testing.assert_close(scales.flatten(1), expected)
    assert len(expected.unique()) == 2


def test_coarse_scales_are_exact_where_their_windows_are():
    _, net = pair([0.5, 1.0, 2.0, 4.0])
    images = random_images(1, 1, 36, 52)
    logits, _ = local_maps(net, images, step=4)
    near = [(y, x) for y, x in places(images, 4) if (y - 18) % 8 == 0 and (x - 26) % 8 == 0]
    assert len(near) >= 20
    exact = slow_local(net, images, near).amax(2)[:, 0]
    found = torch.stack([logits[0, :, int(y // 4), int(x // 4)] for y, x in near])
    torch.testing.assert_close(found, exact)


def test_between_windows_the_answers_are_linear():
    _, net = pair([2.0])  # windows are 4 pixels apart, places 2: at them and halfway
    images = random_images(1, 1, 36, 28)
    fine = local_maps(net, images, step=2).logits
    at = local_maps(net, images, step=1).logits  # half a pixel off: quarters and three quarters
    H, W = 18, 14
    points = [(H + 4 * i, W + 4 * j) for i in range(-3, 4) for j in range(-2, 3)]
    exact = slow_local(net, images, points)[:, 0, 0].unflatten(0, (7, 5)).movedim(-1, 0)
    for step, found in ((2, fine), (1, at)):
        for i in range(found.shape[-2]):
            for j in range(found.shape[-1]):
                y, x = ((i + 0.5) * step - H) / 4 + 3, ((j + 0.5) * step - W) / 4 + 2
                if not (0 <= y <= 6 and 0 <= x <= 4):
                    continue
                a, b = min(int(y), 5), min(int(x), 3)
                v, u = y - a, x - b
                top = (1 - u) * exact[:, a, b] + u * exact[:, a, b + 1]
                bottom = (1 - u) * exact[:, a + 1, b] + u * exact[:, a + 1, b + 1]
                torch.testing.assert_close(found[0, :, i, j], (1 - v) * top + v * bottom)


@pytest.mark.parametrize("place", [(74, 114), (106, 82)])
def test_a_place_does_not_change_when_the_image_is_scaled_about_it(place):
    """The local theorem: f scaled by 2 about x0 has the answers of f at x0, one octave up.

    Windows of the scales 1, 2 and 4 all have their middles at x0, which is 16 pixels (the stride
    times 4) from the middle of the image, and lie inside it: only interpolation is left.
    """
    H, W, f = 180, 196, blobs(12, 18, batch=2)
    backbone = shake(ConvNet(features=(8, 8, 8, 8), classes=4, hidden=20))
    low, high = ScaleChannels(backbone, [1.0, 2.0]), ScaleChannels(backbone, [2.0, 4.0])
    images = [f.image(H, W, t, about=place) for t in (1.0, 2.0)]
    maps = [local_maps(low, images[0], step=4), local_maps(high, images[1], step=4)]
    around = torch.tensor([place] * 2)
    before, after = (n.patches(i, around) for n, i in ((low, images[0]), (high, images[1])))
    error = f.interpolation_error(1.0) + f.interpolation_error(2.0)
    constant = (
        sensitivity(backbone, before.flatten(0, 1), after.flatten(0, 1))
        .unflatten(0, (2, 2))
        .amax(1)
    )
    bound = constant * error[:, None]
    i, j = place[0] // 4, place[1] // 4
    assert ((i + 0.5) * 4, (j + 0.5) * 4) == place
    first, second = (m.logits[..., i, j].detach() for m in maps)
    assert ((second - first).abs() <= bound).all()
    assert bound.max() < maps[0].logits.std() / 5
    assert torch.equal(maps[1].scales[:, i, j], 2 * maps[0].scales[:, i, j])


# Wrong input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: SlidingChannels(nn.Flatten()), "dense"),
        (
            lambda: SlidingChannels(ConvNet(), pool="concat"),
            "pool of sliding windows must be one of max, avg, got 'concat'",
        ),
        (lambda: SlidingChannels(ConvNet(), [2.0, 1.0]), "order"),
        (
            lambda: SlidingChannels(ConvNet(), padding=0.0),
            "padding of sliding windows must be one of border, reflect, got 0.0",
        ),
        (lambda: SlidingChannels(ConvNet())(torch.zeros(28, 28)), "(B, C, H, W)"),
        (lambda: SlidingChannels(ConvNet())(torch.zeros(1, 28, 28)), "images[None]"),
        (
            lambda: SlidingChannels(ConvNet())(torch.zeros(1, 1, 28, 28, dtype=torch.uint8)),
            "images.float()",
        ),
        (
            lambda: local_maps(ScaleChannels(nn.Flatten()), torch.zeros(1, 1, 28, 28)),
            "requires a ConvNet as backbone, got Flatten",
        ),
        (lambda: local_maps(ScaleChannels(ConvNet()), torch.zeros(1, 1, 28, 28), step=0), "step"),
        (lambda: local_maps(ScaleChannels(ConvNet()), torch.zeros(1, 1, 28, 28), step=29), "step"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(make, says):
    with pytest.raises(ConfigError) as error:
        make()
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_sliding_network_is_differentiable_and_takes_any_batch():
    net, _ = pair([0.7, 2.0])
    images = random_images(3, 1, 24, 20).requires_grad_()
    net.train()(images).square().sum().backward()
    assert images.grad.abs().sum() > 0
    assert all(p.grad.isfinite().all() for p in net.parameters())
    net.eval()
    torch.testing.assert_close(net(images[:1]), net(images)[:1])
    assert net(images[:0]).shape == (0, 3)
    assert net.channels(images).shape == (3, 2, 3)


def test_a_nan_stays_with_its_image():
    net, _ = pair([0.7, 2.0])
    images = random_images(3, 1, 24, 20)
    clean = net(images)
    images[1, 0, 5, 7] = torch.nan
    spoiled = net(images)
    assert spoiled[1].isnan().all()
    torch.testing.assert_close(spoiled[[0, 2]], clean[[0, 2]], rtol=0, atol=0)
