"""The command that verifies the theory: verify."""

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress
from foveate.cli.options import SEED, JsonOption

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.evaluation.theory import Finding

LARGEST_SEED = 2**32 - 1


def verify(
    seed: Annotated[int, SEED(min=0, max=LARGEST_SEED)] = 0,
    json: JsonOption = False,
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
    from foveate.evaluation.theory import statements

    with progress("statements", len(statements.STATEMENTS)) as advance:
        findings = statements.verify(seed, advance)
    held = sum(finding.holds for finding in findings)
    if json:
        print(dumps([finding.to_dict() for finding in findings], indent=2, allow_nan=False))
    else:
        OUTPUT.print(_table(findings))
        OUTPUT.print(f"{held} of {len(findings)} statements hold")
    if held < len(findings):
        raise typer.Exit(1)


def _table(findings: "list[Finding]") -> "Table":
    from rich.table import Table

    table = Table("statement", box=None, pad_edge=False, header_style="bold")
    for title in ("error", "bound"):
        table.add_column(title, justify="right")
    table.add_column("verdict")
    for finding in findings:
        relation = ">" if finding.breaks else "≤"
        verdict = "[green]holds[/]" if finding.holds else "[bold red]FAILS[/]"
        bound = f"{relation} {finding.bound:.2e}"
        table.add_row(finding.statement, f"{finding.error:.2e}", bound, verdict)
    return table
