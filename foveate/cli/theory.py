"""The command about the theory: verify."""

from json import dumps
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli.console import OUTPUT, progress

if TYPE_CHECKING:
    from rich.table import Table

    from foveate.evaluation.theory import Finding

LARGEST_SEED = 2**32 - 1


def verify(
    seed: Annotated[
        int, typer.Option(min=0, max=LARGEST_SEED, help="Seed of the images and weights.")
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Measure covariance and invariance and compare each error with its derived bound.

    Example: foveate verify

    The exit code is 0 if every statement holds, and 1 if not. Some statements say that
    invariance must break: their error has to exceed the bound.
    """
    from foveate.evaluation.theory import statements

    with progress("statements", len(statements.STATEMENTS)) as advance:
        findings = statements.verify(seed, advance)
    held = sum(finding.holds for finding in findings)
    if json:
        print(dumps([finding.to_dict() for finding in findings], indent=2, allow_nan=False))
    else:
        OUTPUT.print(_table(findings))
        OUTPUT.print(f"{held} of {len(findings)} statements are as the theory says")
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
