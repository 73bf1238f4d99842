"""The examples run as they are, and say what they should."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

EXAMPLES = Path(__file__).parent.parent / "examples"


TESTS = Path(__file__).parent
PHOTOS = (
    "import runpy, sys, torchvision_ops; torchvision_ops.declare_missing(); sys.argv.pop(0); "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
"""Runs an example that needs torchvision beside any build of torch."""


def said_by(name, *options, folder, program=()):
    command = [sys.executable, *program, str(EXAMPLES / name), *options]
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path} if program else None
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_of_a_scene_are_classified_at_their_places(tmp_path):
    said = said_by("scene.py", "--epochs", "2", "--out", "scene.png", folder=tmp_path)
    right, of = map(int, re.search(r"(\d+) of (\d+) predictions are correct", said).groups())
    # Guessing gets one in ten: 4 of 8 by luck has a chance of 1 in 200.
    assert of == 8
    assert right >= 4
    assert (tmp_path / "scene.png").read_bytes().startswith(b"\x89PNG")


def test_a_backbone_of_others_holds_over_three_sizes(tmp_path):
    said = said_by("any_backbone.py", folder=tmp_path)
    right = [int(count) for count in re.findall(r"(\d+) of 64 correct", said)]
    assert len(right) == 3
    assert min(right) >= 32  # guessing gets 16 of 64, give or take 3.5


def test_photographs_of_a_scene_are_found(tmp_path):
    pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
    from photo_runs import PHOTOGRAPHS, photo_config

    from foveate.training.loop import train

    run = train(photo_config(epochs="40", model__pool="max"), tmp_path / "run").path
    options = [str(run), str(PHOTOGRAPHS), "--scenes", "9", "--out", "scenes.png"]
    said = said_by("photo_scene.py", *options, folder=tmp_path, program=("-c", PHOTOS))
    inside, count = map(int, re.search(r"(\d+) of (\d+) searches found", said).groups())
    # A photograph covers an eighth of its scene: 5 of 9 by luck has a chance of 1 in 400.
    assert count == 9
    assert inside >= 5
    with Image.open(tmp_path / "scenes.png") as sheet:
        assert sheet.size == (3 * 120 + 8, 3 * 120 + 8)


def test_a_loop_of_ones_own_is_right_at_sizes_that_training_never_showed(tmp_path):
    pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
    from photo_runs import PHOTOGRAPHS

    for split in ("train", "test"):  # the same photographs: 24 are too few to learn about others
        (tmp_path / split).symlink_to(PHOTOGRAPHS / "train")
    options = ["--backbone", "test_efficientnet", "--weights", "none", "--base", "48"]
    options += ["--patch", "32", "--epochs", "15", "--batch", "4"]
    said = said_by("photographs.py", ".", *options, folder=tmp_path, program=("-c", PHOTOS))
    rows = re.findall(r"^((?: +[\d.]+){4})  % correct, (whole frame|channels): ", said, re.M)
    right = {name: [float(cell) for cell in cells.split()] for cells, name in rows}
    # Guessing gets 33 % of 24; above 60 % by luck has a chance of 1 in 300.
    assert right["whole frame"][2] > 60  # at the training size
    assert min(right["channels"]) > 60
