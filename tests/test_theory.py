"""The theory: every statement holds, every wrong op is noticed, and the document names it all."""

import ast
import json
import re
from functools import cache, partial
from pathlib import Path

import pytest
import scale_space_statements
import torch
import typer
from formula_statements import filter_duality, kernel_scaling
from scale_space_statements import (
    channel_derivatives,
    density_order,
    resolution_order,
    scale_selection,
)
from typer.testing import CliRunner

from foveate.cli.paper import verify as command
from foveate.evaluation import theory
from foveate.evaluation.theory import Finding, covariance, verify
from foveate.evaluation.theory.covariance import (
    CASES,
    scale_covariance,
    shifted_maps,
    translation_covariance,
    translation_per_channel,
)
from foveate.evaluation.theory.scale_invariance import local_invariance, pooled_invariance
from foveate.models import channels
from foveate.resampling import foveate

HERE = Path(__file__).parent
SCALE_SPACE = (channel_derivatives, scale_selection, resolution_order, density_order)
STATEMENTS = (*theory.STATEMENTS, filter_duality, kernel_scaling, *SCALE_SPACE)
DOCUMENT = HERE.parent / "docs" / "theory.md"
COUNTS = {  # of findings
    "scale_covariance": 7, "translation_covariance": 3, "shifted_maps": 2,
    "translation_per_channel": 2, "pooled_invariance": 6, "local_invariance": 2,
    "invariance_ends": 2, "filter_duality": 2, "kernel_scaling": 3, "channel_derivatives": 1,
    "scale_selection": 3, "resolution_order": 1, "density_order": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    with theory.cpu_threads(1):
        yield


@cache
def findings(statement, seed):
    return statement(seed)


# --- the statements -----------------------------------------------------------------------------


@pytest.mark.parametrize("statement", STATEMENTS, ids=lambda s: s.__name__)
def test_statement_holds(statement):
    for seed in range(3):
        found = findings(statement, seed)
        assert len(found) == COUNTS[statement.__name__]
        for finding in found:
            assert finding.holds, (seed, finding)
            assert finding.breaks == finding.statement.startswith("breaks: ")


def test_every_statement_is_measured_and_has_a_name():
    names = [f.statement for statement in STATEMENTS for f in findings(statement, 0)]
    assert len(names) == len(set(names)) == 35


# --- wrong ops ----------------------------------------------------------------------------------


def wrong_centre(op, images, scales, size, *, centres=None, **options):
    middle = torch.tensor(images.shape[-2:]).double().expand(len(images), 2) / 2
    centres = (middle if centres is None else centres) + 0.5
    return op(images, scales, size, centres=centres, **options)


def inverted_scale(op, images, scales, size, **options):
    return op(images, [1 / scale for scale in reversed(scales)], size, **options).flip(1)


def swapped_axes(op, *arguments, **options):
    return op(*arguments, **options).mT


def swapped_centres(op, *arguments, centres=None, **options):
    return op(*arguments, centres=None if centres is None else centres.flip(1), **options)


def wrong_sign(op, images, *arguments, centres=None, **options):
    size = torch.tensor(images.shape[-2:])
    mirrored = None if centres is None else size - centres
    return op(images, *arguments, centres=mirrored, **options)


def broken(monkeypatch, mutant, statement, *arguments):
    """The statements that no longer hold when the op is replaced by a wrong one."""
    for user in (channels, covariance, scale_space_statements):
        monkeypatch.setattr(user, "foveate", partial(mutant, foveate))
    return {f.statement for f in statement(0, *arguments) if not f.holds}


LAST = CASES[-1:]
CATCHES = [
    (wrong_centre, scale_covariance, "scale covariance: patches", LAST),
    (wrong_centre, channel_derivatives, "Gaussian derivative in channel s: that of scale s"),
    (wrong_centre, resolution_order, "error falls with the pixel size squared"),
    (wrong_centre, pooled_invariance, "scale invariance: max pooling"),
    (inverted_scale, scale_covariance, "scale covariance: logits", LAST),
    (inverted_scale, channel_derivatives, "Gaussian derivative in channel s: that of scale s"),
    (inverted_scale, scale_selection, "scale selection: peak at the scale of the blob"),
    (inverted_scale, translation_per_channel, "translation by d: channel 2.38 shifts by d / 2.38"),
    (swapped_axes, shifted_maps, "scaling + translation: feature maps shift"),
    (swapped_axes, translation_per_channel, "translation by d: channel 2.38 shifts by d / 2.38"),
    (swapped_axes, channel_derivatives, "Gaussian derivative in channel s: that of scale s"),
    (swapped_centres, translation_covariance, "scaling + translation: logits about any point"),
    (swapped_centres, local_invariance, "local invariance: response about x0"),
    (wrong_sign, translation_covariance, "scaling + translation: logits about any point"),
    (wrong_sign, local_invariance, "local invariance: response about x0"),
]


@pytest.mark.parametrize("case", CATCHES, ids=lambda c: f"{c[0].__name__}-{c[1].__name__}")
def test_a_wrong_op_is_noticed(monkeypatch, case):
    mutant, statement, name, *arguments = case
    assert name in broken(monkeypatch, mutant, statement, *arguments)


def test_scaling_alone_is_blind_to_swapped_axes(monkeypatch):
    assert not broken(monkeypatch, swapped_axes, scale_covariance, LAST)


# --- the command and the document ---------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    app = typer.Typer()
    app.command()(command)

    def invoke(*arguments, chosen=(filter_duality, kernel_scaling)):
        monkeypatch.setattr(theory, "STATEMENTS", chosen)
        return CliRunner().invoke(app, list(arguments))

    return invoke


def wrong_statement(seed):
    return [Finding(statement="up is down", error=2.0, bound=1.0, note="")]


def test_the_command_prints_a_table(run):
    result = run("--seed", "1")
    assert result.exit_code == 0
    assert re.search(r"duality in 1-D\S* .*e-\d\d  ≤ \d\.\d\de-\d\d  holds", result.stdout)
    assert "5 of 5 statements hold" in result.stdout


def test_the_command_fails_when_a_statement_does(run):
    result = run(chosen=(wrong_statement, filter_duality))
    assert result.exit_code == 1
    assert re.search(r"up is down +2.00e\+00  ≤ 1.00e\+00  FAILS", result.stdout)
    assert "2 of 3 statements" in result.stdout


def test_the_command_prints_json(run):
    result = run("--json", chosen=(wrong_statement,))
    assert result.exit_code == 1
    (finding,) = json.loads(result.stdout)
    assert (finding["statement"], finding["holds"]) == ("up is down", False)


def test_the_help_has_an_example(run):
    assert "foveate verify --seed 1 --json" in run("--help").stdout


def test_the_number_of_threads_is_as_before(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(theory, "STATEMENTS", ())
    assert verify() == []
    assert torch.get_num_threads() == 2


def functions_in(name):
    tree = ast.parse((HERE / name).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_document_names_the_test_of_every_statement_and_each_exists():
    text = DOCUMENT.read_text(encoding="utf-8")
    named = set(re.findall(r"tests/(test_\w+\.py)::(test_\w+)", text))
    for file, test in named:
        assert test in functions_in(file), f"docs/theory.md names {test}, not found in {file}"
    shown = set(re.findall(r"test_theory\.py::test_statement_holds\[(\w+)\]", text))
    assert shown == {statement.__name__ for statement in STATEMENTS}
