"""The commands about the paper: quickstart, report and verify."""

from dataclasses import replace
from json import dumps
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from foveate.cli import options
from foveate.cli.console import OUTPUT, epoch_line, print_table, progress
from foveate.files import check_folder

if TYPE_CHECKING:
    from foveate.evaluation.results import RunResult
    from foveate.evaluation.theory import Finding
    from foveate.training.checkpoint import Progress
    from foveate.training.config import TrainConfig

COLOURS = {"holds": "green", "fails": "bold red", "undecided": "yellow"}
LARGEST_SEED = 2**32 - 1


def quickstart(
    out: Annotated[Path, options.OUT_FOLDER()] = Path("quickstart"),
    seed: Annotated[int, options.SEED(min=0)] = 0,
) -> None:
    """Train three networks on digits of one size and test them at 17 scales, in minutes.

    ```
    foveate quickstart
    foveate quickstart --out second --seed 1
    ```

    Trains a CNN, FovAvg and FovMax on 3,500 digits that come with the package; nothing is
    downloaded. Prints the accuracy over scale, and writes report.html, accuracy.png, accuracy.svg,
    accuracy.csv, results.json and the run folders, which 'foveate demo' can open. If interrupted,
    the same command resumes.
    """
    from foveate.native.build import library

    Thread(target=library).start()  # compiles the C code on first use, while torch is imported
    from foveate.paper import quickstart as work
    from foveate.training.state import keep_freed_memory

    keep_freed_memory()  # a third of the system time of the tests
    runs = work.quick_runs(seed)
    with progress("training", sum(config.epochs for config in runs.values())) as advance:

        def show(name: str, config: "TrainConfig", at: "Progress") -> None:
            OUTPUT.print(f"{out / name}  {epoch_line(config, at)}")
            advance(1)

        work.train_runs(runs, out, show)
    with progress("testing", work.count_images(runs)) as advance:
        results = work.evaluate_runs(runs, out, advance=advance)
    _report(results, out)


def _report(results: "list[RunResult]", out: Path) -> None:
    from foveate.cli.evaluation import print_accuracy
    from foveate.evaluation.results import summarise
    from foveate.paper.quickstart import full_size_curves
    from foveate.report.plots import save_figure
    from foveate.report.quickstart import quick_figure, quick_page, quick_summary

    full = full_size_curves()
    written = [quick_page(results, full, out).save(out / "report.html")]
    written += save_figure(quick_figure(results, full), out, "accuracy")
    reference = [replace(curve, label=f"full size: {curve.label}", spread=()) for curve in full]
    print_accuracy([*summarise(results), *reference])
    written += [out / "accuracy.csv", out / "results.json"]
    OUTPUT.print(quick_summary(results), *written, sep="\n")


def report(
    results: Annotated[Path | None, options.RESULTS] = None,
    out: Annotated[Path, options.OUT_FOLDER()] = Path("report"),
) -> None:
    """Write the reproduction of the paper as one page: claims, figures, tables, provenance.

    ```
    foveate report
    foveate report paper --out report
    ```

    Writes report.html, a self-contained page, and each figure as .svg and .png in figures/.
    Results can be partial: the page lists the missing ones.
    """
    from rich.text import Text

    from foveate.paper.tables import published_folder
    from foveate.report.plots import save_figure
    from foveate.report.reproduction import Reproduction, captioned_figures, reproduction_page

    folder = results or published_folder()
    check_folder(out)
    found = Reproduction.read(folder)
    drawn, source = captioned_figures(found), str(results or "published with foveate")
    written = [reproduction_page(found, drawn, source).save(out / "report.html")]
    with progress("figures", len(drawn)) as advance:
        for name, each in drawn.items():
            written += save_figure(each.figure, out / "figures", name)
            advance(1)
    OUTPUT.print(*written, sep="\n")
    rows = [(c.name, c.statement, Text(c.verdict, COLOURS[c.verdict])) for c in found.claims]
    header = ("", "statement", "verdict")
    print_table(header, rows, left=header)
    OUTPUT.print(found.summary())


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
