"""Hundreds of damaged files: a command that reads one says what is wrong with it in one line."""

import pytest

from hostile.damaged import GROUPS

EACH = 52
FEWER = {"audited pictures": 15, "onnx": 36, "script": 24}  # an audit that ends well takes a second


@pytest.mark.parametrize("group", GROUPS)
def test_damaged_files_are_refused_in_one_line(group, problems):
    found = problems(group, range(FEWER.get(group, EACH)))
    assert not found, "\n".join(found)
