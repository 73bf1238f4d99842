"""The wheel is complete, and it works in an environment that cannot import this checkout.

Only the wheel is installed in that environment. Its dependencies come from the environment of the
tests, because a full installation needs minutes and a network connection. Another test therefore
compares the imports of the package with the dependencies that the wheel declares. A release also
runs tools/check_wheel.sh, which installs the dependencies too.
"""

import ast
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

import foveate
from foveate.models.pretrained import pretrained_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "foveate"
NAMES = {"PIL": "pillow"}  # import names that differ from the package name
LENT = {"triton"}  # installed with torch for GPUs

pytest.importorskip("build")
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """Build the source distribution, and the wheel from it, as a release does."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist):
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return message_from_bytes(archive.read(name))


@pytest.fixture(scope="module")
def bin_folder(wheel, tmp_path_factory):
    """The bin folder of an environment in which only the wheel is installed."""
    home = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin" / "python"
    install = ["--disable-pip-version-check", "install", "-q", "--no-index", "--no-deps"]
    command = [sys.executable, "-m", "pip", "--python", str(python), *install, str(wheel)]
    subprocess.run(command, check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    lent = {sysconfig.get_path(kind) for kind in ("purelib", "platlib")}
    # Python searches the folders in a .pth file last, and ignores .pth files inside them.
    (home / "lib" / version / "site-packages" / "lent.pth").write_text("\n".join(lent))
    return home / "bin"


def run_isolated(folder, program, *arguments):
    """Run a program in an empty folder with a minimal environment; return its output."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [str(program), *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_the_wheel_has_every_file_of_the_package(wheel):
    skipped = ("__pycache__", ".tmp")
    files = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*") if p.is_file()}
    files = {name for name in files if not any(word in name for word in skipped)}
    files |= {f"foveate/published/{p.name}" for p in (ROOT / "results" / "paper").iterdir()}
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == files
    kinds = {Path(name).suffix for name in packed}
    assert {".py", ".c", ".h", ".gz", ".typed"} <= kinds


def test_the_source_distribution_has_every_file_a_wheel_needs(dist):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "tests/test_dist.py"} <= names


def test_the_metadata_of_the_wheel(metadata):
    assert metadata["Name"] == "foveate" and metadata["Version"] == foveate.__version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert "onnx" in metadata.get_all("Provides-Extra")


def imported():
    """Every top-level module that the package imports, with the name of the importing file."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.split(".")[0], path.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield node.module.split(".")[0], path.name


def test_the_wheel_declares_every_package_that_it_imports(metadata):
    lines = [line for line in metadata.get_all("Requires-Dist") if "'dev'" not in line]
    declared = {re.split(r"[^\w-]", line)[0].lower() for line in lines}
    ours = {*sys.stdlib_module_names, "foveate", *LENT}
    for name, file in imported():
        if name not in ours:
            assert NAMES.get(name, name).lower() in declared, f"{file} imports {name}"


def test_it_runs_in_an_empty_environment(bin_folder, tmp_path):
    assert run_isolated(tmp_path, bin_folder / "foveate", "--version") == (
        f"foveate {foveate.__version__}\n"
    )
    assert "foveate quickstart" in run_isolated(tmp_path, bin_folder / "foveate", "--help")
    code = (
        "import foveate; from foveate import create_model, load_source; import torch; "
        "print(foveate.__file__, len(load_source('mnist-5k').train)); "
        "print(*create_model('fovconc').eval()(torch.zeros(1, 1, 112, 112)).shape)"
    )
    place, shape = run_isolated(tmp_path, bin_folder / "python", "-c", code).splitlines()
    assert place.startswith(str(bin_folder.parent)) and place.endswith(" 3500")
    assert shape == "1 10"


def test_its_networks_load_in_an_empty_environment(bin_folder, tmp_path):
    code = (
        "import json, torch; from foveate import create_model; "
        "from foveate.models.pretrained import pretrained_names; "
        "images = torch.zeros(1, 1, 112, 112); "
        "nets = {n: create_model(n, pretrained=True) for n in pretrained_names()}; "
        "print(json.dumps({name: len(net(images)[0]) for name, net in nets.items()}))"
    )
    found = json.loads(run_isolated(tmp_path, bin_folder / "python", "-c", code))
    assert found == dict.fromkeys(pretrained_names(), 10)
