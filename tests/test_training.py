"""Training: what a run is, that it learns, that it repeats, and that its fast path is the plain."""

import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_runs import MODEL, STEPS, same_bits, tiny, trained, weights

import foveate.training.loop as loop
from foveate.data.large_scale import rescale
from foveate.data.sources import Source, Split, load_source
from foveate.data.store import FileSpec, ScaledFile, ScaleRange, write
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.models.fast import applies
from foveate.models.zoo import ZOO, ModelConfig
from foveate.scales import ScaleGrid
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Streamed, draw_scales, fitted, training_images
from foveate.training.engine import CapturedStep, answer, plain_step, prepare
from foveate.training.loop import train, train_together
from foveate.training.network import build_net
from foveate.training.presets import PRESETS, model_name, preset


def test_the_rate_falls_by_e_every_second_epoch_to_the_floor():
    config = TrainConfig()
    expected = [max(3e-3 * math.exp(-(epoch // 2)), 5e-5) for epoch in range(20)]
    assert [config.rate(epoch) for epoch in range(20)] == pytest.approx(expected, rel=1e-12)
    assert config.rate(10) == 5e-5  # e^-5 of 3e-3 is 2e-5


def test_a_stretched_schedule_takes_the_same_rates():
    stretched = TrainConfig(epochs=400, epochs_per_decay=40.0)
    assert [stretched.rate(20 * k) for k in range(20)] == [TrainConfig().rate(k) for k in range(20)]


def test_the_defaults_are_the_papers():
    config = TrainConfig()
    assert (config.epochs, config.batch, config.learning_rate) == (20, 32, 3e-3)
    assert (config.size, config.model.dropout, config.samples) == (112, 0.15, 0)


def rows(name):
    return [key for key in PRESETS if key.startswith(name + "-tr") and "ch" not in key]


def test_there_is_a_preset_for_each_row_of_the_paper():
    counts = {name: len(rows(name)) for name in [*ZOO, "fovconc5"]}
    assert counts == {"cnn": 4, "fovavg": 4, "fovmax": 4, "fovconc": 3, "fovconc5": 2, "swmax": 4}
    assert sum(counts.values()) == 21
    second = {key: len(c.model.scales) for key, c in PRESETS.items() if key.endswith("ch")}
    expected = {f"{n}-tr2-{s}ch": s for n in ("fovmax", "fovavg") for s in (17, 9, 5)}
    assert second == expected
    third = [key for key in PRESETS if "-few" in key]
    assert len(third) == 5 * 7
    assert len(PRESETS) == 21 + 6 + 35


@pytest.mark.parametrize(
    ("name", "parameters"), [("cnn", 92_198), ("fovavg", 68_870), ("fovmax", 68_870)]
)
def test_presets_have_the_papers_numbers_of_parameters(name, parameters):
    for key in rows(name):
        net = build_net(PRESETS[key])
        assert sum(p.numel() for p in net.parameters()) == parameters


def test_preset_details():
    assert preset("cnn-tr14").scales == "1-4"
    assert preset("fovconc-tr1").model.scales == ScaleGrid(1, 4, per_octave=1)
    assert preset("fovconc5-tr14").model.scales == ScaleGrid(0.5, 8, per_octave=1)
    assert len(preset("fovconc-few100").model.scales) == 17
    few = preset("fovavg-few1000")
    assert (few.samples, few.scales, few.epochs, few.epochs_per_decay) == (1000, "1-4", 200, 20)
    assert preset("cnn-few10000").epochs == 20
    assert preset("swmax") == TrainConfig(model=ZOO["swmax"])
    with pytest.raises(ConfigError, match="did you mean fovavg-tr2"):
        preset("fovavg-rt2")


@pytest.mark.parametrize("name", ["cnn", "fovmax", "fovavg", "fovconc", "swmax"])
def test_networks_are_named_as_in_the_zoo(name):
    assert model_name(preset(name)) == name


def test_other_networks_are_named_by_what_differs():
    assert model_name(preset("fovmax-tr2-9ch")) == "fovmax-9ch"
    assert model_name(preset("fovconc5-tr2")) == "fovconc-5ch"
    assert model_name(replace(preset("fovavg"), backbone="a.b:c")) == "fovavg with a.b:c"


@pytest.mark.parametrize("name", PRESETS)
def test_a_config_survives_json(name):
    config = PRESETS[name]
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_digests_tell_configs_apart():
    digests = {config.digest() for config in PRESETS.values()}
    assert len(digests) == len(set(PRESETS.values()))
    assert tiny().digest() == tiny().digest() != tiny(seed=1).digest()


def test_settings_are_read_as_what_they_replace():
    changes = {"batch": "8", "learning_rate": "1", "scales": "1,2", "model.batch_norm": "False"}
    changes |= {"model.features": "[3, 5]", "model.scales": "1,4,2", "model.padding": "0.5"}
    config = tiny().changed(changes)
    assert (config.batch, config.learning_rate, config.scales) == (8, 1.0, "1,2")
    assert config.model.batch_norm is False
    assert config.model.features == (3, 5)
    assert config.model.scales == ScaleGrid(1, 4, per_octave=2)
    assert config.model.padding == 0.5


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("epoch", "3", "cannot set 'epoch'; there are"),
        ("model", "cnn", "cannot set 'model'"),
        ("model.colour", "3", "cannot set 'colour'"),
        ("epochs", "many", "epochs must be like 3, got 'many'"),
        ("epochs", "2.5", "epochs must be like 3, got '2.5'"),
        ("epochs", "0", "epochs must be at least 1, got 0"),
        ("batch", "true", "batch must be like 16"),
        ("samples", "-1", "samples must be 0 or more"),
        ("seed", "-1", "seed must be 0 or more"),
        ("data_seed", str(2**40), "data_seed must be 0 or more"),
        ("learning_rate", "NaN", "learning_rate must be above 0"),
        ("learning_rate", "0", "learning_rate must be above 0"),
        ("precision", "fp8", "precision must be float32 or bf16, got 'fp8'"),
        ("border", "odd", "border must be one of"),
        ("scales", "2,huge", "scale must look like 2 or 1-4, got 'huge'"),
        ("model.features", '["a"]', r"features must be like \[4, 8\]"),
        ("model.scales", "1", "low,high,per_octave"),
        ("model.dropout", "1", "dropout must be at least 0 and below 1"),
    ],
)
def test_settings_that_cannot_work(key, value, words):
    with pytest.raises(ConfigError, match=words):
        tiny().changed({key: value})


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

    def watch(config, progress, steps):
        if progress.step:
            states[config.seed].append(torch.get_rng_state().numpy().tobytes())

    train_together([(tiny(seed=seed), tmp_path / str(seed)) for seed in states], watch=watch)
    assert len(set(states[0]) | set(states[1])) == 2 * 3 * STEPS


def test_the_loss_of_an_epoch_is_the_mean_over_its_steps(tmp_path, monkeypatch):
    losses, make = [], loop.make_step

    def recording(*arguments, **options):
        step = make(*arguments, **options)

        def wrapped(inputs, labels):
            losses.append(step(inputs, labels))
            return losses[-1]

        return wrapped

    monkeypatch.setattr(loop, "make_step", recording)
    monkeypatch.setattr(loop, "LOOK_EVERY", 0.0)  # added up after each step, as at a slower pace
    metrics = train(tiny(), tmp_path).metrics()
    means = torch.stack(losses).double().view(3, STEPS).mean(1).tolist()
    assert [entry["loss"] for entry in metrics] == pytest.approx(means, rel=1e-12)


def recorded_batches(config, folder, monkeypatch, stop=None):
    """The labels that each step of a run sees; `stop` is a step at which it is interrupted."""
    seen = []
    make = loop.make_step

    def recording(*arguments, **options):
        step = make(*arguments, **options)

        def wrapped(inputs, labels):
            seen.append(labels.tolist())
            return step(inputs, labels)

        return wrapped

    def watch(config, progress, steps):
        if progress.epoch * steps + progress.step == stop:
            raise KeyboardInterrupt

    monkeypatch.setattr(loop, "make_step", recording)
    train(config, folder, watch=watch)
    return seen


def test_an_epoch_shows_every_sample_once_in_an_order_of_its_own(tmp_path, monkeypatch):
    config = tiny(samples=50, epochs=2)
    seen = recorded_batches(config, tmp_path, monkeypatch)
    assert [len(batch) for batch in seen] == [16, 16, 16, 2] * 2
    first, second = ([label for batch in half for label in batch] for half in (seen[:4], seen[4:]))
    labels = load_source("mnist-5k").train.labels[:50].tolist()
    assert sorted(first) == sorted(second) == sorted(labels)
    assert first != second != labels


def test_the_order_of_images_does_not_depend_on_interruptions(tmp_path, monkeypatch):
    whole = recorded_batches(tiny(), tmp_path / "a", monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        recorded_batches(tiny(), tmp_path / "b", monkeypatch, stop=STEPS + 2)
    rest = recorded_batches(tiny(), tmp_path / "b", monkeypatch)
    assert rest == whole[-len(rest) :]
    assert len(rest) == 2 * STEPS - 2


def test_samples_are_the_first_images():
    source = load_source("mnist-5k")
    data, scales = training_images(source, tiny(samples=30), "train")
    assert torch.equal(data.images, source.train.images[:30])
    assert scales.tolist() == [1.0] * 30
    assert len(training_images(source, tiny(samples=30), "val")[0]) == 500
    assert len(training_images(source, tiny(samples=0), "train")[0]) == 3500


def test_a_range_of_scales_is_drawn_once_for_all_seeds_and_samples():
    config = tiny(scales="1-4", samples=0)
    scales = draw_scales(config, 3500, "train")
    assert 1 <= float(scales.min()) < 1.01 < 3.9 < float(scales.max()) <= 4
    assert torch.equal(scales, draw_scales(replace(config, seed=3), 3500, "train"))
    assert not torch.equal(scales, draw_scales(replace(config, data_seed=3), 3500, "train"))
    few = training_images(load_source("mnist-5k"), replace(config, samples=20), "train")[1]
    assert torch.equal(few, scales[:20])


def test_a_list_of_scales_gives_each_image_one_of_them():
    scales = draw_scales(tiny(scales="1,2,3-4"), 3000, "train")
    shares = [(scales == 1).sum(), (scales == 2).sum(), ((scales >= 3) & (scales <= 4)).sum()]
    assert sum(map(int, shares)) == 3000
    # Each share is binomial with p = 1/3: four standard deviations are 4 sqrt(3000 · 2/9) = 103.
    assert all(abs(int(share) - 1000) < 104 for share in shares)


@pytest.mark.parametrize("scales", ["1-2", "1,2"])
def test_runs_on_several_scales_train(tmp_path, scales):
    assert train(tiny(scales=scales, epochs=1), tmp_path).finished


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


# Data set files


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    digits = load_source("mnist-5k")
    some = [Split(s.images[:90], s.labels[:90]) for s in (digits.train, digits.val, digits.test)]
    source = Source("mnist-5k", *some, classes=digits.classes, checksum="")
    one = ScaleRange(1.5, 1.5)
    return write(FileSpec(train=one, test=one, size=24), source, tmp_path_factory.mktemp("data"))


def test_a_streamed_run_ends_with_the_bits_of_a_resident_one(tmp_path, data_file, monkeypatch):
    config = tiny(source=str(data_file), samples=70)
    resident = weights(train(config, tmp_path / "resident").path)
    taken = []
    pick, read = ScaledFile.pick, ScaledFile.read

    def counting_pick(self, split, chosen):
        taken.append(len(chosen))
        return pick(self, split, chosen)

    def counting_read(self, split, part=slice(None)):
        images, labels = read(self, split, part)
        taken.append(len(images))
        return images, labels

    monkeypatch.setattr(ScaledFile, "pick", counting_pick)
    monkeypatch.setattr(ScaledFile, "read", counting_read)
    monkeypatch.setattr(loop, "CHUNK", 20)
    streamed = weights(train(config, tmp_path / "streamed", stream=True).path)
    assert same_bits(resident, streamed)
    assert max(taken) == 20  # never more at once than a batch, or a chunk of the validation
    assert sum(taken) == 2 + 3 * (70 + 90)  # the first of each split, then each once an epoch


def test_streaming_reads_ahead_by_one_batch_only(data_file):
    net, config = MODEL.build(), tiny()
    file, device = ScaledFile(data_file), torch.device("cpu")
    batches = Streamed(file, "train", net, device, config.precision, 90)
    got = [len(labels) for _, labels in batches(torch.arange(90), 32)]
    assert got == [32, 32, 26]
    assert list(batches(torch.arange(0), 32)) == []


def test_a_config_follows_its_file(data_file):
    config = fitted(tiny(source=str(data_file), size=112), load_source)
    assert (config.size, config.scales, config.border) == (24, "1.5", "replicate")
    assert (config.model.channels, config.model.classes) == (1, 10)


def test_official_names_say_the_scales(data_file, tmp_path):
    import h5py
    import numpy as np

    path = tmp_path / "mnist_large_scale_tr5_vl5_te5_outsize8-8_sctr1p000-4p000_scte1p000-4p000.h5"
    with h5py.File(path, "w") as file:
        for split in ("train", "val", "test"):
            file[f"x_{split}"] = np.zeros((5, 8, 8, 3), np.float32)
            file[f"y_{split}"] = np.arange(5.0)
    config = fitted(tiny(source=str(path)), load_source)
    assert (config.scales, config.size) == ("1-4", 8)
    assert (config.model.channels, config.model.classes) == (3, 5)
    kept = fitted(tiny(source=str(path)), load_source, given={"model.classes"})
    assert kept.model.classes == 10


@pytest.mark.parametrize(
    ("changes", "stream", "words"),
    [
        ({"samples": 4000}, False, "samples=4000, but there are 3500 training images"),
        ({"model": replace(MODEL, classes=3)}, False, "set model.classes=10"),
        ({"model": replace(MODEL, channels=3)}, False, "set model.channels=1"),
        ({"model": replace(MODEL, form="plain")}, False, "set both to one number"),
        ({}, True, "only a data set file"),
        ({"source": "nothing"}, False, "unknown data source"),
        ({"source": "none.h5"}, False, "no such file"),
    ],
)
def test_what_cannot_be_trained_is_said_before(tmp_path, changes, stream, words):
    with pytest.raises(FoveateError, match=words):
        train(tiny(**changes), tmp_path, stream=stream)


def test_files_that_do_not_fit_are_said_before(tmp_path, data_file):
    file = str(data_file)
    with pytest.raises(ConfigError, match="samples=91, but there are 90"):
        train(tiny(source=file, samples=91), tmp_path / "a", stream=True)
    with pytest.raises(ConfigError, match="24 pixels, not 30: set size=24"):
        train(tiny(source=file, samples=0, size=30), tmp_path / "b")
    test_only = write(FileSpec(test=ScaleRange(1, 1), size=24), load_source("mnist-5k"), tmp_path)
    with pytest.raises(DataError, match="holds no train images"):
        train(tiny(source=str(test_only), samples=0), tmp_path / "c", stream=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said():
    with pytest.raises(ConfigError, match="no GPU was found; use --device cpu"):
        train(tiny(), "unused", device="cuda")


def test_a_nonsense_device_is_said():
    with pytest.raises(ConfigError, match="no device is called 'abacus'"):
        train(tiny(), "unused", device="abacus")


# The loss that is no number


def test_a_loss_that_is_no_number_stops_the_run_and_says_where(tmp_path):
    config = tiny(learning_rate=1e30)
    with pytest.raises(FoveateError, match=r"no number in epoch 1, step [2-6]; try a smaller"):
        train(config, tmp_path)
    folder = RunFolder(tmp_path)
    assert not folder.finished and not folder.saved


def test_the_last_good_state_is_kept(tmp_path, monkeypatch):
    whole = trained(tmp_path / "whole")
    rate = TrainConfig.rate
    with monkeypatch.context() as patch:
        patch.setattr(TrainConfig, "rate", lambda self, epoch: 1e30 if epoch else rate(self, 0))
        with pytest.raises(FoveateError, match=r"epoch 2, step \d; the last good state is in"):
            train(tiny(), tmp_path / "run")
    progress, tensors = RunFolder(tmp_path / "run").load()
    assert (progress.epoch, progress.step) == (1, 0)
    assert all(torch.isfinite(tensor).all() for tensor in tensors.values())
    assert same_bits(whole, trained(tmp_path / "run"))


def test_ctrl_c_does_not_save_a_loss_that_is_no_number(tmp_path):
    def watch(config, progress, steps):
        if progress.step == 4:
            raise KeyboardInterrupt

    with pytest.raises(FoveateError, match="the loss is no number"):
        train(tiny(learning_rate=1e30), tmp_path, watch=watch)
    assert not RunFolder(tmp_path).saved


# The fast path and the plain one


def data(count=160):
    split = load_source("mnist-5k").train
    return rescale(split.images[:count], 1.0, size=24), split.labels[:count]


def fast_steps(net, images, labels):
    """Ten steps as the loop does them: prepared once, then the fast form."""
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    step = plain_step(net, optimiser, "float32")
    with torch.no_grad():
        (patches,) = prepare(net, images, "float32")
    for chosen in torch.arange(160).split(16):
        step((patches[chosen],), labels[chosen])


def obvious_steps(net, images, labels):
    """Ten steps as in a textbook: a channel at a time, layer by layer."""
    optimiser = torch.optim.Adam(net.parameters(), lr=3e-3)
    backbone = net.backbone
    for chosen in torch.arange(160).split(16):
        patches = net.patches(images[chosen]).flatten(0, 1)
        logits = backbone.classify(backbone.trunk(patches)).unflatten(0, (16, -1)).mean(1)
        optimiser.zero_grad()
        F.cross_entropy(logits, labels[chosen]).backward()
        optimiser.step()


def twins(dropout, dtype, steps):
    torch.manual_seed(3)
    net = replace(MODEL, dropout=dropout).build()
    images, labels = data()
    nets = []
    for each in steps:
        twin = copy.deepcopy(net).to(dtype)
        torch.manual_seed(4)
        each(twin, images.to(dtype), labels)
        nets.append(twin.state_dict())
    return nets


def test_ten_steps_of_the_fast_path_are_ten_plain_steps_in_float64():
    fast, plain = twins(0.15, torch.float64, [fast_steps, obvious_steps])
    assert applies(MODEL.build().backbone.trunk, data(1)[0])
    for key in plain:
        torch.testing.assert_close(fast[key], plain[key], atol=1e-9, rtol=0)


def test_ten_steps_of_the_fast_path_are_ten_plain_steps_in_float32():
    """Both are roundings of the same steps in float64, and neither may be much farther from them.

    A bound from the rounding of one product would not do: Adam divides a gradient by its size, so
    where a gradient is nearly zero rounding decides its sign, in the plain path too. Biases before
    a batch norm, whose gradient is zero, and the running means that follow them are left out.
    """
    fast, plain = twins(0.0, torch.float32, [fast_steps, obvious_steps])
    (exact,) = twins(0.0, torch.float64, [obvious_steps])
    idle = ("trunk.0.bias", "trunk.3.bias", "running_mean")
    keys = [key for key in exact if not key.endswith((*idle, "num_batches_tracked"))]

    def distance(state):
        return math.sqrt(sum(float(((state[k] - exact[k]) ** 2).sum()) for k in keys))

    moved = math.sqrt(sum(float((exact[k] ** 2).sum()) for k in keys))
    assert distance(plain) < 1e-3 * moved
    assert distance(fast) < 2 * distance(plain)


def test_answers_of_prepared_images_are_the_networks():
    images, _ = data(40)
    for model in (MODEL, replace(MODEL, pool="max"), ModelConfig(form="plain", size=24)):
        net = model.build().eval().double()
        with torch.no_grad():
            prepared = answer(net, prepare(net, images.double(), "float32"))
            torch.testing.assert_close(prepared, net(images.double()), atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_ten_captured_steps_are_ten_plain_steps(compiled):
    """As above: the captured step may not be much farther from float64 than the plain one."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(3)
    start = replace(MODEL, dropout=0.0).build().cuda()
    images, labels = (t.cuda() for t in data())
    (exact,) = twins(0.0, torch.float64, [obvious_steps])

    def run(make):
        net = copy.deepcopy(start)
        rate = torch.tensor(3e-3, device="cuda")
        optimiser = torch.optim.Adam(net.parameters(), lr=rate, fused=True, capturable=True)
        step = make(net, optimiser)
        with torch.no_grad():
            inputs = prepare(net, images, "float32")
        with torch.cuda.stream(torch.cuda.Stream()):
            for chosen in torch.arange(160, device="cuda").split(16):
                step(tuple(t[chosen] for t in inputs), labels[chosen])
        torch.cuda.synchronize()
        return {key: value.cpu() for key, value in net.state_dict().items()}

    plain = run(lambda net, optimiser: plain_step(net, optimiser, "float32"))
    captured = run(lambda net, optimiser: CapturedStep(net, optimiser, "float32", 16, compiled))
    idle = ("trunk.0.bias", "trunk.3.bias", "running_mean", "num_batches_tracked")
    keys = [key for key in exact if not key.endswith(idle)]

    def distance(state):
        return math.sqrt(sum(float(((state[k] - exact[k]) ** 2).sum()) for k in keys))

    assert distance(captured) < 4 * distance(plain)
