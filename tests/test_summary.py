"""Results over seeds: means and spreads, what counts as complete, and what the runs took."""

import math
from dataclasses import replace
from statistics import mean, stdev

import pytest
from made_results import HARDWARE, made_records, record

from foveate.paper.tables import (
    SCALES,
    SCALES_1_TO_4,
    Summaries,
    effort,
    find_precision,
    find_rows,
    paper_rows,
)

(CNN,) = find_rows(["table1"], ["cnn-tr2"])
(FEW,) = find_rows(["table3"], ["fovavg-few100"])


def of(row, records):
    return Summaries(records).row(row.name, row.table)


def test_a_point_is_the_mean_of_its_seeds_beside_the_papers_figure():
    values = [40.0, 42.0, 41.5]
    point = of(CNN, [record(CNN, seed, 4.0, v) for seed, v in enumerate(values)]).at(4.0)
    assert point.values == pytest.approx(values) and point.seeds == 3 and point.complete
    assert point.mean == pytest.approx(mean(values)) == point.complete_mean
    assert point.spread == pytest.approx(stdev(values))
    assert point.paper == 40.85 and point.difference == pytest.approx(mean(values) - 40.85)


def test_no_and_one_and_two_seeds_are_partial_and_never_settled():
    for seeds in range(3):
        point = of(CNN, [record(CNN, seed, 1.0, 50 + seed) for seed in range(seeds)]).at(1.0)
        assert point.seeds == seeds and not point.complete
        assert math.isnan(point.complete_mean)
        assert (point.mean is None) == (point.difference is None) == (seeds == 0)
        assert (point.spread is None) == (seeds < 2)


def test_a_row_is_complete_when_every_scale_has_every_seed():
    records = [record(CNN, seed, scale, 50) for seed in range(3) for scale in SCALES]
    assert of(CNN, records).complete
    found = of(CNN, records[:-1])
    assert not found.complete and found.mean_over() == pytest.approx(50)
    assert math.isnan(found.mean_over(SCALES))


def test_a_seed_counts_once_and_other_scales_do_not_count():
    once = record(CNN, 0, 2.0, 90)
    found = of(CNN, [once, replace(once, accuracy=0.1), record(CNN, 1, 3.0, 10)])
    assert found.at(2.0).values == pytest.approx((90.0,))
    assert sum(point.seeds for point in found.points) == 1


def test_scales_written_with_four_digits_are_the_scales():
    found = of(CNN, [record(CNN, 0, round(scale, 4), 50 + k) for k, scale in enumerate(SCALES)])
    assert [point.mean for point in found.points] == pytest.approx(range(50, 67))


def test_few_samples_are_averaged_over_scales_then_over_seeds():
    figures = {seed: [80 + seed + k for k in range(9)] for seed in range(3)}
    records = [
        record(FEW, seed, scale, value)
        for seed, values in figures.items()
        for scale, value in zip(SCALES_1_TO_4, values, strict=True)
    ]
    (point,) = of(FEW, records).points
    assert point.values == pytest.approx([mean(values) for values in figures.values()])
    assert point.paper == 80.89
    (point,) = of(FEW, records[:-1]).points  # the last seed lacks a scale: it does not count
    assert point.values == pytest.approx([mean(figures[0]), mean(figures[1])])
    assert not of(FEW, records[:-1]).complete


def test_all_rows_are_there_whether_run_or_not():
    assert [(s.table, s.name) for s in Summaries()] == [
        (row.table, row.name) for row in paper_rows()
    ]
    assert {s.network for s in Summaries().table("table1", "CNN", "SWMax")} == {"CNN", "SWMax"}


def test_the_papers_figures_differ_from_themselves_by_nothing():
    found = Summaries(made_records())
    assert all(s.complete for s in found)
    assert all(abs(p.difference) < 1e-9 for s in found for p in s.points)


def test_a_run_that_two_tables_show_counts_once():
    records = made_records(seeds=2)
    names = {row.name for row in paper_rows()}
    spent = effort(records)
    assert spent.runs == 2 * len(names) < 2 * len(paper_rows())
    assert spent.missing == len(names)
    runs = {(r.row, r.seed): r.seconds for r in records}
    assert spent.seconds == pytest.approx(sum(runs.values()))
    assert spent.hardware == (HARDWARE,) and spent.versions == ("0.1.0 abc1234",)
    assert effort([]).missing == 3 * len(names)


def test_the_settings_of_a_run_are_known_by_their_digest():
    run = record(CNN, 1, 1.0, 50)
    assert find_precision(run) == "bf16"
    plain = replace(CNN.config, seed=1).digest()
    assert find_precision(replace(run, config=plain)) == "float32"
    assert find_precision(replace(run, config="0" * 12)) is None
    assert find_precision(replace(run, row="mine")) is None
