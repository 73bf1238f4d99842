"""Put trained networks into the package: weights, index and model cards.

python tools/ship.py RESULTS   a results.json of 'foveate evaluate', or the folder that has it
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
from foveate.evaluation.results import RunResult, read_results
from foveate.files import replacing, write_text
from foveate.models.pretrained import (
    INDEX,
    WEIGHTS,
    PretrainedInfo,
    from_pretrained,
    read_index,
)
from foveate.training.checkpoint import RunFolder
from foveate.training.config import TrainConfig
from foveate.training.presets import PRESETS

CARDS = Path(__file__).parents[1] / "docs" / "models"
NAMED = ("model", "source", "scales", "samples", "size", "seed")
"""The settings of a run that have a field of their own in `PretrainedInfo`."""


def ship(
    results: Sequence[RunResult],
    cards: Path,
    folder: Path = WEIGHTS,
    *,
    name: Callable[[TrainConfig], str] | None = None,
) -> list[PretrainedInfo]:
    """Put the median run of each row into `folder`, and a card for it into `cards`.

    `results` are finished runs with their accuracy over scale on the test images of their own
    source, any number of seeds of any number of rows. Of each row the run with the median
    validation accuracy is taken (the lower one of two). `name` names a row, by default as
    `row_name` does. Networks that the folder has already stay, unless they are named again.
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
        raise DataError(f"cannot write the networks ({error})") from None
    for info in infos:
        from_pretrained(info.name, folder)  # says so if what was written cannot be read
    return infos


def row_name(config: TrainConfig) -> str:
    """Name a run of Table I, whatever its seed and precision, such as fovmax-mnist-tr2."""
    for name, row in PRESETS.items():
        same = replace(row, seed=config.seed, precision=config.precision)
        if name.rpartition("-")[2].startswith("tr") and same == config:
            return name.replace("-tr", "-mnist-tr")
    raise ConfigError(
        f"a run on {config.source} at scales {config.scales} with {config.epochs} epochs of "
        f"batches of {config.batch} is no row of Table I; pass name= to ship it"
    )


def write_cards(cards: Path, folder: Path = WEIGHTS) -> None:
    """Write a page for each network in `folder`, and README.md with all of them."""
    index = read_index(folder)
    for name, info in index.items():
        write_text(cards / f"{name}.md", card(info))
    write_text(cards / "README.md", overview(list(index.values())))


def _median(row: str, group: list[RunResult]) -> RunResult:
    first = group[0].config
    for result in group:
        if replace(result.config, seed=first.seed) != first:
            raise ConfigError(f"the runs of {row} differ in more than their seed: {result.run}")
    ranked = sorted(group, key=lambda result: (_validation(result), result.config.seed))
    return ranked[(len(ranked) - 1) // 2]


def _validation(result: RunResult) -> float:
    folder = RunFolder(Path(result.run))
    folder.net()  # says what is missing or damaged
    if folder.config() != result.config:
        raise ConfigError(f"{result.run} is not the run that was evaluated; evaluate it again")
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
    for shipped in ship(read_results(Path(sys.argv[1])), CARDS):
        print(shipped.name)
