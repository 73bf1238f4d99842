"""Hundreds of bad command lines: each ends with one line, in time, and without success."""

import pytest

from hostile.cases import COMMANDS, command_case
from hostile.damaged import good_cases

EACH = 75
FEWER = {"audit": 48}


@pytest.mark.parametrize("command", COMMANDS)
def test_bad_command_lines_end_with_one_line(command, problems):
    found = problems(command, range(FEWER.get(command, EACH)))
    assert not found, "\n".join(found)


def test_good_command_lines_succeed(problems):
    found = problems("good", range(len(good_cases())))
    assert not found, "\n".join(found)


def test_the_seed_decides_the_cases():
    assert command_case("train", 7) == command_case("train", 7) != command_case("train", 8)
