"""Progress of the commands: none for short ones, lines in a log, a bar on a terminal."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from foveate.cli import console


@pytest.fixture
def clock(monkeypatch):
    """A clock in seconds that a test advances."""
    now = [1000.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then(clock, capsys):
    with console.progress("images", 4000) as advance:
        for _ in range(39):
            clock[0] += 10
            advance(100)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "images: 300 of 4,000 (7 %), about 0:06:10 remaining"
    assert lines[1] == "images: 600 of 4,000 (15 %), about 0:05:40 remaining"
    assert len(lines) == 13


def test_short_work_leaves_no_line(clock, capsys):
    with console.progress("images", 1000) as advance:
        for _ in range(29):
            clock[0] += 1
            advance(30)
        clock[0] += 30
        advance(130)  # finished: no line with a remaining time
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_a_bar(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(console, "ERRORS", Console(file=shown, force_terminal=True, width=80))
    with console.progress("images", 10) as advance:
        advance(10)
    assert "10/10" in shown.getvalue() and "about" not in shown.getvalue()


def test_a_narrow_table_keeps_the_ends_of_long_names(monkeypatch, capsys):
    """Runs often differ in the end of their names only."""
    monkeypatch.setattr(console.OUTPUT, "width", 40)
    names = [f"/home/me/experiments/of_a_year/run_number_{k}" for k in range(2)]
    console.print_table(["scale", *names], [["0.500", "25.00", "26.00"]])
    columns = zip(*(line[7:].split() for line in capsys.readouterr().out.splitlines()), strict=True)
    assert ["".join(column[:-1]) for column in columns] == names


def test_control_characters_are_printed_as_escapes(capsys):
    """A file or class name could otherwise rename, clear or overwrite the terminal."""
    name = "a\x1b]0;title\x07\x9b2J\x7f.jpg"
    shown = r"a\x1b]0;title\x07\x9b2J\x7f.jpg"
    console.OUTPUT.print(name, Path(name), sep="\n")
    console.print_message(name)
    console.print_error(f"cannot read {name}")
    console.print_table([name], [[name]])
    found = capsys.readouterr()
    assert found.err == f"{shown}\nerror: cannot read {shown}\n"
    assert [line.strip() for line in found.out.splitlines()] == 4 * [shown]
