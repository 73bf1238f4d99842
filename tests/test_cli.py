"""The command line: its output, the files that it writes, and its errors."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from photo_runs import SOURCE

import foveate
from foveate.cli.app import run
from foveate.cli.data import _from_photographs
from foveate.data.store import ScaledFile

GENERATE = ["generate", "mnist-large-scale", "--source", "mnist-5k"]


def test_version(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"foveate {foveate.__version__}\n"


def test_without_a_command_it_shows_the_help(capsys):
    assert run([]) == 0
    assert "generate" in capsys.readouterr().out


def test_generate_writes_the_files_it_names(capsys, tmp_path):
    arguments = [*GENERATE, "--train-scales", "none", "--test-scales", "1,2", "--size", "32"]
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    names = [line.rsplit("/", 1)[1] for line in capsys.readouterr().out.split()]
    assert names == [
        "mnist-5k_large_scale_te1000_outsize32-32_scte1p000.h5",
        "mnist-5k_large_scale_te1000_outsize32-32_scte2p000.h5",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    images, labels = ScaledFile(tmp_path / names[1]).read("test")
    assert images.shape == (1000, 1, 32, 32)
    assert labels.bincount().tolist() == [100] * 10


def test_generate_makes_multi_scale_training_files(capsys, tmp_path):
    arguments = [*GENERATE, "--train-scales", "1-4", "--test-scales", "none", "--size", "16"]
    assert run([*arguments, "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    expected = (
        "mnist-5k_large_scale_tr3500_vl500_te1000_outsize16-16_sctr1p000-4p000_scte1p000-4p000"
    )
    assert path.stem == expected
    assert ScaledFile(path).counts == {"train": 3500, "val": 500, "test": 1000}


def test_show_draws_photographs_of_mixed_sizes_by_their_recipe(capsys, tmp_path):
    pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
    command = ["show", SOURCE, "--scales", "0.5,2", "--samples", "3", "--size", "32"]
    assert run([*command, "--out", str(tmp_path / "photos.png")]) == 0
    assert (tmp_path / "photos.png").read_bytes().startswith(b"\x89PNG")
    (small, large), titles = _from_photographs(SOURCE, 3, "0.5,2", 32, "replicate")
    assert titles == ["0.5", "2"] and small.shape == large.shape == (3, 3, 32, 32)
    _, usual = _from_photographs(SOURCE, 1, None, 32, "replicate")  # those of audit and evaluate
    assert usual == ["0.25", "0.354", "0.5", "0.707", "1", "1.41", "2"]
    # A short side of 8 pixels: the border is replicated on both sides of it, or above and below.
    assert all(min(x[..., :12].std(-1).max(), x[..., :12, :].std(-2).max()) < 1e-6 for x in small)
    assert all(min(x[..., :12].std(-1).max(), x[..., :12, :].std(-2).max()) > 1e-3 for x in large)
    assert run([*command, "--border", "zero"]) == 2
    assert "leave out --border zero" in capsys.readouterr().err


def test_show_needs_memory_for_all_scales_together(capsys, tmp_path, monkeypatch):
    """One scale was checked; the frames of all 17 ended the process."""
    monkeypatch.setattr("foveate.checks.free_memory", lambda: 2.0**30)
    for source, scales in (("mnist-5k", "1:4:2"), (SOURCE, "0.25:1:2")):
        command = ["show", source, "--size", "4096", "--samples", "4", "--scales", scales]
        assert run([*command, "--out", str(tmp_path / "x.png")]) == 2
        assert "the frames of all scales need about" in capsys.readouterr().err


def test_show_draws_a_source_and_a_file(capsys, tmp_path):
    picture = tmp_path / "digits.png"
    assert run(["show", "mnist-5k", "--scales", "1,2", "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    run(
        [
            *GENERATE,
            "--train-scales",
            "none",
            "--test-scales",
            "1",
            "--size",
            "16",
            "--out",
            str(tmp_path),
        ]
    )
    (file,) = tmp_path.glob("*.h5")
    drawing = tmp_path / "file.svg"
    assert run(["show", str(file), "--out", str(drawing)]) == 0
    assert "<svg" in drawing.read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "mnist-large-scale"], "Missing option '--out'"),
        (["nonsense"], "No such command 'nonsense'"),
        (["generate", "cifar", "--out", "x"], "recipe must be mnist-large-scale, got 'cifar'"),
        (
            [*GENERATE, "--train-scales", "0", "--out", "x"],
            "scale must lie between 1/16 and 64, got 0",
        ),
        ([*GENERATE, "--train-scales", "nan", "--out", "x"], "got nan"),
        (
            [*GENERATE, "--train-scales", "-2", "--out", "x"],
            "scale must lie between 1/16 and 64, got -2",
        ),
        ([*GENERATE, "--test-scales", "1e9", "--out", "x"], "got 1e+09"),
        (
            [*GENERATE, "--test-scales", "big", "--out", "x"],
            "scales must look like 0.5,1,2 (a list)",
        ),
        ([*GENERATE, "--size", "0", "--out", "x"], "size must be 1 to 4,096 pixels, got 0"),
        ([*GENERATE, "--border", "odd", "--out", "x"], "border must be one of"),
        (["show", "nothing-like-it"], "nothing-like-it"),
        (["show", "folder:/no/such/folder"], "/no/such/folder"),
        (["show", "no-such-file.h5"], "no such file: no-such-file.h5"),
        (["show", "mnist-5k", "--scales", "1", "--out", "x.exe"], "must end in .png, .svg or .pdf"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(capsys, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert words in err
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_reported_before_anything_is_written(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**6))
    assert run([*GENERATE, "--out", str(tmp_path / "new")]) == 2
    assert "choose another --out or fewer scales" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_debug_shows_the_traceback():
    command = [sys.executable, "-m", "foveate", "--debug", "show", "nothing-like-it"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert "Traceback" in done.stderr


def test_characters_that_the_output_lacks_are_replaced():
    code = "import sys, foveate.cli.app as app, foveate.cli as cli\n"
    code += "app.run = lambda words: print('99 \u00b1 1, caf\\udce9') or 0\ncli.main()"
    for encoding, words in (("ascii", b"99 ? 1, caf?"), ("utf-8:strict", "99 ± 1, caf?".encode())):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert (done.returncode, done.stdout.strip()) == (0, words), done.stderr


def test_output_is_plain_when_it_is_not_a_terminal(tmp_path):
    command = [
        sys.executable,
        "-m",
        "foveate",
        *GENERATE,
        "--train-scales",
        "none",
        "--test-scales",
        "1",
    ]
    done = subprocess.run(
        [*command, "--size", "16", "--out", str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


def test_triton_reports_no_leaks_at_the_exit():
    """Triton 3.9 prints its objects that live at the exit, such as those kept from collection."""
    pytest.importorskip("triton")
    code = "import gc, sys, triton; sys.argv[1:] = ['--version']; import foveate.cli as c; "
    code += "gc.freeze(); c.main()"  # the quickstart freezes after its imports
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.stdout, found.stderr) == (f"foveate {foveate.__version__}\n", "")
