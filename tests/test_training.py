"""Training: that it learns, that it repeats, and that it stops where the loss is not finite."""

import math
import time
from dataclasses import replace

import pytest
import torch
from tiny_runs import MODEL, STEPS, same_bits, tiny, trained, weights

import foveate.training.session as session
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.errors import ConfigError, FoveateError
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.training.checkpoint import RunFolder, RunWriter
from foveate.training.config import TrainConfig
from foveate.training.loop import train, train_together


def test_a_run_learns_real_digits(tmp_path):
    config = tiny(samples=600, epochs=6, model=replace(MODEL, hidden=32))
    folder = train(config, tmp_path / "run")
    metrics = folder.metrics()
    assert [entry["epoch"] for entry in metrics] == [1, 2, 3, 4, 5, 6]
    assert metrics[-1]["loss"] < 0.6 * metrics[0]["loss"]
    # Chance is 10 %; 500 answers by chance are below 17 % in all but one of ten million cases.
    assert metrics[-1]["validation"] > 0.5
    assert [entry["learning_rate"] for entry in metrics] == [config.rate(e) for e in range(6)]
    assert sorted(p.name for p in folder.path.iterdir()) == [
        ".lock",
        "config.json",
        "metrics.jsonl",
        "weights.safetensors",
    ]


def test_the_first_loss_is_that_of_ten_equal_classes(tmp_path):
    folder = train(tiny(epochs=1, samples=16, learning_rate=1e-9, smallest_rate=1e-9), tmp_path)
    assert folder.metrics()[0]["loss"] == pytest.approx(math.log(10), abs=0.3)


def test_validation_is_the_share_of_right_answers(tmp_path):
    config = tiny(epochs=1)
    folder = train(config, tmp_path / "run")
    val = load_source("mnist-5k").val
    net = folder.net().eval()
    with torch.no_grad():
        answers = net(rescale(val.images, 1.0, size=24)).argmax(1)
    assert folder.metrics()[0]["validation"] == float((answers == val.labels).double().mean())


def test_the_same_seed_gives_the_same_bits_and_another_does_not(tmp_path):
    first = trained(tmp_path / "a")
    torch.rand(3)  # whatever the caller draws before
    assert same_bits(first, trained(tmp_path / "b"))
    assert not same_bits(first, trained(tmp_path / "c", seed=1))


def test_training_leaves_the_callers_random_numbers_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    train(tiny(), tmp_path)
    assert torch.equal(torch.rand(4), expected)


def test_runs_side_by_side_are_the_runs_alone(tmp_path):
    configs = [tiny(seed=0), tiny(seed=1), tiny(seed=0, scales="2", epochs=2)]
    alone = [weights(train(c, tmp_path / f"alone{i}").path) for i, c in enumerate(configs)]
    folders = train_together([(c, tmp_path / f"both{i}") for i, c in enumerate(configs)])
    for one, folder in zip(alone, folders, strict=True):
        assert same_bits(one, weights(folder.path))


def test_every_step_has_random_numbers_of_its_own(tmp_path):
    """Each step draws its dropout where the one before stopped, beside other runs too."""
    states = {0: [], 1: []}

    def callback(config, progress, steps):
        if progress.step:
            states[config.seed].append(torch.get_rng_state().numpy().tobytes())

    train_together([(tiny(seed=seed), tmp_path / str(seed)) for seed in states], callback=callback)
    assert len(set(states[0]) | set(states[1])) == 2 * 3 * STEPS


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(tmp_path, monkeypatch):
    losses, make = [], session.make_step

    def recording(*arguments, **options):
        step = make(*arguments, **options)

        def wrapped(*batch):
            losses.append(step(*batch))
            return losses[-1]

        return wrapped

    monkeypatch.setattr(session, "make_step", recording)
    monkeypatch.setattr(
        session, "READ_LOSSES_EVERY", 0.0
    )  # added up after each step, as at a slower pace
    metrics = train(tiny(), tmp_path).metrics()
    means = torch.stack(losses).double().view(3, STEPS).mean(1).tolist()
    assert [entry["loss"] for entry in metrics] == pytest.approx(means, rel=1e-12)


@pytest.mark.parametrize(
    "model",
    [
        ModelConfig(form="plain", size=24, features=(4, 8), hidden=8),
        ModelConfig(form="sliding", size=12, features=(4, 8), hidden=8, batch_norm=False),
        replace(MODEL, pool="concat"),
        replace(MODEL, pool="max"),
        replace(MODEL, size=11),  # no fast form
    ],
    ids=lambda model: f"{model.form}-{model.pool}-{model.size}",
)
def test_every_form_of_network_trains_and_repeats(tmp_path, model):
    model = replace(model, scales=ScaleGrid(1, 2, per_octave=1))
    changes = {"model": model, "epochs": 1, "samples": 32}
    assert same_bits(trained(tmp_path / "a", **changes), trained(tmp_path / "b", **changes))


def test_bf16_trains(tmp_path):
    metrics = train(tiny(precision="bf16", epochs=1), tmp_path).metrics()
    assert math.isfinite(metrics[0]["loss"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(ConfigError, match="no GPU was found; use --device cpu"):
        train(tiny(), "unused", device="cuda")


def test_a_nonsense_device_is_said():
    with pytest.raises(ConfigError, match="unknown device 'abacus'"):
        train(tiny(), "unused", device="abacus")


# A loss that is not finite


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path):
    config = tiny(learning_rate=1e30)
    with pytest.raises(FoveateError, match=r"not finite in epoch 1, step [2-6]; use a smaller"):
        train(config, tmp_path)
    folder = RunFolder(tmp_path)
    assert not folder.finished and not folder.saved


def test_runs_side_by_side_share_the_time(tmp_path):
    start = time.perf_counter()
    runs = train_together([(tiny(seed=seed), tmp_path / str(seed)) for seed in range(3)])
    taken = time.perf_counter() - start
    shares = [run.metrics()[-1]["share"] for run in runs]
    assert taken / 2 < sum(shares) < taken


@pytest.mark.parametrize(
    ("samples", "epochs_validated"),
    [  # with 500 validation images
        (2000, [*range(2, 45, 2), 45]),
        (600, [*range(4, 45, 4), 45]),  # after three epochs, it would be more than a quarter
        (16, [11, 22, 33, 44, 45]),  # at least four validations
    ],
)
def test_a_run_of_many_epochs_is_validated_and_saved_now_and_then(
    tmp_path, monkeypatch, samples, epochs_validated
):
    saves = []
    monkeypatch.setattr(RunWriter, "save", lambda self, now, tensors: saves.append(now.epoch))
    trained(tmp_path / "run", epochs=45, samples=samples, batch=samples)
    metrics = RunFolder(tmp_path / "run").metrics()
    validated = [entry["epoch"] for entry in metrics if "validation" in entry]
    assert validated == saves == epochs_validated
    assert len(metrics) == 45


@pytest.mark.parametrize("changes", [{}, {"ema": 0.9}, {"zooms": (0.5, 2.0)}])
def test_the_number_of_validations_does_not_change_the_weights(tmp_path, changes):
    usual, rare = (
        train(tiny(epochs=4, validations=count, **changes), tmp_path / str(count))
        for count in (20, 1)
    )
    assert same_bits(weights(usual.path), weights(rare.path))
    assert ["validation" in entry for entry in rare.metrics()] == [False, False, False, True]
    assert rare.validation() == usual.validation()


def test_the_last_good_state_is_kept(tmp_path, monkeypatch):
    whole = trained(tmp_path / "whole")
    rate = TrainConfig.rate
    with monkeypatch.context() as patch:
        patch.setattr(TrainConfig, "rate", lambda self, epoch: 1e30 if epoch else rate(self, 0))
        with pytest.raises(FoveateError, match=r"epoch 2, step \d; the last finite state is in"):
            train(tiny(), tmp_path / "run")
    progress, tensors = RunFolder(tmp_path / "run").load()
    assert (progress.epoch, progress.step) == (1, 0)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert same_bits(whole, trained(tmp_path / "run"))


def test_ctrl_c_does_not_save_a_loss_that_is_no_number(tmp_path):
    def callback(config, progress, steps):
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(FoveateError, match="the loss is not finite"):
        train(tiny(learning_rate=1e30), tmp_path, callback=callback)
    assert not RunFolder(tmp_path).saved
