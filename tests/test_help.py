"""The help: fast to print, readable at 80 columns, with examples and options that agree."""

import os
import re
import shlex
import subprocess
import sys
import typing
from collections import defaultdict

import pytest
import typer

from foveate.cli import options
from foveate.cli.app import HELP, app, run
from foveate.data.sources import SOURCES
from foveate.models.pretrained import pretrained_names
from foveate.models.zoo import ZOO

ROOT = typer.main.get_command(app)
COMMANDS = dict(sorted(ROOT.commands.items()))
HEAVY = ("torch", "numpy", "h5py", "PIL", "matplotlib", "safetensors", "jinja2", "onnx")
TEXTS = {"": HELP} | {name: command.callback.__doc__ for name, command in COMMANDS.items()}


def examples(text):
    """The command lines in the code block of a help text, as lists of words."""
    (block,) = re.findall(r"^ *```\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for line in block.splitlines()]


def options_of(command):
    return [p for p in COMMANDS[command].params if p.param_type_name == "option"]


def printed(command, columns, capsys, monkeypatch):
    """The lines of a help on a terminal of that width."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run([*command.split(), "--help"]) == 0
    return capsys.readouterr().out.splitlines()


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


@pytest.mark.parametrize("command", TEXTS)
def test_examples_can_be_parsed(command):
    lines = examples(TEXTS[command])
    assert 1 <= len(lines) <= 3
    for words in lines:
        name, *arguments = words[words.index("foveate") + 1 :]  # also after `torchrun -m`
        assert name == (command or name)
        COMMANDS[name].make_context(name, arguments)  # raises for an unknown option


@pytest.mark.parametrize("command", TEXTS)
def test_help_fits_80_columns(command, capsys, monkeypatch):
    lines = printed(command, 80, capsys, monkeypatch)
    assert max(map(len, lines)) <= 80
    shown = [line.strip() for line in lines]
    for words in examples(TEXTS[command]):  # each on one line, so that it can be copied
        assert shlex.join(words).replace("'", "") in [line.replace("'", "") for line in shown]
    assert "…" not in "".join(lines)  # nothing is truncated
    text = " ".join(re.sub(r"[│╭╮╰╯─]", " ", " ".join(lines)).split())
    for option in options_of(command) if command else ():
        assert option.opts[0] in text
        assert option.help.endswith(".") and option.help.split()[0] in text


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_grouped(command, capsys, monkeypatch):
    text = "\n".join(printed(command, 80, capsys, monkeypatch))
    for option in options_of(command):
        assert f"─ {option.rich_help_panel} ─" in text
    assert "─ Options ─" not in text  # a panel of --help alone
    assert "<bool>" not in text and "BOOLEAN" not in text


def test_paragraphs_are_filled_to_the_width_of_the_terminal(capsys, monkeypatch):
    """A line break of the source inside a sentence is not one of the help."""
    lines = [line.strip() for line in printed("export", 70, capsys, monkeypatch)]
    start = next(i for i, line in enumerate(lines) if line.startswith("The exported model maps"))
    paragraph = lines[start : lines.index("", start)]
    assert min(len(line) for line in paragraph[:-1]) > 50


def test_an_option_means_the_same_in_every_command():
    """One name, one help text and placeholder; two kinds of three options are known."""
    found = defaultdict(set)
    for command in COMMANDS:
        for option in options_of(command):
            found[option.opts[0]].add((option.metavar, option.help, tuple(option.secondary_opts)))
            assert len(option.opts) == 1, f"{command} {option.opts}: one name is enough"
    different = {name: kinds for name, kinds in found.items() if len(kinds) > 1}
    # A folder or a file; of the frame or of the image; of the command or of one data set.
    assert set(different) == {"--out", "--border", "--source"}
    assert {metavar for metavar, *_ in different["--out"]} == {"DIR", "FILE"}
    assert len(different["--border"]) == 2
    assert {metavar for metavar, *_ in different["--source"]} == {"SOURCE", "NAME=SOURCE"}


def test_names_do_not_depend_on_the_version_of_typer():
    """Typer 0.27 names an option after its placeholder if they differ only in case."""
    stated = 0
    for registered in app.registered_commands:
        hints = typing.get_type_hints(registered.callback, include_extras=True)
        for name, hint in hints.items():
            for option in getattr(hint, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo):
                    alike = (option.metavar or "").lower() == name
                    stated += alike  # in an annotation, the first argument is the name
                    assert option.default == f"--{name}" or not alike, (registered.callback, name)
    assert stated > 30


def test_one_idea_has_one_name():
    """No command offers an old or a second spelling of a shared option."""
    names = {option.opts[0] for command in COMMANDS for option in options_of(command)}
    assert not names & {"--output", "--plan", "--limit", "--train", "--test"}


def test_numbers_name_their_unit():
    """A default that is a number has its unit in the help or in the default."""
    units = r"pixels|images|image|scale|epochs|seed|[Rr]uns|workers|channels|[Pp]ort"
    for command in COMMANDS:
        for option in options_of(command):
            if re.fullmatch(r"\(?[\d.]+\)?.*", str(option.default or option.show_default)):
                about = f"{option.help} {option.show_default} {option.metavar}"
                assert re.search(units, about, re.IGNORECASE) or option.opts[0] in (
                    "--mean", "--std", "--host",
                ), (command, option.opts)  # fmt: skip


# Shell completion


def completed(*words):
    """What a shell offers for the last of these words."""
    line = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", "from foveate.cli import main; main()"],
        env={**os.environ, **line, "_FOVEATE_COMPLETE": "complete_bash"},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_a_shell_completes_commands_options_and_values():
    assert completed("foveate", "re") == ["reproduce", "report"]
    assert completed("foveate", "train", "fovmax", "--prec") == ["--precision"]
    assert completed("foveate", "train", "fovmax", "--source", "mn") == ["mnist", "mnist-5k"]
    assert completed("foveate", "train", "f") == ["fovmax", "fovavg", "fovconc", "finetune"]
    assert "fovmax" in completed("foveate", "export", "fovmax")
    assert "fovmax" not in completed("foveate", "demo", "--model", "fovmax")  # refused: untrained
    assert completed("foveate", "predict", "a.png", "--model", "swmax-mnist-tr1") == [
        "swmax-mnist-tr1",
        "swmax-mnist-tr14",
    ]


@pytest.mark.parametrize("command", ["evaluate", "compare", "audit"])
def test_a_shell_completes_values_that_the_command_accepts(command):
    more = command == "audit"
    assert completed("foveate", command, "--split", "t") == ["test", *["train"] * more]
    if command != "compare":
        assert completed("foveate", command, "--pool", "n") == ["none"] * more


def test_the_script_for_a_shell_is_printed():
    code = "import sys; from foveate.cli.app import run; run(['--show-completion', 'bash'])"
    undetected = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # the shell is named
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | undetected, capture_output=True, text=True
    )
    assert done.returncode == 0 and "_FOVEATE_COMPLETE=complete_bash" in done.stdout


def test_completed_names_are_those_of_the_registries():
    assert set(options.NETWORKS) == set(ZOO)
    fixed = {re.sub(r"(DIR|FILE)$", "", name) for name in SOURCES if name != "FILE.h5"}
    assert set(options.SOURCES) == fixed
    assert set(options.TRAINED) == set(pretrained_names())
