"""The command that compares methods over datasets and scales: compare."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

from foveate.cli import options
from foveate.cli.console import OUTPUT, progress
from foveate.cli.sweep import choose_precision, open_study, run_study
from foveate.cli.training import cached_loader, parse_pairs, parse_settings

if TYPE_CHECKING:
    from foveate.data.splits import SplitName
    from foveate.sweeps.runner import Study


def compare(
    methods: Annotated[list[str] | None, options.METHOD("all methods")] = None,
    data: Annotated[list[str] | None, options.SETS("all datasets that have a source")] = None,
    source: Annotated[list[str] | None, options.REPLACED()] = None,
    scales: Annotated[str | None, options.SCALES("training scales of each dataset")] = None,
    split: Annotated[str, options.SPLIT()] = "test",
    bad: options.BadOption = "stop",
    seeds: Annotated[int, options.SEEDS()] = 3,
    precision: Annotated[str, options.PRECISION("auto: bf16 on a GPU, float32 on a CPU")] = "auto",
    change: Annotated[list[str] | None, options.SETTING()] = None,
    out: Annotated[Path, options.OUT_FOLDER()] = Path("compare"),
    device: options.DeviceOption = "auto",
    together: Annotated[int, options.TOGETHER()] = 0,
    engine: options.EngineOption = "local",
    address: options.AddressOption = None,
    dry_run: options.DryRunOption = False,
) -> None:
    """Compare methods that generalise over scale: train each on one scale, test it at many.

    ```
    foveate compare --dry-run
    foveate compare --methods cnn,fovmax --data mnist --scales 2
    foveate compare --methods sesn --split val --set learning_rate=0.001
    ```

    Writes compare.csv (one line per run and test scale), compare.html and one figure per dataset
    and training scale. If interrupted, the same command resumes; finished runs are not repeated.
    The methods cnn-expert, fovmax-expert and residual-expert train one network per test scale,
    with one seed; their accuracy is the ceiling of the figures. With --split val, networks are
    tested on validation images only, to choose settings.
    """
    from foveate.baselines.comparison import find_data_sets, find_methods, plan_jobs, row_label
    from foveate.scales import as_scales
    from foveate.training.loop import find_device

    place, load = str(find_device(device)), cached_loader()
    changes = {"precision": choose_precision(precision, place), **parse_settings(change or [])}
    sources = parse_pairs(source or [], "--source must be NAME=SOURCE, such as mnist=idx:DIR")

    jobs = plan_jobs(
        find_methods(_split(methods)),
        find_data_sets(_split(data), sources, load),
        scales=as_scales(scales) if scales else (),
        seeds=seeds,
        split=cast("SplitName", split),
        change=lambda config: config.changed(changes),
    )
    study = open_study(jobs, out, bad)
    labels = {row: row_label(*row) for job in jobs for _, rows in job.tests for row in rows}
    how = {"device": place, "together": together, "address": address, "load": load, "bad": bad}
    try:
        run_study(study, labels, dry_run=dry_run, name=engine, **how)
    finally:
        if not dry_run and study.records:
            facts = {
                "split": split,
                "settings changed by the last command": ", ".join(change or []) or "none",
                "sources replaced by the last command": ", ".join(source or []) or "none",
            }
            with study.locked():  # otherwise two commands can end with older results last
                _write(study, cast("SplitName", split), facts)


def _split(names: list[str] | None) -> list[str]:
    return [name.strip() for part in names or [] for name in part.split(",")]


def _write(study: "Study", split: "SplitName", facts: dict[str, str]) -> None:
    """Write the page, the figures and the table of all results in the folder."""
    from foveate.baselines.comparison import Measurement, measurements
    from foveate.baselines.summary import comparison_views
    from foveate.report.comparison_page import comparison_figure, comparison_page
    from foveate.report.plots import save_figure
    from foveate.sweeps.records import write_lines

    lines, suffix = measurements(study.records, split), "" if split == "test" else f"-{split}"
    drawn = [(view, comparison_figure(view)) for view in comparison_views(lines)]
    made = {f"{record.version} {record.commit}".strip() for record in study.records}
    facts |= {
        "hardware": "; ".join(sorted({record.hardware for record in study.records})),
        "foveate version of the runs": ", ".join(sorted(made)),
    }
    missing = [job.folder for job in study.remaining]
    state = f"{len(missing):,} of them missing" if missing else "all finished"
    facts["runs of the last command"] = f"{len(study.jobs):,}, {state}"
    page = comparison_page(lines, drawn, facts, split=split, missing=missing)
    saved = page.save(study.folder / f"compare{suffix}.html")
    with progress("figures", len(drawn)) as advance:
        for view, figure in drawn:
            save_figure(figure, study.folder / "figures", f"{view.name}{suffix}")
            advance(1)
    table = study.folder / f"compare{suffix}.csv"
    write_lines(table, Measurement, lines)  # last, because it shows that the rest is written
    OUTPUT.print(table, saved, sep="\n")
