"""Train and test the fovplus presets with several seeds; tools/fovplus_results.py publishes them.

python benchmarks/fovplus.py --out DIR              all groups on a GPU, or resume
python benchmarks/fovplus.py --quick --out DIR      check in a few minutes that all groups work

The seeds of a group are trained in parallel. The runs are stored in --runs. After each group the
script updates three files in DIR: results.csv with one line per network, seed and scale, about.json
with the configurations, and networks.tar with the run folders of the presets.
"""

import argparse
import json
import shutil
import sys
import tarfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

import torch

from foveate.data.splits import SplitName
from foveate.files import write_text
from foveate.paper.tables import SCALES
from foveate.scales import ScaleGrid
from foveate.sweeps.jobs import Job
from foveate.sweeps.records import RESULTS, Record
from foveate.sweeps.runner import Done, LocalEngine, Study
from foveate.training.checkpoint import Progress
from foveate.training.config import NO_ZOOMS, Precision, TrainConfig
from foveate.training.presets import preset

PLUS = "fovplus-tr2"
SHOWN = tuple(SCALES[place] for place in (0, 4, 8, 12, 14, 15, 16))
"""Scales of the ablation and of the printed table: 1/2, 1, 2, 4, 5.66, 6.73 and 8."""
FOVAVG = preset("fovavg-tr2")
OPTIMISER = ("schedule", "warmup", "smallest_rate", "weight_decay", "label_smoothing")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that differ in their seed.

    Attributes:
        row: Name of the row in the results.
        config: Configuration of the runs, with any seed.
        table: Table of the row.
        seeds: Number of runs.
        split: Images of the test.
        scales: Test scales.
        runs: Group whose trained networks are tested, if it is another one.
    """

    row: str
    config: TrainConfig
    table: str = "fovplus"
    seeds: int = 5
    split: SplitName = "test"
    scales: tuple[float, ...] = SCALES
    runs: str = ""

    @property
    def name(self) -> str:
        """Name for --groups."""
        name = self.row if self.table == "fovplus" else f"{self.table}-{self.row}"
        return name.replace(" ", "-")

    def jobs(self) -> list[Job]:
        """Return one job per seed."""
        return [
            Job(
                name=self.runs or self.name, config=replace(self.config, seed=seed),
                scales=self.scales, rows=((self.table, self.row),), split=self.split,
            )
            for seed in range(self.seeds)
        ]  # fmt: skip


def all_groups(fashion: str) -> list[Group]:
    """Return the groups in the order in which they are trained, the most important first."""
    plus = preset(PLUS)
    changed = {
        "without zooms": replace(plus, zooms=NO_ZOOMS),
        "features of the paper": replace(plus, model=FOVAVG.model),
        "optimiser of the paper": replace(plus, **{k: getattr(FOVAVG, k) for k in OPTIMISER}),
    }
    # `antialias` was chosen on validation images (docs/log.md).
    clothes = replace(plus, source=fashion, model=replace(plus.model, antialias=True))
    ablation = {"table": "ablation", "seeds": 3, "split": "val", "scales": SHOWN}
    return [
        Group(row=PLUS, config=plus),
        Group(row=PLUS, config=clothes, table="fashion", seeds=3),
        *(Group(row=name, config=preset(name)) for name in ("fovplus-tr1", "fovplus-tr4")),
        Group(row="fovavg-tr2", config=FOVAVG),
        Group(row=PLUS, config=plus, runs=PLUS, **ablation),  # type: ignore[arg-type]
        *(
            Group(row=row, config=config, **ablation)  # type: ignore[arg-type]
            for row, config in changed.items()
        ),
    ]


def shortened(group: Group) -> Group:
    """Return a group that takes seconds, on the digits in the package."""
    model = replace(group.config.model, scales=ScaleGrid(0.5, 8, per_octave=1))
    config = replace(group.config, model=model, source="mnist-5k", samples=200, epochs=1)
    return replace(group, config=config, seeds=2, scales=(SCALES[0], SCALES[8], SCALES[16]))


def train_group(group: Group, options: argparse.Namespace) -> tuple[list[Record], int]:
    """Perform the jobs of a group; return all results so far and the number of failures."""

    def report(config: TrainConfig, progress: Progress, steps: int) -> None:
        if config.seed == 0 and progress.step == 0 and progress.epoch % 5 == 0:
            say(options, f"  seed 0: epoch {progress.epoch}")

    study, failures = Study(group.jobs(), options.runs), 0
    engine = LocalEngine(device=options.device, together=group.seeds, callback=report)
    for ended in study.run(engine):
        if isinstance(ended, Done):
            found = ended.outcome
            times = f"training {found.training_seconds:.1f} s, all {found.seconds:.1f} s"
            say(options, f"  seed {found.seed}: validation {100 * found.validation:.2f} %, {times}")
        else:
            say(options, f"  seed {ended.job.config.seed} failed: {ended.reason}")
            failures += 1
    return study.records, failures


def save(groups: Iterable[Group], options: argparse.Namespace) -> None:
    """Write the three files with the results of these groups."""
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(options.runs / RESULTS, options.out / RESULTS)
    about = {
        "torch": torch.__version__,
        "quick": options.quick,
        "groups": [
            {
                "table": group.table, "row": group.row, "seeds": group.seeds, "split": group.split,
                "config": group.config.to_dict(),
                "digests": [job.config.digest() for job in group.jobs()],
            }
            for group in groups
        ],
    }  # fmt: skip
    write_text(options.out / "about.json", json.dumps(about, indent=1) + "\n")
    with tarfile.open(options.out / "networks.tar", "w") as archive:
        for name in ("config.json", "metrics.jsonl", "outcome.json", "weights.safetensors"):
            for path in sorted(options.runs.glob(f"fovplus-tr*/{name}")):
                archive.add(path, path.relative_to(options.runs))


def print_table(records: Iterable[Record]) -> None:
    """Print the mean and the lowest accuracy over the seeds of each row."""
    rows: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        rows.setdefault((record.table, record.row), []).append(record)
    print(f"{'mean and lowest of the seeds, %':36}", *(f"{s:^12.3g}" for s in SHOWN), "training s")
    for (table, row), found in rows.items():
        cells = []
        for scale in SHOWN:
            at = [100 * record.accuracy for record in found if record.scale == scale]
            cells.append(f"{mean(at):.2f} {min(at):.2f}".center(12) if at else " " * 12)
        # The first run also compiles kernels, so the median.
        seconds = median({record.seed: record.training_seconds for record in found}.values())
        print(f"{table:9} {row:26}", *cells, f"{seconds:.1f}", flush=True)


def say(options: argparse.Namespace, text: str) -> None:
    print(f"{time.monotonic() - options.begun:6.1f} s  {text}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--out", type=Path, required=True, help="folder of the three files")
    parser.add_argument("--runs", type=Path, default=Path("runs/fovplus"), help="folder of runs")
    parser.add_argument("--fashion", default="fashion-mnist", help="source of clothes, or none")
    parser.add_argument("--groups", nargs="+", metavar="NAME", help="groups to train; default: all")
    parser.add_argument("--limit", type=float, default=1e9, help="last start of a group, s")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="few digits, channels and scales")
    options = parser.parse_args()
    options.begun = time.monotonic()
    precision: Precision = "bf16" if options.device.startswith("cuda") else "float32"
    groups = [shortened(g) if options.quick else g for g in all_groups(options.fashion)]
    groups = [
        replace(group, config=replace(group.config, precision=precision))
        for group in groups
        if group.table != "fashion" or options.fashion != "none"
    ]
    names = [group.name for group in groups]
    if unknown := set(options.groups or ()) - set(names):
        parser.error(f"unknown groups {', '.join(unknown)}; choose from: {', '.join(names)}")
    records: list[Record] = []
    started: list[Group] = []
    failures = 0
    for group in groups:
        if group.name not in (options.groups or names):
            continue
        if time.monotonic() - options.begun > options.limit:
            say(options, f"{group.name}: not started, the time limit is over")
            continue
        say(options, f"{group.name}: {group.seeds} seeds")
        records, failed = train_group(group, options)
        failures += failed
        started.append(group)
        save(started, options)
    print_table(records)
    sys.exit(f"{failures} runs failed" if failures else 0)


if __name__ == "__main__":
    main()
