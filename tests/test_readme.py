"""What the README says works: its Python runs, its commands run, its links lead somewhere."""

import re
import runpy
import shlex
from pathlib import Path

import pytest

from foveate.cli.app import run

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", README, re.DOTALL)


def commands(program):
    lines = "".join(blocks("sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(program)]


def test_the_python_runs(tmp_path):
    script = tmp_path / "readme.py"
    script.write_text("".join(blocks("python")))
    names = runpy.run_path(str(script))
    assert names["logits"].shape == (2, 5)
    assert names["answers"].shape == (2, 17, 5)
    assert names["scales"].shape == (2,)


def test_the_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert len(commands("foveate")) >= 5
    for arguments in commands("foveate"):
        assert run(arguments) == 0, (arguments, capsys.readouterr().err)


def test_make_knows_its_targets():
    makefile = (ROOT / "Makefile").read_text()
    for (target,) in commands("make"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
