"""The first experiment: the same numbers for the same seed, done once, from the package alone."""

import gc
import html
import os
import re
import shlex
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from made_results import made_records, made_winners
from tiny_runs import tiny, weights

from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.errors import ConfigError
from foveate.evaluation.results import read_results
from foveate.models.zoo import ModelConfig
from foveate.paper import quickstart
from foveate.paper.quickstart import count_images, full_size_curves, quick_runs, run_tasks
from foveate.report.quickstart import quick_figure, quick_page
from foveate.sweeps import records
from foveate.training.loop import train

SCALES = (0.5, 1.0, 2.0)
PLAIN = ModelConfig(form="plain", features=(4, 8), size=24, hidden=8)


def tiny_runs(seed=0):
    """Two runs of a second each: a CNN, and a network with two scale channels."""
    common = {"samples": 200, "epochs": 2, "seed": seed, "scales": "1"}
    return {"cnn": tiny(model=PLAIN, **common), "fovavg": tiny(**common)}


def done(folder, seed=0):
    quickstart.train_runs(tiny_runs(seed), folder)
    return quickstart.evaluate_runs(tiny_runs(seed), folder, SCALES)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    return folder, done(folder)


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def quick(monkeypatch):
    """The command, with tiny runs in the place of the real ones."""
    monkeypatch.setattr(quickstart, "quick_runs", tiny_runs)


def test_the_runs_are_the_paper_s_with_a_shortened_schedule():
    runs = quick_runs(seed=3)
    assert list(runs) == ["cnn", "fovavg", "fovmax"]
    for config in runs.values():
        assert (config.source, config.scales, config.seed) == ("mnist-5k", "2", 3)
        # As in the paper the rate is divided by e ten times, if there were no floor.
        assert config.epochs / config.epochs_per_decay == pytest.approx(10)
        assert config.rate(config.epochs - 1) == config.smallest_rate
    assert runs["cnn"].model.size == 112


def test_the_same_seed_gives_the_same_numbers(first, tmp_path):
    _, before = first
    again = done(tmp_path)
    assert [r.scales for r in again] == [r.scales for r in before]
    other = done(tmp_path / "other", seed=1)
    assert [r.scales for r in other] != [r.scales for r in before]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are used on Linux")
def test_processes_train_what_one_thread_trains(two_threads, tmp_path):
    epochs = []
    runs = {name: replace(config, samples=48) for name, config in tiny_runs().items()}
    quickstart.train_runs(runs, tmp_path, lambda name, _, at: epochs.append((name, at.epoch)))
    assert sorted(epochs) == [("cnn", 1), ("cnn", 2), ("fovavg", 1), ("fovavg", 2)]
    torch.set_num_threads(1)
    train(runs["fovavg"], tmp_path / "alone")
    assert_equal_weights(tmp_path / "fovavg", tmp_path / "alone")


def assert_equal_weights(one, other):
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_tasks_run_in_processes_if_each_gets_less_than_two_cores(two_threads, threads):
    torch.set_num_threads(threads)
    sent = []
    run_tasks([lambda send: send((os.getpid(), torch.get_num_threads()))] * 2, sent.append)
    apart = sys.platform == "linux" and threads == 2
    assert len({pid for pid, _ in sent} | {os.getpid()}) == (3 if apart else 1)
    assert [used for _, used in sent] == [1 if apart else threads] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="processes are used on Linux")
def test_a_failed_task_is_left_to_the_caller(two_threads):
    sent = []
    run_tasks([lambda send: 1 / 0, lambda send: send("done")], sent.append)
    assert sent == ["done"]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are used on Linux")
def test_an_interrupt_ends_all_tasks_as_sigterm_does(two_threads, tmp_path):
    def task(send):
        try:
            send("begun")
            time.sleep(60)
        except KeyboardInterrupt:
            (tmp_path / str(os.getpid())).touch()
            raise

    begun = []

    def interrupt_second(message):
        begun.append(message)
        if len(begun) == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        run_tasks([task, task], interrupt_second)
    assert len(list(tmp_path.iterdir())) == 2


def test_finished_runs_are_not_done_again(first, monkeypatch):
    folder, before = first
    kept = weights(folder / "cnn")
    monkeypatch.setattr(quickstart, "accuracy_over_scale", lambda *a, **k: pytest.fail("again"))
    counted = []
    quickstart.train_runs(tiny_runs(), folder)
    again = quickstart.evaluate_runs(tiny_runs(), folder, SCALES, counted.append)
    assert again == before
    assert sum(counted) == count_images(tiny_runs(), SCALES) == 2 * 3 * 1000
    assert weights(folder / "cnn").keys() == kept.keys()


def test_other_scales_are_tested_again(first):
    folder, _ = first
    (cnn, _) = quickstart.evaluate_runs(tiny_runs(), folder, (1.0,))
    assert [at.scale for at in cnn.scales] == [1.0]
    quickstart.evaluate_runs(tiny_runs(), folder, SCALES)


def test_each_run_has_its_results_for_the_demo(first):
    folder, results = first
    assert read_results(folder) == results
    for name, result in zip(tiny_runs(), results, strict=True):
        assert read_results(folder / name) == [result]


def test_only_test_digits_are_scored(first):
    _, results = first
    held_out = load_source("mnist-5k").test.labels.bincount().tolist()
    assert [sum(row) for row in results[0].scales[0].confusion] == held_out


def test_the_command_needs_no_network_and_says_where_all_is(
    quick, no_network, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert run(["quickstart", "--out", "here"]) == 0
    assert gc.isenabled()
    said = capsys.readouterr().out
    for name in ("report.html", "accuracy.png", "accuracy.svg", "accuracy.csv", "results.json"):
        assert f"here/{name}" in said
        assert (tmp_path / "here" / name).stat().st_size > 0
    assert "epoch 2/2" in said
    assert "8.000" in said  # the last of 17 scales
    page = (tmp_path / "here" / "report.html").read_text()
    assert "foveate demo --model here/cnn --model here/fovavg" in page


def test_another_seed_in_the_same_folder_is_refused(first):
    folder, _ = first
    with pytest.raises(ConfigError, match=r"other settings \(seed\); choose another --out"):
        quickstart.train_runs(tiny_runs(seed=1), folder)


def test_the_page_says_what_it_found(first):
    folder, results = first
    page = quick_page(results, full_size_curves(), folder).html()
    low = 100 * min(at.accuracy for at in results[0].scales)  # all three scales are near 1
    assert f"CNN {low:.1f} %" in page
    assert page.count("<svg") == 2  # curves and samples


def test_the_commands_of_the_page_can_be_pasted_if_the_folder_has_spaces(first):
    _, results = first
    page = html.unescape(quick_page(results, full_size_curves(), Path("my runs")).html())
    command = re.search(r"foveate demo (.*)</code>", page)[1]
    paths = [str(Path("my runs", Path(result.run).name)) for result in results]
    assert shlex.split(command)[1::2] == paths
    assert f"--model '{paths[-1]}'" in page


def test_full_size_results_stand_beside_and_are_labelled(first, tmp_path, monkeypatch):
    folder, results = first
    made = made_records(seeds=3)
    records.write_results(tmp_path, made, made_winners(seeds=1))
    monkeypatch.setattr(quickstart, "published_folder", lambda: tmp_path)
    curves = full_size_curves()
    assert [curve.label for curve in curves] == ["CNN", "FovAvg", "FovMax"]
    at_4 = [r.accuracy for r in made if r.row == "cnn-tr2" and r.table == "table1" and r.scale == 4]
    assert curves[0].mean[curves[0].scales.index(4.0)] == pytest.approx(sum(at_4) / len(at_4))
    page = quick_page(results, curves, folder).html()
    assert "FovAvg, full size (%)" in page
    assert "not computed in this run" in page
    own, full = quick_figure(results, curves).axes
    assert (own.get_title(), full.get_title()) == ("this run", "full size (published results)")


@pytest.mark.parametrize("spoil", ["damaged", "of another run"])
def test_results_that_are_not_the_run_s_are_measured_again(first, spoil):
    folder, results = first
    other = (folder / "fovavg" / "results.json").read_text()
    (folder / "cnn" / "results.json").write_text("{" if spoil == "damaged" else other)
    assert quickstart.evaluate_runs(tiny_runs(), folder, SCALES) == results
