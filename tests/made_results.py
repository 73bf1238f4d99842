"""Results that nobody measured: the paper's figures, with seeded noise, as records of runs."""

import math
import random
from dataclasses import replace
from functools import cache

from foveate.paper.tables import paper_rows
from foveate.sweeps.records import Record, Winners

HARDWARE = "NVIDIA H200, torch 2.11.0"
SECONDS = {"CNN": 6, "FovAvg": 6, "FovMax": 6, "FovConc": 4, "SWMax": 14}


def made_records(
    *, seeds=3, noise=0.0, change=lambda row, scale, figure: figure, hardware=HARDWARE
):
    """Records of every row: the figure as `change` leaves it, plus noise in points."""
    chance = random.Random(0)
    records = []
    for row in paper_rows():
        for seed in range(seeds):
            shift = noise * chance.gauss(0, 1)
            paper = [point.paper for point in row.points]
            figures = paper if len(paper) > 1 else paper * len(row.scales)
            records += [
                record(row, seed, scale, change(row, scale, figure) + shift, hardware)
                for scale, figure in zip(row.scales, figures, strict=True)
            ]
    return records


def record(row, seed, scale, percent, hardware=HARDWARE):
    return Record(
        table=row.table,
        row=row.name,
        seed=seed,
        scale=scale,
        accuracy=min(1.0, percent / 100),
        validation=0.99,
        seconds=SECONDS[row.network] / (4 if row.table == "table3" else 1),
        memory=20_000,
        config=digest(row.name, seed),
        version="0.1.0",
        commit="abc1234",
        hardware=hardware,
    )


@cache
def digest(name, seed):
    row = next(row for row in paper_rows() if row.name == name)
    return replace(row.config, seed=seed, precision="bf16").digest()


def made_winners(*, seeds=3, moves=lambda scale: scale, names=None):
    """Winners of every row with channels: bell-shaped over log scale, about `moves(true scale)`."""
    rows = {row.name: row for row in paper_rows() if row.channels}
    return [
        Winners(row=name, seed=seed, scale=scale, channel=channel, count=count)
        for name, row in rows.items()
        if names is None or name in names
        for seed in range(seeds)
        for scale in row.scales
        for channel, count in _bell(tuple(row.config.model.scales), moves(scale))
    ]


def _bell(channels, about):
    heights = [math.exp(-2 * math.log2(channel / about) ** 2) for channel in channels]
    total = sum(heights)
    return [(c, round(10_000 * h / total)) for c, h in zip(channels, heights, strict=True)]


def only(names, by):
    """A change of some rows alone: `by` maps the figure and the scale to another figure."""
    return lambda row, scale, figure: by(figure, scale) if row.name in names else figure


def lower(points, low=0.0, high=9.0):
    """Take points away at the scales between low and high."""
    return lambda figure, scale: figure - points * (low <= scale <= high)


def without(row, seed=1, scale=None):
    """The records of all runs but those of one seed of a row, or of one of its scales."""

    def gone(record):
        here = scale is None or math.isclose(record.scale, scale, rel_tol=1e-6)
        return here and (record.row, record.seed) == (row, seed)

    return [record for record in made_records() if not gone(record)]
