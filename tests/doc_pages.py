"""The pages of the documentation: their blocks of code, how each is run, and their links."""

import importlib
import re
import runpy
import shlex
import textwrap
from pathlib import Path
from typing import NamedTuple

import typer

from foveate.cli.app import app, run

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = typer.main.get_command(app).commands
SHELL = ("sh", "console")
NOT_EXECUTED_KINDS = ("text", "toml", "yaml")  # written to a file if the first line names one
BLOCK = re.compile(
    r"^(?P<indent> *)(?:<!-- not executed: (?P<reason>[^\n]+) -->\n *)?"
    r"```(?P<kind>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code, its page and line, and the reason if it is not executed."""

    place: str
    kind: str
    code: str
    reason: str | None

    @property
    def file(self):
        """File name in the first line, for a block that is the content of a file."""
        found = re.match(r"# (\w+\.(?:py|toml))$", self.code, re.MULTILINE)
        return found and found[1]

    def commands(self):
        """Arguments of every command of a shell block."""
        lines = self.code.replace("\\\n", " ").splitlines()
        if self.kind == "console":
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        words = (shlex.split(line, comments=True) for line in lines)
        return [line for line in words if line]


def blocks(page):
    text = page.read_text(encoding="utf-8")
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code"))
        code = textwrap.dedent(found["code"])
        yield Block(f"{page.name}, line {line}", found["kind"], code, found["reason"])


def links(page):
    """Targets and anchors of the relative links of a page, code excluded."""
    text = re.sub(r"`[^`\n]*`", "", BLOCK.sub("", page.read_text(encoding="utf-8")))
    for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            yield tuple(target.partition("#")[::2])


def anchors(page):
    """Anchors of the headings of a page, and of the names that mkdocstrings documents on it."""
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.+)$", text, re.MULTILINE)
    slugs = {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", h).strip().lower()) for h in headings}
    return slugs | set(re.findall(r"^::: (\S+)", text, re.MULTILINE))


ALL = [block for page in PAGES for block in blocks(page)]


TINY = {
    "train": "--backbone timm:test_efficientnet --epochs 1 --batch 8 --precision float32 "
    "--set model.size=40 --set recipe.base=56 --device cpu",
    "audit": "--size 64 --samples 3",
}
"""Options with which the commands of photographs.md take seconds on 42 small photographs."""


def shrink_block(block):
    """Return the same block with a tiny backbone and without downloads."""
    code = block.code.replace("tf_efficientnet_lite0", "test_efficientnet")
    code = code.replace(" --pretrained", "").replace("pretrained=True", "pretrained=False")
    if block.kind in SHELL:
        lines = code.replace("\\\n", " ").splitlines()
        code = "\n".join(f"{line} {TINY.get(line.split()[1], '')}" for line in lines)
    return block._replace(code=code)


def run_block(block, names):
    """Run a block in the current folder; Python blocks share `names`."""
    if block.file:
        Path(block.file).write_text(block.code, encoding="utf-8")
        importlib.invalidate_caches()
    elif block.kind == "python":
        exec(compile(block.code, block.place, "exec"), names)  # noqa: S102  (our own pages)
    elif block.kind in SHELL:
        for program, *arguments in block.commands():
            _start(program, arguments, block.place)


def _start(program, arguments, where):
    if program == "python":
        runpy.run_path(arguments[0], run_name="__main__")
        return
    assert program == "foveate", (
        f"{where}: the tests cannot run {program}; add a 'not executed' comment with the reason"
    )
    assert run(arguments) == 0, f"{where}: {arguments}"


def check_command(words):
    """Check the Makefile targets and the options of a command that is not executed."""
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{name}:", makefile, re.MULTILINE) for name in words[1:]), words
    if "foveate" in words:  # also after `torchrun -m`
        name, *arguments = words[words.index("foveate") + 1 :]
        COMMANDS[name].make_context(name, arguments)  # raises for an unknown option
