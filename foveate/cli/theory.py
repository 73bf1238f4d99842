"""The command that verifies the theory: verify."""

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli import options
from foveate.cli.console import OUTPUT, print_table, progress

if TYPE_CHECKING:
    from foveate.evaluation.theory import Finding

LARGEST_SEED = 2**32 - 1


def verify(
    seed: Annotated[int, options.SEED(min=0, max=LARGEST_SEED)] = 0,
    json: options.JsonOption = False,
) -> None:
    """Measure scale covariance and invariance, and compare each error with its bound.

    ```
    foveate verify
    foveate verify --seed 1 --json
    ```

    Each bound is derived from the theory. The exit code is 0 if every statement holds, and 1
    otherwise. Some statements describe where invariance must break: there the error must exceed
    the bound. The random seed determines the images and the weights.
    """
    from foveate.evaluation import theory

    with progress("statements", len(theory.STATEMENTS)) as advance:
        findings = theory.verify(seed, advance)
    held = sum(finding.holds for finding in findings)
    if json:
        print(dumps([finding.to_dict() for finding in findings], indent=2, allow_nan=False))
    else:
        _print_findings(findings)
        OUTPUT.print(f"{held} of {len(findings)} statements hold")
    if held < len(findings):
        raise typer.Exit(1)


def _print_findings(findings: "list[Finding]") -> None:
    from rich.text import Text

    rows = []
    for finding in findings:
        bound = f"{'>' if finding.breaks else '≤'} {finding.bound:.2e}"
        verdict = Text("holds", "green") if finding.holds else Text("FAILS", "bold red")
        rows.append((finding.statement, f"{finding.error:.2e}", bound, verdict))
    headers = ("statement", "error", "bound", "verdict")
    print_table(headers, rows, left=("statement", "verdict"))
