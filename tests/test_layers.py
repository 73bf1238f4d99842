"""Imports point one way, and importing the package does nothing heavy."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import foveate
from foveate.execution.plan import PLANS

PACKAGE = Path(foveate.__file__).parent
PACKAGES = [  # in the order of the page; a module may import from its own package and earlier ones
    re.findall(r"`(\w+)`", row.split("|")[1])
    for row in (PACKAGE.parent / "docs" / "architecture.md").read_text().splitlines()
    if row.startswith("| `")
][:12]
RANK = {name: rank for rank, names in enumerate(PACKAGES) for name in names}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foveate"):
            yield node.module
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("foveate"))


def package(module):
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def test_the_page_has_every_package_once():
    packages = [package for row in PACKAGES for package in row]
    there = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    there -= {"__init__", "__pycache__", "alone"}  # `alone` is put on the path of other processes
    assert sorted(packages) == sorted(there)


def test_the_page_has_every_plan():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    named = re.findall(r"^\| `(\w+)` \|", page.partition("## Execution plans")[2], re.MULTILINE)
    assert named == [*(plan.__name__.rpartition(".")[2] for plan in PLANS["cuda"]), "definition"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.name))
def test_imports_point_only_to_earlier_packages(path):
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for module in imports(path):
        other = package(module)
        if other is not None:
            assert RANK[other] <= RANK[own], f"{own} may not import {module}"


def unsafe_calls(code):
    """Yield the calls and imports that could run code from a file."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("eval", "exec", "torch.load"):
            yield ast.unparse(node)
        if isinstance(node, ast.Import) and any(alias.name == "pickle" for alias in node.names):
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module == "pickle":
            yield ast.unparse(node)


def test_no_pickle_no_torch_load_no_eval():
    for line in ("import pickle as p", "from pickle import load", "eval('1')", "torch.load(path)"):
        assert list(unsafe_calls(line)) == [line]
    assert not list(unsafe_calls("net.eval()"))
    for path in PACKAGE.rglob("*.py"):
        assert not list(unsafe_calls(path.read_text())), path


@pytest.mark.parametrize("command", ["--help", "--version", "generate --help"])
def test_help_does_not_import_torch(command):
    code = (
        "import sys; from foveate.cli.app import run; "
        f"run({command.split()!r}); sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
