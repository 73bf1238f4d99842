"""The audit of any classifier: counted by hand, its intervals, and what it refuses."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from made_images import random_images
from torch import nn

from foveate.data.large_scale import rescale
from foveate.data.sources import Split, load_source
from foveate.errors import ConfigError, DataError
from foveate.evaluation.audit.changes import Change, most_confident
from foveate.evaluation.audit.images import reduce_resolution, zoom
from foveate.evaluation.audit.measure import Audit, Counts, Z, audit, audit_together, wilson
from foveate.evaluation.curve import SCALES, accuracy_over_scale
from foveate.evaluation.third_party import Classifier
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid

GRID = (0.5, 1.0, 2.0)
WEIGHTS = random_images(4, 2 * 8 * 8, seed=1)


def linear(images):
    """A classifier of 4 classes for images (B, 2, 8, 8).

    Rounded from float64: the rounding of a product in float32 can depend on the batch size.
    """
    return (3 * images.flatten(1).double() @ WEIGHTS.double().T).float()


def some(count=30):
    labels = torch.arange(count) % 4
    return random_images(count, 2, 8, 8, seed=2), labels


@given(st.integers(1, 500), st.data())
def test_wilsons_interval_ends_where_the_share_is_z_deviations_away(count, data):
    """Its ends p solve (share - p)^2 = Z^2 p (1 - p) / count, one on each side."""
    hits = data.draw(st.integers(0, count))
    share, low, high = wilson(hits, count)
    assert share == hits / count
    assert 0 <= low <= share <= high <= 1
    for end in (low, high):
        assert math.isclose(
            (share - end) ** 2, Z**2 * end * (1 - end) / count, rel_tol=1e-6, abs_tol=1e-12
        )
    assert low < high


def test_wilsons_interval_covers_as_often_as_it_says():
    """Exactly: the binomial probability of the counts whose interval holds the true share."""
    count, share = 100, 0.8
    covered = sum(
        math.comb(count, k) * share**k * (1 - share) ** (count - k)
        for k in range(count + 1)
        if wilson(k, count).low <= share <= wilson(k, count).high
    )
    assert 0.93 < covered < 0.97


def test_nothing_is_known_of_no_images():
    counts = Counts(0, 0, 0, 0.0, 0.0)
    for estimate in (counts.accuracy, counts.agreement, counts.confidence):
        assert math.isnan(estimate.value) and (estimate.low, estimate.high) == (0, 1)


def test_confidence_has_the_interval_of_a_mean():
    values = [0.9, 0.5, 0.7, 0.8]
    found = Counts(4, 0, 0, sum(values), sum(v * v for v in values)).confidence
    half = Z * torch.tensor(values).double().std().item() / 2
    assert found.value == pytest.approx(0.725)
    assert (found.low, found.high) == pytest.approx((0.725 - half, min(0.725 + half, 1)))
    assert Counts(1, 0, 0, 0.6, 0.36).confidence == (0.6, 0, 1)


def test_every_count_is_the_one_made_by_hand():
    images, labels = some()
    found = audit(linear, images, labels, GRID, classes=["a", "b", "c", "d"])
    said = {s: linear(zoom(images, s)).argmax(1) for s in GRID}
    sure = {s: linear(zoom(images, s)).double().softmax(1).amax(1) for s in GRID}
    assert found.scales == GRID and found.count == 30 and found.classes == ("a", "b", "c", "d")
    for i, scale in enumerate(GRID):
        for k, counts in enumerate((*found.per_class[i], found.overall[i])):
            mine = labels == k if k < 4 else labels >= 0
            assert counts.count == mine.sum()
            assert counts.right == (said[scale] == labels)[mine].sum()
            assert counts.agreeing == (said[scale] == said[1.0])[mine].sum()
            values = sure[scale][mine]
            half = Z * (values.std() / len(values) ** 0.5).item()
            ends = values.mean().item(), max(values.mean().item() - half, 0)
            assert counts.confidence[:2] == pytest.approx(ends, abs=1e-6)  # float32 logits
    assert len({counts.right for counts in found.overall}) > 1
    assert found.at_native == found.overall[1]
    assert found.at_native.agreement.value == 1


def test_the_size_of_the_batches_does_not_matter():
    images, labels = some()
    one, other = (audit(linear, images, labels, GRID, batch=batch) for batch in (64, 7))
    for a, b in zip(one.overall, other.overall, strict=True):
        assert (a.count, a.right, a.agreeing) == (b.count, b.right, b.agreeing)
        assert a.confidences == pytest.approx(b.confidences, abs=1e-4)


def test_answers_are_compared_with_the_native_scale_which_is_added_if_it_is_missing():
    images, labels = some()
    one, batches = Classifier(linear, 4), [(partial(zoom, images), labels)]
    (trained,) = audit_together([one], batches, [0.5, 2.0], "abcd", native=1.25)
    for found, native in ((audit(linear, images, labels, [0.5, 2.0]), 1.0), (trained, 1.25)):
        assert found.scales == (0.5, native, 2.0) and found.native == native
        said = linear(zoom(images, native)).argmax(1)
        agreeing = (linear(zoom(images, 2.0)).argmax(1) == said).sum()
        assert found.overall[2].agreeing == agreeing
    assert audit(linear, images, labels, SCALES).scales == SCALES.values


def test_models_in_one_pass_are_the_same_as_alone():
    images, labels = some()

    def other(batch):
        return -linear(batch)

    batches = [(lambda s, part=part: zoom(part, s), labels[i * 10 : i * 10 + 10])
               for i, part in enumerate(images.split(10))]  # fmt: skip
    told = []
    models = [Classifier(linear), Classifier(other)]
    found = audit_together(models, batches, GRID, "abcd", advance=told.append)
    assert found == [
        audit(model, images, labels, GRID, classes="abcd", batch=10) for model in (linear, other)
    ]
    assert told == [10] * 9


def test_the_view_resolution():
    images, labels = some()
    found = audit(linear, images, labels, [0.5, 1.0], view="resolution")
    right = (linear(reduce_resolution(images, 0.5)).argmax(1) == labels).sum()
    assert found.overall[0].right == right
    assert right != audit(linear, images, labels, [0.5, 1.0]).overall[0].right
    assert "scales of at most 1, got 2" in refused(scales=[1, 2], view="resolution")
    assert "view must be one of zoom, resolution" in refused(view="near")


@pytest.mark.parametrize("border", ["refelct", "zero", math.nan, (0.1, 0.2, 0.3)])
def test_a_border_that_cannot_be_is_refused(border):
    words = refused(border=border)
    assert words.startswith("border must be") and "per channel" in words


def test_a_border_is_what_lies_outside_the_images():
    images, labels = some()
    for border in ("reflect", 0.3, (0.1, 0.9), [0.1, 0.9]):
        found = audit(linear, images, labels, GRID, border=border)
        right = (linear(zoom(images, 0.5, border=border)).argmax(1) == labels).sum()
        assert found.overall[0].right == right


def test_a_batch_has_images():
    assert "batch must be at least 1 image, got 0" in refused(batch=0)


# Changed predictions


def test_changes_are_those_of_the_predictions():
    images, labels = some()
    found = audit(linear, images, labels, GRID, batch=7)
    logits = {s: linear(zoom(images, s)).double().softmax(1) for s in GRID}
    (sure, said) = ({s: part[k] for s, part in ((s, v.max(1)) for s, v in logits.items())}
                    for k in (0, 1))  # fmt: skip
    assert len(found.changes) == 12
    for change in found.changes:
        i = change.image
        assert change.label == labels[i] and change.native_prediction == said[1.0][i]
        assert change.prediction == said[change.scale][i] != change.native_prediction
        assert change.confidence == pytest.approx(sure[change.scale][i].item(), abs=1e-5)
        assert change.native_confidence == pytest.approx(sure[1.0][i].item(), abs=1e-5)
        others = [sure[s][i].item() for s in GRID if said[s][i] != said[1.0][i]]
        assert change.confidence == pytest.approx(max(others), abs=1e-5)
    certainties = [change.min_confidence for change in found.changes]
    assert certainties == sorted(certainties, reverse=True)
    assert found.changes == audit(linear, images, labels, GRID, batch=30).changes
    assert found.to_dict()["changes"][0]["image"] == found.changes[0].image


def test_the_most_confident_changes_come_first_and_no_class_fills_the_gallery():
    made = [Change(i, i % 5, 2.0, 0, 0.9, 1, i / 100) for i in range(60)]
    chosen = most_confident(made)
    assert [change.image for change in chosen] == list(range(59, 47, -1))
    ones = [change._replace(label=1) for change in made]
    assert [change.image for change in most_confident(ones)] == [59, 58, 57]
    assert most_confident([]) == []


def test_without_a_change_there_is_nothing_to_show():
    images, labels = some()
    constant = audit(lambda batch: torch.eye(4)[:1].expand(len(batch), 4), images, labels, GRID)
    assert constant.changes == ()


def test_a_network_is_asked_in_eval_mode_without_gradients_and_left_as_it_was():
    seen = []

    class Net(nn.Linear):
        def forward(self, images):
            seen.append((self.training, torch.is_grad_enabled()))
            return super().forward(images.flatten(1))

    inner = Net(128, 4)
    net = nn.Sequential(inner, nn.Dropout()).train()
    net[1].eval()  # the mode of each part is restored, not one mode for all
    audit(net, *some(), GRID)
    assert set(seen) == {(False, False)} and torch.is_grad_enabled()
    assert [module.training for module in net.modules()] == [True, True, False]
    with pytest.raises(ConfigError):
        audit(net, *some(), GRID, classes="abc")
    assert [module.training for module in net.modules()] == [True, True, False]


def test_probabilities_are_taken_for_what_they_are():
    images, labels = some()
    one = audit(linear, images, labels, GRID)
    other = audit(lambda batch: linear(batch).softmax(1), images, labels, GRID)
    for a, b in zip(one.overall, other.overall, strict=True):
        assert (a.right, a.agreeing) == (b.right, b.agreeing)
        assert a.confidences == pytest.approx(b.confidences, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rounded_probabilities_are_probabilities_in_every_batch(dtype):
    logits = 3 * torch.randn(200, 10, generator=torch.Generator().manual_seed(0))
    shares = logits.softmax(1).to(dtype)
    found = Classifier(lambda batch: shares[batch[:, 0, 0, 0].long()], batch=20)(
        torch.arange(200.0).reshape(-1, 1, 1, 1)
    )
    error = torch.finfo(dtype).eps / 2 + 1e-6  # of the sum, by which softmax divides
    torch.testing.assert_close(found.softmax(1), shares.float(), atol=error, rtol=0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_one_hot_predictions_are_probabilities(dtype):
    images, labels = some()
    found = audit(
        lambda batch: F.one_hot(linear(batch).argmax(1), 4).to(dtype), images, labels, GRID
    )
    expected = audit(linear, images, labels, GRID)
    for a, b in zip(found.overall, expected.overall, strict=True):
        assert (a.right, a.agreeing) == (b.right, b.agreeing)
        assert a.confidences == pytest.approx(30)


def audit_of(accuracies):
    counts = tuple(Counts(100, round(100 * a), 100, 50.0, 30.0) for a in accuracies)
    scales = ScaleGrid(0.25, 4, per_octave=1).values
    return Audit(
        scales=scales, native=1.0, classes=("a",), overall=counts, per_class=((),) * len(scales)
    )


def test_steady_is_the_range_about_the_native_scale():
    assert audit_of([0.9, 0.5, 0.9, 0.86, 0.85]).stable_range() == (1.0, 4.0)
    assert audit_of([0.9, 0.5, 0.9, 0.86, 0.84]).stable_range() == (1.0, 2.0)
    assert audit_of([0.1, 0.5, 0.9, 0.6, 0.84]).stable_range(0.4) == (0.5, 4.0)
    assert audit_of([0.1, 0.5, 0.9, 0.6, 0.84]).stable_range() == (1.0, 1.0)
    assert audit_of([0.3, 0.35, 0.4, 0.35, 0.34]).stable_range() == (0.5, 2.0)  # 0.4 - 0.05 > 0.35


def refused(classify=linear, images=None, labels=None, **options):
    usual = some()
    with pytest.raises((ConfigError, DataError)) as caught:
        audit(
            classify,
            usual[0] if images is None else images,
            usual[1] if labels is None else labels,
            options.pop("scales", GRID),
            **options,
        )
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_a_model_may_not_answer():
    def failing(images):
        raise ValueError("mat1 and mat2\ncannot be multiplied")

    wanted = "must return logits of shape (30, 3), one per class, got (30, 4)"
    told = refused(classes="abc", labels=torch.zeros(30).long())
    assert wanted in told and "list them all with --classes" in told
    assert "got (1, 4, 1)" in refused(lambda images: linear(images)[..., None])
    assert "got tuple" in refused(lambda images: (linear(images),))
    assert "shape (1, classes), one per class, got (2, 4)" in refused(
        lambda images: linear(images).repeat(2, 1)
    )
    words = refused(failing)
    assert (
        "failed on images of shape (1, 2, 8, 8) (ValueError: mat1 and mat2 cannot be multiplied)"
        in words
    )
    some_nan = refused(lambda images: linear(images) / (images.amax((1, 2, 3)) < 0.99)[:, None])
    assert "returned non-finite logits for" in some_nan and "at scale 1;" in some_nan


def test_what_data_may_not_be():
    images, labels = some()
    assert "(B, C, H, W), got (2, 8, 8)" in refused(images=images[0])
    assert "must have a floating-point dtype, got torch.uint8" in refused(images=images.byte())
    assert "labels must have the shape (30,), got (29,)" in refused(labels=labels[1:])
    assert "labels must lie between 0 and 3" in refused(labels=labels + 1)
    assert "labels must lie between 0 and 3" in refused(labels=labels - 1)
    assert "at least 1 image, got 0" in refused(images=images[:0], labels=labels[:0])
    assert "scales out of order" in refused(scales=[2, 1])
    assert "each scale must be finite and above 0" in refused(scales=[0.0])


@pytest.fixture(scope="module")
def digits():
    return load_source("mnist-5k")


def trained(config, source, size):
    """A network that has seen 600 digits at scale 1 a few times."""
    torch.manual_seed(0)
    net = config.build()
    images, labels = rescale(source.train.images[:600], 1.0, size=size), source.train.labels
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(3):
        for chosen in torch.randperm(600).split(32):
            optimiser.zero_grad()
            F.cross_entropy(net(images[chosen]), labels[chosen]).backward()
            optimiser.step()
    return net


SMALL = {
    "cnn": ModelConfig(form="plain", size=64, features=(8, 8, 16, 16), hidden=32, dropout=0.0),
    "fovmax": ModelConfig(
        size=24, features=(8, 16), hidden=32, dropout=0.0, scales=ScaleGrid(0.5, 2, per_octave=2)
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_rescaled_pictures_of_digits_give_the_curve_of_digits_made_at_each_scale(name, digits):
    """The generator smooths in proportion to the scale, so zooming its images comes to the same.

    Two resamplers that know nothing of each other must agree to within the sampling error.
    """
    scales = ScaleGrid(0.5, 2, per_octave=2).values
    net, test = (
        trained(SMALL[name], digits, 64),
        Split(digits.test.images[:300], digits.test.labels[:300]),
    )
    made = accuracy_over_scale(net, test, scales, size=64)
    found = audit(net, rescale(test.images, 1.0, size=64), test.labels, scales)
    for at, counts in zip(made, found.overall, strict=True):
        assert counts.accuracy.low <= at.accuracy <= counts.accuracy.high
    assert found.at_native.right == round(made[2].accuracy * 300)
    best, worst = (f(at.accuracy for at in made) for f in (max, min))
    assert best - worst > 0.1  # a curve, not a constant
