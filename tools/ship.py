"""Add trained networks to the package: weights, index and model cards.

Usage: python tools/ship.py FOLDER

FOLDER is the output of 'foveate reproduce'. The rows of Table I are added.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model_cards import card, overview

from foveate.errors import ConfigError, DataError
from foveate.evaluation.results import RunResult
from foveate.files import replacing, write_text
from foveate.models.pretrained import (
    INDEX,
    WEIGHTS,
    PretrainedInfo,
    from_pretrained,
    read_index,
)
from foveate.paper.tables import paper_rows
from foveate.sweeps.jobs import Outcome
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.presets import OWN, PRESETS

CARDS = Path(__file__).parents[1] / "docs" / "models"
NAMED = ("model", "source", "scales", "samples", "size", "seed")
"""Settings of a run that are fields of `PretrainedInfo`; the others go into its recipe."""


def ship(
    results: Sequence[RunResult],
    cards: Path,
    folder: Path = WEIGHTS,
    *,
    name: Callable[[TrainConfig], str] | None = None,
) -> list[PretrainedInfo]:
    """Copy the median run of each row to `folder`, and write its card to `cards`.

    The median is taken over the validation accuracy of the seeds of a row (the lower one of an
    even number). Networks already in the folder are kept, unless a new one has the same name.

    Args:
        results: Finished runs, any number of seeds and rows, with their accuracy over scale on
            the test images of their own source.
        cards: Folder of the model cards.
        folder: Folder of the weights and the index.
        name: Function from a configuration to the name of its row; `row_name` by default.

    Returns:
        Index entries of the added networks.
    """
    rows: dict[str, list[RunResult]] = {}
    for result in results:
        rows.setdefault((name or row_name)(result.config), []).append(result)
    chosen = {row: _median(row, group) for row, group in rows.items()}
    infos = [_info(row, chosen[row], len(group)) for row, group in rows.items()]
    try:
        for info in infos:
            with replacing(folder / info.file) as temporary:
                temporary.write_bytes(_weights(chosen[info.name]).read_bytes())
        _write_index(infos, folder)
        write_cards(cards, folder)
    except OSError as error:
        raise DataError(f"cannot write the networks: {error}") from None
    for info in infos:
        from_pretrained(info.name, folder)  # raises if the written files cannot be read
    return infos


def read_run(path: Path) -> RunResult:
    """Return the test results of a run folder of a study."""
    run = RunFolder(path)
    scales = Outcome.read(path / "outcome.json").scales
    return RunResult(run=str(path), config=run.config(), scales=scales, made_with=run.provenance())


def row_name(config: TrainConfig) -> str:
    """Return the name of a run, for any seed and precision.

    It is fovmax-mnist-tr2 for a row of Table I, and the name of the preset for fovplus-tr2.
    """
    for name, row in (PRESETS | OWN).items():
        same = replace(row, seed=config.seed, precision=config.precision)
        if name.rpartition("-")[2].startswith("tr") and same == config:
            return name if name in OWN else name.replace("-tr", "-mnist-tr")
    raise ConfigError(
        f"a run on {config.source} at scales {config.scales} with {config.epochs} epochs and batch "
        f"size {config.batch} is not a row of Table I or fovplus; pass name= to ship it"
    )


def write_cards(cards: Path, folder: Path = WEIGHTS) -> None:
    """Write a card for each network in `folder`, and README.md with the overview."""
    index = read_index(folder)
    for name, info in index.items():
        write_text(cards / f"{name}.md", card(info))
    write_text(cards / "README.md", overview(list(index.values())))


def _median(row: str, group: list[RunResult]) -> RunResult:
    first = group[0].config
    for result in group:
        if replace(result.config, seed=first.seed) != first:
            raise ConfigError(
                f"the runs of {row} must differ in their seed only: remove {result.run}"
            )
    ranked = sorted(group, key=lambda result: (_validation(result), result.config.seed))
    return ranked[(len(ranked) - 1) // 2]


def _validation(result: RunResult) -> float:
    folder = RunFolder(Path(result.run))
    folder.net()  # raises if files are missing or damaged
    if folder.config() != result.config:
        raise ConfigError(f"{result.run} has changed since its evaluation; evaluate it again")
    return folder.metrics()[-1]["validation"]


def _weights(result: RunResult) -> Path:
    return RunFolder(Path(result.run)).weights


def _info(row: str, result: RunResult, seeds: int) -> PretrainedInfo:
    config = result.config
    recipe = {key: value for key, value in config.to_dict().items() if key not in NAMED}
    named: dict[str, Any] = {key: getattr(config, key) for key in NAMED}
    named |= {key: result.made_with.get(key, "") for key in ("version", "commit", "hardware")}
    return PretrainedInfo(
        name=row,
        file=f"{row}.safetensors",
        sha256=hashlib.sha256(_weights(result).read_bytes()).hexdigest(),
        seeds=seeds,
        recipe=recipe,
        validation=_validation(result),
        accuracy={at.scale: at.accuracy for at in result.scales},
        tested=result.scales[0].count,
        **named,
    )


def _write_index(infos: Sequence[PretrainedInfo], folder: Path) -> None:
    index = read_index(folder) | {info.name: info for info in infos}
    text = json.dumps([info.to_dict() for info in index.values()], indent=1, allow_nan=False)
    write_text(folder / INDEX, text + "\n")


if __name__ == "__main__":
    rows = [row.name for row in paper_rows() if row.table == "table1"]
    runs = [run for name in rows for run in sorted(Path(sys.argv[1]).glob(f"{name}-s*"))]
    for shipped in ship([read_run(run) for run in runs], CARDS):
        print(shipped.name)
