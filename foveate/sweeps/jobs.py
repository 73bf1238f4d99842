"""A job, one run to train and to test over scale, and its outcome, stored in the run folder."""

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import product
from pathlib import Path
from typing import Any

import torch

from foveate.checks import check_fields
from foveate.data.sources import load_source
from foveate.data.splits import SplitName
from foveate.data.store import cpu_threads
from foveate.errors import ConfigError, DataError
from foveate.evaluation.curve import AtScale
from foveate.evaluation.test_sets import images_per_second, open_test_set, with_channels
from foveate.files import parse_json, read_text, write_text
from foveate.sweeps.records import Record, Winners
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.data import Load, is_photo
from foveate.training.loop import train_together
from foveate.training.session import Callback
from foveate.training.skipped import Bad, add_skipped

OUTCOMES: Mapping[SplitName, str] = {"test": "outcome.json", "val": "outcome-val.json"}
"""File in the run folder with the outcome of a job, by the split on which the job is tested."""
MAX_SEEDS = 1000  # per configuration

Rows = tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A further test of a trained network, with scale channels that it was not trained with.

    `windows` are those of the channels in pixels, such as ``56-224``, and `pool` is their pooling.
    """

    rows: Rows
    windows: str
    pool: str

    @property
    def key(self) -> str:
        """Name of the test in an outcome."""
        return f"{self.windows} {self.pool}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training run, and the scales at which its network is tested afterwards.

    Args:
        name: Name of the configuration; jobs that differ only in their seed share it.
        config: Training configuration, which includes the seed.
        scales: Test scales.
        rows: Rows of the results, as (table, row), to which the job contributes its seed.
        split: Split on which the network is tested: ``test`` or ``val``.
        variants: Further tests of the same trained network.

    Examples:
        >>> from foveate.training.presets import preset
        >>> rows = (("pooling", "fovmax"),)
        >>> job = Job(name="fovmax", config=preset("fovmax"), scales=(0.5, 1.0, 2.0), rows=rows)
        >>> job.folder
        'fovmax-s0'
    """

    name: str
    config: TrainConfig
    scales: tuple[float, ...]
    rows: Rows
    split: SplitName = "test"
    variants: tuple[Variant, ...] = ()

    @property
    def folder(self) -> str:
        """Name of the run folder inside the folder of the study."""
        return f"{self.name}-s{self.config.seed}"

    @property
    def tests(self) -> Iterator[tuple[str, Rows]]:
        """The tests of the network, as (key, rows); the key of the network as trained is empty."""
        yield "", self.rows
        yield from ((variant.key, variant.rows) for variant in self.variants)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a finished job: its run, as in the fields of `Record`, and its tests.

    `seconds` includes training, test, and the time before an interruption. `scales` are the results
    of the network as trained, `variants` those of the variants of the job by their key, and
    `variant_speeds` their images per second.
    """

    name: str
    seed: int
    config: str
    validation: float
    seconds: float
    memory: int
    version: str
    commit: str
    hardware: str
    scales: tuple[AtScale, ...]
    parameters: int = 0
    training_seconds: float = 0.0
    images_per_second: float = 0.0
    variants: Mapping[str, tuple[AtScale, ...]] = field(default_factory=dict)
    variant_speeds: Mapping[str, float] = field(default_factory=dict)

    def results(self, key: str) -> tuple[AtScale, ...]:
        """Return the test results with a key of `Job.tests`; empty if there are none."""
        return self.variants.get(key, ()) if key else self.scales

    @classmethod
    def read(cls, path: Path) -> "Outcome":
        """Read the outcome.json of a run."""
        try:
            values = parse_json(read_text(path))
            tests = {"": values["scales"], **values.pop("variants", {})}
            read = {key: tuple(map(AtScale.from_dict, found)) for key, found in tests.items()}
            outcome = cls(**{**values, "scales": read.pop(""), "variants": read})
            check_fields(outcome)
        except (ValueError, KeyError, TypeError, AttributeError, ConfigError) as error:
            raise DataError(
                f"{path} is damaged ({error}); remove it to test the run again"
            ) from None
        return outcome


def perform(
    jobs: Sequence[Job],
    folder: Path,
    *,
    device: str = "cpu",
    threads: int = 0,
    at_once: int = 1,
    callback: Callback = lambda config, progress, steps: None,
    load: Load = load_source,
    bad: Bad = "stop",
) -> list[Outcome]:
    """Train runs in parallel, test them, and write outcome.json into each run folder of `folder`.

    `threads` are CPU threads of torch, or 0 for its default; their number changes rounding errors.
    `at_once` is the number of processes that share the GPU, including this one. The outcomes are in
    the order of the jobs.
    """
    with cpu_threads(threads):
        if device.startswith("cuda"):
            torch.cuda.reset_peak_memory_stats()
        runs = [(job.config, folder / job.folder) for job in jobs]
        trained = train_together(runs, device=device, callback=callback, load=load, bad=bad)
        return [
            _finish(job, run, device, at_once, load, bad)
            for job, run in zip(jobs, trained, strict=True)
        ]


def _finish(job: Job, run: RunFolder, device: str, at_once: int, load: Load, bad: Bad) -> Outcome:
    begun = time.perf_counter()
    if (accuracy := run.validation()) is None:
        raise DataError(f"{run.path} has no validation accuracy; remove the folder and train again")
    # Trusted: training has checked that config.json is the configuration of this job.
    net = run.net(trust=bool(job.config.backbone)).to(device)
    nets = {"": net}
    for variant in job.variants:
        nets[variant.key] = with_channels(net, job.config, variant.windows, variant.pool)[0]
    tests = open_test_set(run, load, split=job.split, bad=bad if is_photo(job.config) else "stop")
    results = {key: tests.measure(tested, job.scales) for key, tested in nets.items()}
    add_skipped(run.path, tests.skipped)
    last = run.metrics()[-1]
    seconds = (last["share"] + time.perf_counter() - begun) / at_once
    speeds = {key: round(images_per_second(n, job.config), 1) for key, n in nets.items()}
    outcome = Outcome(
        name=job.name,
        seed=job.config.seed,
        config=job.config.digest(),
        validation=accuracy,
        seconds=round(seconds, 3),
        memory=_peak_memory(device),
        scales=results.pop(""),
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        training_seconds=round(last["share"] / at_once, 3),
        images_per_second=speeds.pop(""),
        variants=results,
        variant_speeds=speeds,
        **run.provenance(),
    )
    write_text(run.path / OUTCOMES[job.split], json.dumps(asdict(outcome)) + "\n")
    return outcome


def find_outcome(job: Job, folder: Path) -> Outcome | None:
    """Return the outcome of a job, or None if it is not finished at all of its scales."""
    run = RunFolder(folder / job.folder)
    path = run.path / OUTCOMES[job.split]
    found = Outcome.read(path) if path.exists() else None
    digests = {found.config} if found else set()
    if (run.path / "config.json").exists():
        digests.add(run.config().digest())
    if digests - {job.config.digest()}:
        raise ConfigError(
            f"{run.path} contains a run named {job.name} with other settings; choose another --out"
        )
    if found is None:
        return None
    tested = [{at.scale for at in found.results(key)} for key, _ in job.tests]
    return found if all(scales >= set(job.scales) for scales in tested) else None


def make_records(job: Job, outcome: Outcome) -> list[Record]:
    """Return the records of a finished job, one per row and scale."""
    shared = {f.name for f in fields(Record)} & vars(outcome).keys()
    how = {name: getattr(outcome, name) for name in shared}
    records = []
    for key, rows in job.tests:
        how["images_per_second"] = outcome.variant_speeds.get(key, outcome.images_per_second)
        for (table, row), at in product(rows, outcome.results(key)):
            tested: dict[str, Any] = {"scale": at.scale, "accuracy": at.accuracy, "count": at.count}
            records.append(Record(table=table, row=row, **tested, **how))
    return records


def make_winners(job: Job, outcome: Outcome) -> list[Winners]:
    """Return how often each scale channel won at each test scale, on the split ``test`` only."""
    channels = tuple(job.config.model.scales) if job.split == "test" else ()
    return [
        Winners(row=job.name, seed=outcome.seed, scale=at.scale, channel=channel, count=count)
        for at in outcome.scales
        for channel, count in zip(channels, at.winners, strict=False)
    ]


def _peak_memory(device: str) -> int:
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated() >> 20
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak >> (20 if sys.platform == "darwin" else 10)  # bytes on macOS, KiB on Linux
