"""One name for one thing: modules and public classes of the package have names of their own."""

import ast
from collections import defaultdict
from pathlib import Path

import foveate

PACKAGE = Path(foveate.__file__).parent
# Modules of cli/ have the names of their commands, and are not compared with the others.
ALLOWED = {
    "__init__": "one in every package",
    "definition": "resampling/ and execution/ each state what their fast forms must equal",
    "quickstart": "its runs in paper/, its page in report/",
    "Job": "in sweeps/ a run; in execution/native/ the C structure of that name",
}


def shared(pairs):
    """The names that stand in several places, with these places."""
    places = defaultdict(list)
    for name, path in pairs:
        places[name].append(str(path.relative_to(PACKAGE)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_no_two_modules_share_a_name():
    paths = [path for path in PACKAGE.rglob("*.py") if path.parent.name != "cli"]
    found = shared((path.stem, path) for path in paths)
    assert found.keys() <= ALLOWED.keys(), found


def test_no_two_public_classes_share_a_name():
    trees = [(path, ast.parse(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")]
    classes = [(n.name, p) for p, t in trees for n in t.body if isinstance(n, ast.ClassDef)]
    found = shared((name, path) for name, path in classes if not name.startswith("_"))
    assert found.keys() <= ALLOWED.keys(), found
