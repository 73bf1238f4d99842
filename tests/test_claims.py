"""Each claim: held by results made to hold it, broken by others, open while partial."""

import math

import pytest
from made_results import lower, made_records, made_winners, only, without

from foveate.paper.claims import (
    CHANCE,
    Check,
    Claim,
    Measured,
    claims,
    largest,
    number,
    selection,
    smallest,
)
from foveate.paper.tables import Summaries, paper_rows

SINGLE = [row.name for row in paper_rows() if row.network in ("CNN", "FovConc")]


def judged(records):
    return {claim.name: claim for claim in claims(Summaries(records))}


def test_the_papers_own_figures_bear_out_every_claim():
    assert {name: c.verdict for name, c in judged(made_records()).items()} == dict.fromkeys(
        "abcdefg", "holds"
    )


def test_noise_of_seeds_does_not_break_them():
    assert {claim.verdict for claim in judged(made_records(noise=0.03)).values()} == {"holds"}


# What breaks each claim, and the check of it that then fails.
BREAKS = [
    ("a", only(["fovmax-tr4"], lower(0.3)), 0),
    ("a", only(["fovavg-tr1"], lower(0.3, 1, 4)), 1),
    ("b", only(["cnn-tr1"], lower(-9, 0.5, 0.5)), None),  # still 25.26
    ("b", only(["cnn-tr1"], lower(-10, 0.5, 0.5)), 0),
    ("b", only(["cnn-tr2"], lambda f, s: max(f, 85)), 0),
    ("c", only(["fovconc-tr4"], lower(-24, 8, 8)), None),  # still 25.28
    ("c", only(["fovconc-tr4"], lower(-25, 8, 8)), 0),
    ("c", only(SINGLE, lambda f, s: max(f, CHANCE)), 1),
    ("d", only(["swmax-tr2"], lower(9)), 0),
    ("d", only(["swmax-tr4"], lambda f, s: max(f, 99.2)), 1),
    ("e", only(["fovmax-tr2-5ch"], lower(-1.5)), 0),
    ("e", only(["fovavg-tr2-5ch"], lower(-0.25, 1.4, 1.5)), None),  # still 0.385: it holds
    ("e", only(["fovavg-tr2-5ch"], lower(-0.25)), 1),
    ("e", only(["fovmax-tr2-9ch"], lower(-0.2)), 2),
    ("e", only(["fovavg-tr2-9ch"], lower(0.1)), 3),
    ("f", only(["fovmax-tr14"], lower(0.3)), 0),
    ("f", only(["fovavg-tr14"], lower(-0.3)), 1),
    ("f", only(["cnn-tr14"], lower(10)), 2),
    ("f", only(["fovconc5-tr2"], lambda f, s: max(f, 95)), 3),
    ("g", only(["fovmax-few100"], lower(-30)), 0),
    ("g", only(["fovconc-few200", "fovconc-few100"], lower(-7)), 1),
    ("g", only(["cnn-few200"], lower(-14)), 2),
    ("g", only(["swmax-few100", "swmax-few200"], lower(-10)), 3),
]


@pytest.mark.parametrize(("name", "change", "broken"), BREAKS)
def test_a_claim_that_results_break_fails_by_the_check_that_broke(name, change, broken):
    found = judged(made_records(change=change))[name]
    expected = ["holds"] * len(found.checks)
    if broken is not None:
        expected[broken] = "fails"
    assert [check.verdict for check in found.checks] == expected
    assert found.verdict == ("holds" if broken is None else "fails")


# A row on which each claim rests.
RESTS = {
    "a": "fovavg-tr4", "b": "cnn-tr1", "c": "fovconc-tr4", "d": "swmax-tr2", "e": "fovmax-tr2-9ch",
    "f": "fovconc5-tr14", "g": "swmax-few100",
}  # fmt: skip


@pytest.mark.parametrize(("name", "row"), RESTS.items())
def test_a_missing_seed_leaves_it_open(name, row):
    found = judged(without(row))
    assert found[name].verdict == "undecided"
    others = {claim.verdict for claim in found.values()}
    assert others == {"undecided", "holds"}  # what does not rest on it is judged


@pytest.mark.parametrize("name", RESTS)
def test_a_scale_that_was_not_tested_leaves_it_open(name):
    scale = 2**0.5 if name in "ae" else 2.0
    assert judged(without(RESTS[name], 2, scale))[name].verdict == "undecided"


def test_without_results_everything_is_open():
    assert {claim.verdict for claim in [*judged([]).values(), selection([])]} == {"undecided"}


def test_the_winner_has_to_move_with_the_digit():
    assert selection(made_winners()).verdict == "holds"
    still = selection(made_winners(moves=lambda scale: 2.0))
    assert still.verdict == "fails" and still.checks[0].value == pytest.approx(2)
    lazy = made_winners(moves=lambda scale: 2 * (scale / 2) ** 0.8)  # 1.6 octaves of 2
    assert selection(lazy).verdict == "fails"
    partly = [w for w in made_winners() if not (w.row == "fovavg-tr14" and w.seed == 2)]
    assert selection(partly).verdict == "undecided"


def test_a_check_is_told_in_words():
    part = Check("loss", "≥", -0.15, -0.123, "at 4")
    assert part.measured == "loss: −0.12 points (at 4)" and part.threshold == "≥ −0.15 points"
    assert Check("loss", "≥", 1, math.nan).measured == "loss: some runs are missing"
    assert number(25) == "25" and number(-1.0) == "−1" and number(0.126) == "0.13"


@pytest.mark.parametrize(
    ("relation", "below", "at", "above"),
    [("<", 1, 0, 0), ("≤", 1, 1, 0), ("≥", 0, 1, 1), (">", 0, 0, 1)],
)
def test_a_check_compares_as_it_says(relation, below, at, above):
    for value, right in ((0.9, below), (1.0, at), (1 + 1e-12, at), (1.1, above)):
        assert Check("", relation, 1, value).verdict == ("holds" if right else "fails")
    assert Check("", relation, 1, math.nan).verdict == "undecided"


def test_a_check_that_lacks_results_leaves_the_claim_open():
    parts = (Check("x", ">", 0, -1), Check("y", ">", 0, math.nan))
    assert Claim("n", "s", parts).verdict == "undecided"


@pytest.mark.parametrize("values", [(math.nan, 1, 2), (1, math.nan, 2), (1, 2, math.nan)])
def test_a_missing_number_is_both_the_smallest_and_the_largest(values):
    found = [Measured(value) for value in values]
    assert math.isnan(smallest(found).value) and math.isnan(largest(found).value)
