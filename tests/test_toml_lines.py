"""Where a key stands in a TOML file, through tables, arrays of them, dotted keys and comments."""

import ast

import pytest

from foveate.sweeps.toml_lines import read_toml

MARKED = '''# a comment = 1
name = "a = b"                #: ("name",)
dotted.key = 1                #: ("dotted", "key")
"quoted.key" = 2              #: ("quoted.key",)
text = """                    #: ("text",)
[table]
inside = 1
"""
lists = [                     #: ("lists",)
    # [comment]
    "[no.table]",
    [1, 2],
]

[table]                       #: ("table",)
key = { a = 1, b.c = 2 }      #: ("table", "key", "b", "c")
[table.inner]                 #: ("table", "inner")
key = 1                       #: ("table", "inner", "key")
[[runs]]                      #: ("runs", 0)
  preset = 'cnn'              #: ("runs", 0, "preset")
  model.dropout = 0           #: ("runs", 0, "model", "dropout")
[[ runs ]]                    #: ("runs", 1)
# key = 1
key = 3                       #: ("runs", 1, "key")
[runs.model]                  #: ("runs", 1, "model")
dropout = 1                   #: ("runs", 1, "model", "dropout")
[[runs.deep]]                 #: ("runs", 1, "deep", 0)
[[runs.deep]]                 #: ("runs", 1, "deep", 1)
key = 1                       #: ("runs", 1, "deep", 1, "key")
[[runs]]                      #: ("runs", 2)
[last]                        #: ("last",)
'''


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_every_key_is_found_in_its_line(tmp_path, end):
    path = tmp_path / "marked.toml"
    path.write_bytes(MARKED.replace("\n", end).encode())
    file = read_toml(path)
    marks = [line.partition("#: ")[2] for line in MARKED.splitlines()]
    expected = {ast.literal_eval(mark): n for n, mark in enumerate(marks, 1) if mark}
    assert len(expected) == 21
    assert {keys: file.line(keys) for keys in expected} == expected
    assert file.line(("runs", 1, "no such key")) == expected["runs", 1]
    assert file.line(("no such key",)) == 1


def test_the_lines_are_those_of_the_values(tmp_path):
    """Every way that has a line leads to a value."""
    (tmp_path / "marked.toml").write_text(MARKED)
    file = read_toml(tmp_path / "marked.toml")
    for keys in file.lines:
        value = file.values
        for key in keys:
            value = value[key]
