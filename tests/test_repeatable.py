"""The same configuration and seed give the same weights to the bit, and leave the caller alone."""

from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from made_sources import write_cifar_folder
from tiny_runs import MODEL, same_bits, tiny, weights

from foveate.data.recipes import find_recipe
from foveate.models.zoo import ModelConfig
from foveate.training.data import open_batches
from foveate.training.loop import train, train_together
from foveate.training.state import RandomStates, deterministic

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SLIDING = ModelConfig(
    form="sliding", features=(4, 8), size=12, hidden=8, batch_norm=False, scales=MODEL.scales
)
MODELS = {"avg": MODEL, "max": replace(MODEL, pool="max"), "sliding": SLIDING}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler's own code


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param


@pytest.mark.parametrize("precision", ["float32", "bf16"])  # on a GPU, other kernels
@pytest.mark.parametrize("model", MODELS)
def test_runs_side_by_side_end_as_each_does_alone(tmp_path, device, model, precision):
    """Dropout is on: a run that shared its random state with another would end differently."""
    given = {"model": MODELS[model], "precision": precision, "epochs": 2}
    configs = [tiny(seed=seed, **given) for seed in (0, 1, 0)]
    runs = [(config, tmp_path / f"together-{k}") for k, config in enumerate(configs)]
    together = [weights(folder.path) for folder in train_together(runs, device=device)]
    for k, config in enumerate(configs):
        alone = weights(train(config, tmp_path / f"alone-{k}", device=device).path)
        assert same_bits(alone, together[k])
    assert not same_bits(together[0], together[1])


def test_augmented_runs_side_by_side_end_as_each_does_alone(tmp_path, device, monkeypatch):
    """A GPU holds the augmented images of an epoch, which are those of one seed."""

    def held(config, split, *others):
        batches = open_batches(config, split, *others)
        return batches.make_resident(config) if batches.resident is None else batches

    monkeypatch.setattr("foveate.training.session.open_batches", held)  # on a CPU too
    write_cifar_folder(tmp_path, count=12)
    given = {"source": f"cifar10:{tmp_path}", "recipe": find_recipe("mirrored"), "size": 24}
    given |= {"model": replace(MODEL, channels=3), "samples": 0, "batch": 10, "epochs": 2}
    configs = [tiny(seed=seed, **given) for seed in (0, 1)]
    runs = [(config, tmp_path / f"together-{config.seed}") for config in configs]
    together = [weights(folder.path) for folder in train_together(runs, device=device)]
    for config, expected in zip(configs, together, strict=True):
        alone = train(config, tmp_path / f"alone-{config.seed}", device=device)
        assert same_bits(weights(alone.path), expected)


class StopError(Exception):
    """What interrupts a run here."""


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_a_resumed_run_ends_as_an_undisturbed_one(tmp_path, device, monkeypatch, precision):
    monkeypatch.setattr("foveate.training.session.SAVE_EVERY", 0.0)
    config = tiny(precision=precision)
    whole = weights(train(config, tmp_path / "whole", device=device).path)

    def stop(config, progress, steps):
        if (progress.epoch, progress.step) == (1, 3):
            raise StopError

    with pytest.raises(StopError):
        train(config, tmp_path / "stopped", device=device, callback=stop)
    assert (tmp_path / "stopped" / "resume.safetensors").exists()
    assert same_bits(weights(train(config, tmp_path / "stopped", device=device).path), whole)


def test_training_leaves_the_callers_random_states_and_settings(tmp_path, device):
    def caller():
        gpu = torch.cuda.get_rng_state() if device == "cuda" else torch.zeros(0)
        cudnn = torch.backends.cudnn
        settings = [cudnn.deterministic, cudnn.benchmark, *_algorithms()]
        return torch.get_rng_state().tolist(), gpu.tolist(), settings

    torch.manual_seed(5)
    before = caller()
    train(tiny(epochs=1), tmp_path / "run", device=device)
    assert caller() == before


def _algorithms():
    filled = torch.utils.deterministic.fill_uninitialized_memory
    return torch.are_deterministic_algorithms_enabled(), filled


def test_deterministic_restores_the_settings_after_an_error():
    before = torch.backends.cudnn.benchmark, *_algorithms()
    inside = []
    with suppress(StopError), deterministic(strict=True):
        inside += _algorithms()
        raise StopError
    assert inside == [True, False]
    assert (torch.backends.cudnn.benchmark, *_algorithms()) == before


def test_each_run_draws_from_states_of_its_own(device):
    place = torch.device(device)
    one, other = RandomStates(place), RandomStates(place)
    for states in (one, other):
        with states.active():
            torch.manual_seed(7)
    drawn = {one: [], other: []}
    for states in (one, other, other, one):  # taking turns changes nothing
        with states.active():
            drawn[states].append(torch.rand(4, device=place).tolist())
    assert drawn[one] == drawn[other]
    assert drawn[one][0] != drawn[one][1]
