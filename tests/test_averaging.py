"""The moving average of the weights: what it is, where it is used, and that it survives a stop."""

import copy
import math
import signal
from dataclasses import replace

import pytest
import torch
from tiny_runs import AS_TINY, STEPS, same_bits, tiny, trained, weights
from torch import nn

import foveate.training.session as session
from foveate.cli.app import run as command_line
from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.loop import train, train_together
from foveate.training.optimiser import WeightAverage
from foveate.training.presets import preset


def snapshot(net):
    return {name: value.detach().cpu().clone() for name, value in net.state_dict().items()}


def record_weights(monkeypatch):
    """Return a list to which runs append their initial weights, and those after each step."""
    states, make = [], session.make_step

    def recording(net, *arguments, **options):
        step = make(net, *arguments, **options)
        states.append(snapshot(net))

        def wrapped(batch):
            loss = step(batch)
            states.append(snapshot(net))
            return loss

        return wrapped

    monkeypatch.setattr(session, "make_step", recording)
    return states


def plain_average(states, decay):
    """The average by its definition, in float64; integers are those of the last step."""
    average = {name: value.double() for name, value in states[0].items()}
    for t, state in enumerate(states[1:]):
        d = min(decay, (1 + t) / (10 + t))
        for name, value in state.items():
            average[name] += (1 - d) * (value.double() - average[name])
    whole = {name for name, value in states[0].items() if not value.is_floating_point()}
    return {name: states[-1][name] if name in whole else v for name, v in average.items()}


def assert_average(found, states, decay):
    """Compare with the definition. L is the largest value and eps the spacing of floats at 1.

    Each step rounds the decay, a difference and a product of at most 2 L, by eps L each, and a sum
    of at most L, by eps L / 2.
    """
    for name, expected in plain_average(states, decay).items():
        if not found[name].is_floating_point():
            assert torch.equal(found[name], expected)
            continue
        largest = max(float(state[name].abs().max()) for state in states)
        bound = 4 * torch.finfo(torch.float32).eps * largest * (len(states) - 1)
        torch.testing.assert_close(found[name].double(), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("decay", [0.3, 0.99])  # 0.3 is beyond the warm-up after three steps
def test_a_run_saves_the_average_over_all_its_steps(tmp_path, monkeypatch, decay):
    states = record_weights(monkeypatch)
    found = trained(tmp_path, ema=decay, samples=50, epochs=2)
    assert len(states) == 1 + 2 * 4  # the last batch of an epoch has two images
    assert_average(found, states, decay)
    moved = [n for n, v in found.items() if not torch.equal(v, states[-1][n])]
    assert {"backbone.head.weight", "backbone.trunk.1.running_mean"} <= set(moved)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # compiling warns of torch's own code
@pytest.mark.parametrize("compiled", [False, True])
def test_a_captured_run_saves_the_average_over_all_its_steps(tmp_path, monkeypatch, compiled):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    states, config = record_weights(monkeypatch), tiny(ema=0.3, samples=50, epochs=2)
    run = train(config, tmp_path / "whole", device="cuda", compiled=compiled)
    assert len(states) == 1 + 2 * 4
    assert_average(weights(run.path), states, 0.3)
    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "parts", device="cuda", compiled=compiled, callback=stop_at(1, 2))
    again = train(config, tmp_path / "parts", device="cuda", compiled=compiled)
    assert same_bits(weights(again.path), weights(run.path))


def test_validation_uses_the_average(tmp_path):
    run = train(tiny(ema=0.9), tmp_path)
    val, net = load_source("mnist-5k").val, run.net().eval()
    with torch.no_grad():
        right = net(rescale(val.images, 1.0, size=24)).argmax(1) == val.labels
    assert run.validation() == float(right.double().mean())


def test_the_best_weights_are_those_of_the_average(tmp_path, monkeypatch):
    states, accuracies = record_weights(monkeypatch), iter([0.2, 0.9, 0.5])

    def accuracy(self):
        yield
        return next(accuracies)

    monkeypatch.setattr(session.Session, "_accuracy", accuracy)
    found = trained(tmp_path, ema=0.9, keep="best")
    assert_average(found, states[: 1 + 2 * STEPS], 0.9)


def test_weights_are_trained_as_without_the_average(tmp_path, monkeypatch):
    states = record_weights(monkeypatch)
    trained(tmp_path / "average", ema=0.9)
    assert same_bits(states[-1], trained(tmp_path / "plain"))


def test_tied_weights_move_once_and_infinite_constants_stay():
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net.register_buffer("mask", torch.tensor([0.0, -math.inf]), persistent=False)
    average, start = WeightAverage(net, 0.9), copy.deepcopy(net)
    with torch.no_grad():
        net[0].weight += 1.0
    average.update(1000)
    torch.testing.assert_close(average.net[1].weight - start[1].weight, torch.full((3, 3), 0.1))
    assert torch.equal(average.net.mask, net.mask)


# Interruptions


def stop_at(epoch, step):
    def callback(config, progress, steps):
        if (progress.epoch, progress.step) == (epoch, step):
            raise KeyboardInterrupt

    return callback


@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_stopped_run_ends_as_an_undisturbed_one(tmp_path, keep):
    config = tiny(ema=0.9, keep=keep)
    whole = trained(tmp_path / "whole", ema=0.9, keep=keep)
    for epoch, step in ((0, 2), (1, 4), (2, 0)):
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path / "parts", callback=stop_at(epoch, step))
    assert same_bits(weights(train(config, tmp_path / "parts").path), whole)


def test_a_checkpoint_during_validation_has_the_trained_weights(tmp_path, monkeypatch):
    """Ctrl-C in the middle of the second validation."""
    whole, calls, logits = trained(tmp_path / "whole", ema=0.9), [], session.logits

    def pressed(*arguments):
        calls.append(1)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGINT)
        return logits(*arguments)

    with monkeypatch.context() as patch:
        states = record_weights(patch)
        patch.setattr(session, "logits", pressed)
        with pytest.raises(KeyboardInterrupt):
            train(tiny(ema=0.9), tmp_path / "parts")
    progress, tensors = RunFolder(tmp_path / "parts").load()
    assert (progress.epoch, progress.step, len(states)) == (1, STEPS, 1 + 2 * STEPS)
    assert all(torch.equal(tensors[f"net.{k}"], v) for k, v in states[-1].items())
    assert_average({k: tensors[f"ema.{k}"] for k in states[-1]}, states, 0.9)
    assert same_bits(weights(train(tiny(ema=0.9), tmp_path / "parts").path), whole)


def test_runs_side_by_side_have_averages_of_their_own(tmp_path):
    configs = [tiny(ema=0.9), tiny(ema=0.5, seed=1), tiny()]
    alone = [weights(train(c, tmp_path / f"alone{i}").path) for i, c in enumerate(configs)]
    folders = train_together([(c, tmp_path / f"both{i}") for i, c in enumerate(configs)])
    assert all(same_bits(one, weights(f.path)) for one, f in zip(alone, folders, strict=True))


# The setting


def test_without_an_average_nothing_changes(tmp_path):
    config = tiny(ema=0.99)
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert "ema" not in tiny().to_dict()
    assert replace(config, ema=0.0).digest() == tiny().digest() != config.digest()
    # Digests of the version before this setting.
    before = {"model.pool": "logsumexp", "learning_rate": "3e-4", "epochs": "8"}
    tuned = preset("finetune").changed({**before, "ema": "0", "recipe.resolution": "1"})
    assert (TrainConfig().digest(), tuned.digest()) == ("b5bf7e8be004", "5b54c3ee3fcc")
    with pytest.raises(KeyboardInterrupt):
        train(tiny(), tmp_path, callback=stop_at(1, 2))
    assert not any(name.startswith("ema.") for name in RunFolder(tmp_path).load()[1])


@pytest.mark.parametrize("value", [-0.1, 1.0, 2.0, math.nan, math.inf])
def test_decays_out_of_range_are_refused(value):
    with pytest.raises(ConfigError, match="ema must be") as error:
        tiny(ema=value)
    assert "\n" not in str(error.value)


def test_the_command_line_sets_the_decay(tmp_path, capsys):
    command = [*AS_TINY, "--set", "ema=0.99", "--out", str(tmp_path / "run")]
    assert command_line(command) == 0
    assert same_bits(weights(tmp_path / "run"), trained(tmp_path / "same", ema=0.99))
    assert command_line([*AS_TINY, "--set", "ema=1", "--out", str(tmp_path / "no")]) == 2
    assert "ema must be at least 0 and below 1, got 1" in capsys.readouterr().err
