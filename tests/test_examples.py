"""The examples run as they are, and say what they should."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def said_by(name, *options, folder):
    command = [sys.executable, str(EXAMPLES / name), *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_digits_of_a_scene_are_classified_at_their_places(tmp_path):
    said = said_by("scene.py", "--epochs", "2", "--out", "scene.png", folder=tmp_path)
    right, of = map(int, re.search(r"(\d+) of (\d+) digits are right", said).groups())
    # Guessing gets one in ten: 4 of 8 by luck has a chance of 1 in 200.
    assert of == 8
    assert right >= 4
    assert (tmp_path / "scene.png").read_bytes().startswith(b"\x89PNG")


def test_a_backbone_of_others_holds_over_three_sizes(tmp_path):
    said = said_by("any_backbone.py", folder=tmp_path)
    right = [int(count) for count in re.findall(r"(\d+) of 64 right", said)]
    assert len(right) == 3
    assert min(right) >= 32  # guessing gets 16 of 64, give or take 3.5
