"""The help: quick, without anything heavy, and with an example that works."""

import re
import shlex
import subprocess
import sys

import pytest
import typer

from foveate.cli.app import HELP, app, run

ROOT = typer.main.get_command(app)
COMMANDS = dict(sorted(ROOT.commands.items()))
HEAVY = ("torch", "numpy", "h5py", "PIL", "matplotlib", "safetensors", "jinja2", "onnx")


def example(text):
    """The command line that follows the word Example, as a list of words."""
    (found,) = re.findall(r"^\s*Example: foveate (.*)$", text, re.MULTILINE)
    return shlex.split(found)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_imports_nothing_heavy(command):
    code = (
        "import sys; from foveate.cli.app import run; "
        f"code = run({[*command.split(), '--help']!r}); "
        f"sys.exit(code or ' '.join(set({HEAVY!r}) & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: foveate" in done.stdout


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_shows_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert run([*command.split(), "--help"]) == 0
    assert f"Example: foveate {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_is_a_command_that_can_be_parsed(command):
    name, *arguments = example(COMMANDS[command].callback.__doc__)
    assert name == command
    COMMANDS[command].make_context(command, arguments)  # raises for an unknown option


def test_the_first_example_names_a_command():
    name, *arguments = example(HELP)
    COMMANDS[name].make_context(name, arguments)


def test_paragraphs_are_filled_to_the_width_of_the_terminal(capsys, monkeypatch):
    """A line break of the source inside a sentence is not one of the help."""
    monkeypatch.setenv("COLUMNS", "70")
    assert run(["export", "--help"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("The file maps images"))
    paragraph = lines[start : lines.index("", start)]
    assert min(len(line) for line in paragraph[:-1]) > 50
