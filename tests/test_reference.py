"""The reference: which names it lists, what each docstring says, and that the examples run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
from doc_pages import ROOT

import foveate

LISTED = [
    name
    for page in sorted((ROOT / "docs" / "api").glob("*.md"))
    for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
]
SECTIONS = r"^(Args|Attributes|Shape|Returns|Yields|Raises|Examples|Note|Warning):$"


def found(path):
    """The object that a dotted path names: a module, or something in one."""
    for cut in range(path.count(".") + 1):
        parts = path.rsplit(".", cut)
        try:
            thing = importlib.import_module(parts[0])
        except ModuleNotFoundError:
            continue
        for part in parts[1:]:
            thing = getattr(thing, part)
        return thing
    raise AssertionError(f"no such name: {path}")


def sections(thing):
    """The sections of a docstring by title."""
    text = inspect.getdoc(thing) or ""
    pieces = re.split(SECTIONS, text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def described(section):
    """The names that a section describes: those at its indentation, before a colon."""
    return set(re.findall(r"^    \*{0,2}(\w+):", section, re.MULTILINE))


def parameters(thing):
    """The names of the parameters that a caller gives."""
    try:
        names = inspect.signature(thing).parameters.values()
    except ValueError:  # an exception class has none
        return set()
    return {p.name for p in names if p.name not in ("self", "cls") and p.name[0] != "_"}


def methods(thing):
    """The public methods that a class itself defines."""
    for name, member in vars(thing).items():
        function = getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def assert_complete(function, name):
    told = sections(function)
    given = parameters(function)
    assert described(told.get("Args", "")) == given, f"{name}: Args should describe {given}"
    returned = inspect.signature(function).return_annotation
    if returned not in (None, "None", inspect.Signature.empty):
        assert "Returns" in told or "Yields" in told, f"{name}: no Returns"


@pytest.mark.parametrize("path", LISTED)
def test_docstrings_say_what_a_caller_needs(path):
    thing = found(path)
    if inspect.ismodule(thing) or (inspect.isclass(thing) and issubclass(thing, Exception)):
        assert inspect.getdoc(thing)
        return
    told = sections(thing)
    assert ">>>" in told.get("Examples", ""), f"{path}: no Examples"
    if not inspect.isclass(thing):
        assert_complete(thing, path)
        return
    fields = described(told.get("Args", "")) | described(told.get("Attributes", ""))
    assert fields >= parameters(thing), f"{path}: not described: {parameters(thing) - fields}"
    for name, method in methods(thing):
        assert_complete(method, f"{path}.{name}")


def test_every_public_name_is_listed_once():
    assert len(set(LISTED)) == len(LISTED)
    listed = [found(path) for path in LISTED]
    for name in foveate.__all__:
        assert any(getattr(foveate, name) is thing for thing in listed), name


def with_examples():
    """The modules that have an example in a docstring."""
    root = Path(foveate.__file__).parent
    for path in root.rglob("*.py"):
        if ">>> " in path.read_text(encoding="utf-8"):
            yield ".".join(path.relative_to(root.parent).with_suffix("").parts)


@pytest.mark.parametrize("name", sorted(with_examples()))
def test_examples_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=options, verbose=False)
    assert result.attempted and not result.failed


def test_no_private_name_is_listed():
    assert not [path for path in LISTED if re.search(r"\b_", path)]
