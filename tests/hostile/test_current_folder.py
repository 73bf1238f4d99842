"""Modules in the current folder run only if the user names them.

Each trap leaves a mark when it springs, and is shown to spring where nothing holds it back.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from audited_nets import NAMES, export, write_pictures
from PIL import Image
from tiny_runs import AS_TINY
from torch import nn
from traps import NET, PLANT, sprung

import foveate
from foveate.errors import ConfigError
from foveate.trust import ALONE, find_factory

PACKAGE = Path(foveate.__file__).parent
# What Python itself imports for `python -m`, before the first line of foveate.
BEFORE_MAIN = {"collections", "contextlib", "functools", "importlib", "keyword", "operator"}
BEFORE_MAIN |= {"reprlib", "runpy", "types", "warnings"}
OTHERS = ("PIL", "gradio", "h5py", "matplotlib", "numpy", "olefile", "onnx", "onnxruntime")
OTHERS += ("platformdirs", "ray", "rich", "safetensors", "sitecustomize", "tensorboard", "torch")
OTHERS += ("triton", "typer", "usercustomize", "helpers", "foveate_plugins")


@pytest.fixture
def den(tmp_path, monkeypatch):
    """The current folder, with a trap for every module that anything could import."""
    folder = tmp_path / "den"
    folder.mkdir()
    for name in {*sys.stdlib_module_names, *OTHERS} - BEFORE_MAIN:
        (folder / f"{name}.py").write_text(PLANT)
    monkeypatch.chdir(folder)
    return folder


def console(folder):
    """The command as pip installs it: a script in a folder of its own."""
    script = folder.parent / "bin" / "foveate"
    script.parent.mkdir(exist_ok=True)
    script.write_text("from foveate.cli import main\nmain()\n")
    return [sys.executable, str(script)]


def started(*command, path=PACKAGE.parent):
    """Run a command in the current folder, where foveate is installed elsewhere."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(path)}
    environment.pop("PYTHONSAFEPATH", None)
    return subprocess.run(command, env=environment, capture_output=True, text=True)


# Modules in the current folder


@pytest.mark.parametrize("entry", ["foveate", "python -m foveate"])
def test_no_module_of_the_current_folder_runs(den, entry):
    command = console(den) if entry == "foveate" else [sys.executable, "-m", "foveate"]
    (den / "odd.png").write_bytes(b"no picture")  # Pillow tries every plugin on it: olefile
    Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(den / "digit.png")
    done = started(*command, "--help")
    assert done.returncode == 0, done.stderr
    done = started(*command, "predict", "odd.png", "digit.png", "--device", "cpu")
    assert done.returncode == 1 and "cannot read image odd.png" in done.stderr
    assert "digit.png" in done.stdout
    assert sprung(den) == []
    started(sys.executable, "-c", "import olefile, matplotlib, typing")
    assert sprung(den) == ["olefile", "matplotlib", "typing"]  # the traps work


def test_no_module_runs_for_any_command(den, tmp_path):
    """Many commands in one process, its path as the installed command has it."""
    pictures = write_pictures(tmp_path / "pictures", count=12)

    class Small(nn.Module):
        def forward(self, images):
            return images.flatten(1)[:, :10]

    export(Small(), tmp_path / "net.onnx", batch=2)
    source = ["--source", f"folder:{pictures}"]
    names = ",".join(NAMES)
    commands = [
        ["show", "mnist-5k", "--scales", "1", "--samples", "1", "--out", "digits.png"],
        [*AS_TINY, "--epochs", "1", "--out", "made"],
        ["evaluate", "made", "--scales", "1", "--device", "cpu"],
        ["export", "made", "--out", "made.pt2"],
        ["audit", str(tmp_path / "net.onnx"), *source, "--classes", names, "--scales", "1:2:1"],
        ["sweep", str(PACKAGE.parent / "examples" / "study.toml"), "--dry-run"],
        ["reproduce", "table1", "--rows", "cnn", "--dry-run"],
        ["verify", "--help"],
    ]
    code = f"from foveate.cli.app import run\nfor c in {commands!r}: print(run(c))"
    done = started(sys.executable, "-P", "-c", code)
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line in ("0", "1", "2")]
    assert codes == ["0"] * len(commands), done.stderr
    assert sprung(den) == []


CHILDREN = """
import multiprocessing, os, runpy, subprocess, sys
from concurrent.futures import ProcessPoolExecutor
where = "__import__('foveate').__file__"

if __name__ == "__main__":
    sys.path[0], sys.argv[1:] = os.getcwd(), ["--version"]  # as `python -m` has them
    try:
        runpy.run_module("foveate", run_name="__main__")
    except SystemExit:
        print(sys.path.count(os.getcwd()))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", f"print({where})"]
    print(subprocess.run(command, env=environment, text=True, capture_output=True).stdout, end="")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        print(pool.submit(eval, where).result())
"""


def test_a_checkout_that_is_not_installed_finds_itself_and_nothing_else(den, tmp_path):
    """Also in processes that it starts, as torch's compiler and a spawned pool are."""
    (den / "foveate").symlink_to(PACKAGE)
    (tmp_path / "children.py").write_text(CHILDREN)
    done = started(sys.executable, tmp_path / "children.py", path="")
    own = str(den / "foveate" / "__init__.py")
    assert done.stdout.splitlines()[1:] == ["0", own, own], done.stderr
    done = started(sys.executable, "-m", "foveate", "--help", path="")
    assert done.returncode == 0 and "quickstart" in done.stdout
    assert sprung(den) == []


def test_a_path_that_the_user_sets_stays(here):
    (here / "foveate").symlink_to(PACKAGE)
    (here / "bin").mkdir()
    (here / "bin" / "children.py").write_text(CHILDREN)
    done = started(sys.executable, here / "bin" / "children.py", path=here)
    assert done.stdout.splitlines()[1] == "1", done.stderr


def test_workers_of_ray_do_not_get_the_current_folder(den, monkeypatch):
    ray = pytest.importorskip("ray")
    from foveate.sweeps.ray_engine import RayEngine

    seen = []
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda *given, **more: seen.append(os.getcwd()))
    RayEngine()._ray()
    assert seen == [ALONE] and Path.cwd() == den
    assert [path.name for path in Path(ALONE).glob("*.py")] == ["foveate.py"]


# A function that the user names


def test_only_the_named_module_is_found_in_the_current_folder(here):
    (here / "nets_a.py").write_text(NET + "try:\n    import olefile\nexcept ImportError: pass\n")
    (here / "olefile.py").write_text(PLANT)
    paths, finders = list(sys.path), list(sys.meta_path)
    assert find_factory("nets_a:net")(1, 3)[1].out_features == 3
    assert sprung(here) == ["nets_a"]
    assert (sys.path, sys.meta_path) == (paths, finders)
    with pytest.raises(ImportError):
        import olefile  # noqa: F401


def test_installed_packages_come_first(here, monkeypatch):
    (here / "installed").mkdir()
    (here / "installed" / "nets_c.py").write_text(NET)
    for name in ("nets_c", "json"):
        (here / f"{name}.py").write_text(NET.replace("net(", "own("))
    monkeypatch.syspath_prepend(here / "installed")
    assert find_factory("nets_c:net") and find_factory("json:loads") is json.loads
    with pytest.raises(
        ConfigError, match=r"'own' does not exist in 'nets_c' \(.*/installed/nets_c"
    ):
        find_factory("nets_c:own")
    assert sprung(here) == []


@pytest.mark.parametrize("init", [True, False], ids=["package", "namespace"])
def test_a_package_in_the_current_folder_has_its_own_modules(here, init):
    name = f"pkg_{init}".lower()
    (here / name).mkdir()
    (here / name / "nets.py").write_text(
        f"from .sizes import SIZE\nfrom {name} import sizes\n" + NET
    )
    (here / name / "sizes.py").write_text("SIZE = 3\n")
    if init:
        (here / name / "__init__.py").touch()
    assert find_factory(f"{name}.nets:net")(1, 2)[1].out_features == 2
    with pytest.raises(
        ConfigError, match=r"No module named .*; install it, or run from its folder"
    ):
        find_factory(f"{name}.missing:net")


def test_a_neighbour_that_is_not_found_is_explained(here):
    (here / "nets_b.py").write_text("import helpers_b\n")
    (here / "helpers_b.py").write_text(PLANT)
    with pytest.raises(ConfigError) as caught:
        find_factory("nets_b:net")
    said = str(caught.value)
    assert "No module named 'helpers_b'" in said
    assert "where only 'nets_b' is found unless PYTHONPATH=. is set" in said
    assert sprung(here) == []
