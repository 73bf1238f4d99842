"""The runs of a comparison of methods, and its results: one line per run and test scale."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TypeVar

from foveate.baselines.data_sets import DATA_SETS, DataSet
from foveate.baselines.methods import METHODS, Method
from foveate.checks import check_range, suggest
from foveate.data.sources import Load
from foveate.data.splits import SplitName
from foveate.errors import ConfigError
from foveate.sweeps.jobs import MAX_SEEDS, Job, Rows, Variant
from foveate.sweeps.records import Record
from foveate.training.config import TrainConfig

EXPERT_SEEDS = 1  # an expert per test scale and method: 34 runs for a dataset of 17 scales
NAMED = {"seed": "--seeds", "scales": "--scales", "source": "--source"}
"""Fields that the names of runs and datasets stand for, and the options that choose them."""
AT = "@"  # between method and training set in the name of a row
Named = TypeVar("Named", Method, DataSet)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Accuracy of one run of a method at one test scale: one line of compare.csv.

    `trained` is a scale, ``all``, or the number of samples. The training time of runs that one
    process trains together is divided among them.
    """

    data: str
    method: str
    trained: str
    scale: float
    seed: int
    accuracy: float
    count: int
    parameters: int
    training_seconds: float
    images_per_second: float


def find_methods(names: Sequence[str] = ()) -> list[Method]:
    """Return methods by name, or all of them.

    Args:
        names: Names of methods.

    Returns:
        The methods, in the order of the registry.

    Raises:
        ConfigError: If a name is unknown.

    Examples:
        >>> [method.name for method in find_methods(["fovmax", "cnn"])]
        ['cnn', 'fovmax']
    """
    return _find(METHODS, names, "method")


def find_data_sets(names: Sequence[str], sources: Mapping[str, str], load: Load) -> list[DataSet]:
    """Return datasets by name, with their sources.

    Args:
        names: Names of datasets. Without names, all datasets that have a source.
        sources: Sources that replace the defaults, by dataset.
        load: Function that loads a source by name.

    Returns:
        The datasets, in the order of the registry.

    Raises:
        ConfigError: If a name is unknown, or a named dataset has no source.
        DataError: If a source is unknown or missing.

    Examples:
        >>> from foveate.data.sources import load_source
        >>> find_data_sets(["mnist"], {"mnist": "mnist-5k"}, load_source)[0].source
        'mnist-5k'
    """
    _find(DATA_SETS, list(sources), "dataset")
    chosen = _find(DATA_SETS, names, "dataset")
    if unused := [name for name in sources if name not in {data.name for data in chosen}]:
        raise ConfigError(f"--source {unused[0]}=... is not used; add {unused[0]} to --data")
    known = [d.with_source(sources[d.name], load) if d.name in sources else d for d in chosen]
    for data in known if names else ():
        data.images(data.trained[0])  # raises if the dataset has no source
    return [data for data in known if data.source]


def plan_jobs(
    methods: Iterable[Method],
    data_sets: Iterable[DataSet],
    *,
    scales: Sequence[float] = (),
    seeds: int = 3,
    split: SplitName = "test",
    change: Callable[[TrainConfig], TrainConfig] = lambda config: config,
) -> list[Job]:
    """Return the runs of a comparison, each trained once.

    Methods that test the same trained network share its run: the CNN trained on scale 2 is also
    the expert for scale 2, and the network whose logits are averaged over input sizes.

    Args:
        methods: Methods to compare.
        data_sets: Datasets to compare them on.
        scales: Training scales; those of each dataset if empty. Experts are trained on every test
            scale, and training sets of few samples have no scale.
        seeds: Runs per method and training set; experts have one.
        split: Split of the test images: ``val`` to choose settings, ``test`` for results.
        change: Function that changes the configuration of every run, except its seed, its training
            scales and its source.

    Returns:
        The jobs, ordered by dataset, method, training set and seed.

    Raises:
        ConfigError: If there are no runs, or an argument is invalid.

    Examples:
        >>> jobs = plan_jobs(find_methods(["cnn", "cnn-averaged"]), [DATA_SETS["mnist"]], seeds=1)
        >>> [job.folder for job in jobs]
        ['mnist-cnn-1-s0', 'mnist-cnn-2-s0', 'mnist-cnn-4-s0']
    """
    check_range("seeds", seeds, 1, MAX_SEEDS, f"1 to {MAX_SEEDS}")
    if split not in ("val", "test"):
        raise ConfigError(f"split must be val or test, got {split!r}")
    jobs: dict[str, Job] = {}
    pairs = list(product(data_sets, methods))
    for data, method in pairs:
        count = EXPERT_SEEDS if method.trained == "expert" else seeds
        for trained, seed in product(_trainings(data, method, scales), range(count)):
            new = _job(data, method, trained, split)
            new = replace(new, config=_changed(replace(new.config, seed=seed), change))
            jobs[new.folder] = _merged(jobs[new.folder], new) if new.folder in jobs else new
    if not jobs:
        asked = f" with the training scales {', '.join(f'{s:g}' for s in scales)}" if scales else ""
        there = "; ".join(_possible(*pair) for pair in pairs)
        raise ConfigError(f"no runs{asked}; the training sets are {there}")
    return list(jobs.values())


def measurements(records: Iterable[Record], split: SplitName = "test") -> list[Measurement]:
    """Return the results of a comparison; of an expert, only that of its training scale."""
    shared = {f.name for f in fields(Measurement)} & {f.name for f in fields(Record)}
    found = []
    for record in records:
        name, _, other = record.table.partition(AT)
        method, _, trained = record.row.partition(AT)
        if (other or "test") != split or name not in DATA_SETS or method not in METHODS:
            continue
        if METHODS[method].trained == "expert" and float(trained) != record.scale:
            continue
        values = {key: getattr(record, key) for key in shared}
        found.append(Measurement(data=name, method=method, trained=trained, **values))
    return sorted(found, key=_order)


def row_label(table: str, row: str) -> str:
    """Return the label of a row, such as ``mnist fovmax 2``."""
    method, _, trained = row.partition(AT)
    short = f"{float(trained):.3g}" if "." in trained else trained
    return f"{table.replace(AT, ' ')} {method} {short}"


def _trainings(data: DataSet, method: Method, scales: Sequence[float]) -> list[str]:
    limited = scales and method.trained == "each" and not data.few
    return [t for t in method.trainings(data) if not limited or float(t) in scales]


def _possible(data: DataSet, method: Method) -> str:
    none = f"none ({method.missing.get(data.name, 'few samples')})"
    return f"{method.name} on {data.name}: {', '.join(method.trainings(data)) or none}"


def _job(data: DataSet, method: Method, trained: str, split: SplitName) -> Job:
    """Return the job that trains the network of a method, or of `runs_of`, and tests it."""
    own = METHODS[method.run_name]
    table = data.name if split == "test" else f"{data.name}{AT}{split}"
    rows: Rows = ((table, f"{method.name}{AT}{trained}"),)
    scales = (float(trained),) if method.trained == "expert" else tuple(data.scales)
    job = Job(
        name=f"{data.name}-{own.name}-{trained}",
        config=own.config(data, trained),
        scales=scales,
        rows=rows,
        split=split,
    )
    if method.zoom is None:
        return job
    low, high = (f"{zoom * data.frame:g}" for zoom in method.zoom)
    variant = Variant(rows=rows, windows=f"{low}-{high}", pool="avg")
    return replace(job, rows=(), variants=(variant,))


def _changed(config: TrainConfig, change: Callable[[TrainConfig], TrainConfig]) -> TrainConfig:
    changed = change(config)
    for name, option in NAMED.items():
        if getattr(changed, name) != getattr(config, name):
            raise ConfigError(f"cannot set {name} for all runs of a comparison; use {option}")
    return changed


def _merged(one: Job, other: Job) -> Job:
    """Return one job for two tests of the same run."""
    return replace(
        one,
        scales=tuple(sorted({*one.scales, *other.scales})),
        rows=(*one.rows, *other.rows),
        variants=(*one.variants, *other.variants),
    )


def _order(line: Measurement) -> tuple[int, int, tuple[float, str], int, float]:
    place = list(DATA_SETS).index(line.data), list(METHODS).index(line.method)
    number = float(line.trained) if line.trained[0].isdigit() else 0.0
    return *place, (number, line.trained), line.seed, line.scale


def _find(known: Mapping[str, Named], names: Sequence[str], what: str) -> list[Named]:
    for name in names:
        if name not in known:
            hint = suggest(name, known, f"choose from {', '.join(known)}")
            raise ConfigError(f"no {what} {name!r}; {hint}")
    return [found for name, found in known.items() if not names or name in names]
