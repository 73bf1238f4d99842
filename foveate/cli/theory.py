"""The command about the theory: verify."""

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
    """Measure every statement of the theory, and hold each error against its derived bound.

    Example: foveate verify

    The exit code is 0 if all is as the theory says, and 1 if not. Some statements say that
    invariance must break: there the error has to exceed the bound.
    """
    from foveate.evaluation.theory.run import STATEMENTS
    from foveate.evaluation.theory.run import verify as measure

    with progress("statements", len(STATEMENTS)) as advance:
        findings = measure(seed, advance)
    if json:
        _print_json(findings)
    else:
        OUTPUT.print(_table(findings))
        OUTPUT.print(_summary(findings))
    if not all(finding.holds for finding in findings):
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


def _summary(findings: "list[Finding]") -> str:
    held = sum(finding.holds for finding in findings)
    return f"{held} of {len(findings)} statements are as the theory says"


def _print_json(findings: "list[Finding]") -> None:
    import json

    print(json.dumps([finding.to_dict() for finding in findings], indent=2, allow_nan=False))
