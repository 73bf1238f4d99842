"""The geometric set of scales: its values, its words and what it refuses."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foveate.errors import ConfigError
from foveate.scales import ScaleGrid, ScaleRange, as_scales, parse_scales, parse_windows

PAPER = ScaleGrid(0.5, 8, per_octave=4)


def test_the_papers_set_has_17_scales_and_exact_octaves():
    assert len(PAPER) == 17
    assert PAPER.values[::4] == (0.5, 1.0, 2.0, 4.0, 8.0)
    # two roundings (of the power and of the product) from the true value
    assert [*PAPER] == pytest.approx([2 ** (k / 4) for k in range(-4, 13)], rel=2**-51)


def test_neighbours_differ_by_the_spacing():
    assert PAPER.spacing == 2**0.25
    ratios = np.array(PAPER.values[1:]) / np.array(PAPER.values[:-1])
    np.testing.assert_allclose(ratios, PAPER.spacing, rtol=2**-50)


@given(
    low=st.floats(1e-3, 1e3),
    steps=st.integers(0, 60),
    per_octave=st.one_of(st.integers(1, 12), st.floats(0.3, 12)),
)
def test_any_whole_number_of_steps_is_a_grid(low, steps, per_octave):
    grid = ScaleGrid(low, low * 2 ** (steps / per_octave), per_octave=per_octave)
    assert len(grid) == steps + 1
    assert grid[0] == grid.low == low
    assert grid[-1] == pytest.approx(grid.high, rel=1e-12)
    assert as_scales(grid) == grid.values == tuple(grid)
    ends = f"low={grid.low!r}, high={grid.high!r}"
    assert repr(grid) == f"ScaleGrid({ends}, per_octave={grid.per_octave!r})"
    assert ScaleGrid.from_dict(json.loads(json.dumps(grid.to_dict()))) == grid


def test_a_grid_is_a_collection():
    assert PAPER[0] == 0.5
    assert PAPER[-1] == 8
    assert 2**-0.75 in PAPER
    assert 3 not in PAPER
    assert "1" not in PAPER


def test_equal_grids_are_one_key():
    assert ScaleGrid(0.5, 8.0, 4.0) == PAPER
    assert len({PAPER, ScaleGrid(0.5, 8.0, per_octave=4)}) == 1
    assert ScaleGrid(0.5, 8, per_octave=2) != PAPER


@pytest.mark.parametrize(
    ("grid", "text"),
    [
        (PAPER, "17 scales from 1/2 to 8, 4 per octave"),
        (ScaleGrid(0.75, 1.5, per_octave=1), "2 scales from 0.75 to 1.5, 1 per octave"),
        (ScaleGrid(0.25, 4, per_octave=0.5), "3 scales from 1/4 to 4, 0.5 per octave"),
        (ScaleGrid(2, 2), "1 scale, 2"),
    ],
)
def test_a_grid_reads_well(grid, text):
    assert str(grid) == text


def test_repr_and_dict():
    assert repr(PAPER) == "ScaleGrid(low=0.5, high=8.0, per_octave=4)"
    assert PAPER.to_dict() == {"low": 0.5, "high": 8.0, "per_octave": 4}


def test_a_grid_cannot_change():
    with pytest.raises(AttributeError):
        PAPER.low = 1.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 8), "low must be finite and above 0, got 0"),
        ((-1, 8), "got -1"),
        ((math.nan, 8), "got nan"),
        ((0.5, math.inf), "high must be finite and above 0, got inf"),
        ((8, 0.5), "high must be at least low, got 8 to 0.5"),
        (("1", 2), "low must be a number above 0, got '1'"),
        ((True, 2), "got True"),
        ((1, 2, 0), "per_octave must be finite and above 0, got 0"),
        ((1, 7, 2), r"high=7 .* low=1 .* per_octave=2; the nearest valid high is 8\.0"),
    ],
)
def test_what_cannot_be_a_grid(arguments, words):
    with pytest.raises(ConfigError, match=words):
        ScaleGrid(*arguments)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"low": 1}, "high is missing"),
        ({"low": 1, "high": 2, "step": 3}, "no setting 'step'; valid settings are high, low"),
        ([1, 2], "a scale grid must be a table of settings, got list"),
    ],
)
def test_a_dict_with_other_keys_is_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        ScaleGrid.from_dict(values)


def test_as_scales_reads_lists_arrays_and_iterators():
    assert as_scales([1, 2.5]) == as_scales(np.array([1, 2.5])) == as_scales(iter((1, 2.5)))
    assert all(type(scale) is float for scale in as_scales([1, np.float32(2)]))


@pytest.mark.parametrize(
    ("scales", "words"),
    [
        ([], r"no scales given.*\[1\.0\]"),
        ([1, 0], "finite and above 0, got 0"),
        ([math.inf], "got inf"),
        ([math.nan], "got nan"),
        ([1, 2, 2], "out of order: 2 follows 2"),
        ([1, 4, 2], "out of order: 2 follows 4; list each scale once, smallest first"),
        (["1"], "got '1'"),
        (2.0, r"such as \[1\.0\], got 2\.0"),
        (None, "got None"),
    ],
)
def test_what_cannot_be_scales(scales, words):
    with pytest.raises(ConfigError, match=words):
        as_scales(scales)


@pytest.mark.parametrize("per_octave", [1000, 1e9, 1e308])
def test_a_grid_of_too_many_scales_is_refused(per_octave):
    with pytest.raises(ConfigError, match=r"too many scales: .* the limit is 1,000"):
        ScaleGrid(0.5, 8, per_octave=per_octave)


# Scales as text


def test_one_grammar_for_lists_ranges_and_grids():
    assert as_scales("0.5,1,2") == (0.5, 1.0, 2.0)
    assert as_scales("all") == as_scales("0.5:8:4") == as_scales("0.5-8") == tuple(PAPER)
    assert as_scales("0.5:2:1,3") == (0.5, 1.0, 2.0, 3.0)
    assert as_scales("1-1.1") == (1.0, 1.1)  # both ends of a range, whatever its length
    assert as_scales("1e-1-0.1") == (0.1,)


def test_ranges_are_drawn_from_and_grids_are_lists():
    ends = [(item.low, item.high) for item in parse_scales("1-4,0.5,1:4:1")]
    assert ends == [(1, 4), (0.5, 0.5), (1, 1), (2, 2), (4, 4)]
    assert str(ScaleRange(1, 4)) == "1-4" and str(ScaleRange(0.5, 0.5)) == "0.5"


@pytest.mark.parametrize("text", ["0.5:8:4", "all", "0.5-8"])
def test_a_grid_as_text(text):
    assert ScaleGrid.parse(text) == PAPER
    assert ScaleGrid.parse("2") == ScaleGrid(2, 2)
    with pytest.raises(ConfigError, match=r"a scale grid is low:high:per_octave.*got '0\.5,8,4'"):
        ScaleGrid.parse("0.5,8,4")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "scales must look like") for text in ("x", "1-", "", "1-2-3", "1:2", "1,,2")),
        ("4-1", "range 4-1 is reversed"),
        *(
            (text, "must lie between 1/16 and 64")
            for text in ("0", "-2", "nan", "1-inf", "1:128:1")
        ),
        ("0.5,8,4", r"4 follows 8; .* \(a grid is low:high:per_octave\)"),
        ("1:2:100000", "too many"),
        (",".join(["1"] * 1001), "too many"),
    ],
)
def test_what_cannot_be_scales_as_text(text, words):
    with pytest.raises(ConfigError, match=words):
        as_scales(text)


@given(
    smallest=st.floats(1, 1000),
    octaves=st.floats(0, 6),
    size=st.integers(1, 512),
    per_octave=st.sampled_from([1, 2, 3, 4, 1.5]),
)
def test_windows_start_at_the_smallest_and_end_less_than_a_step_above_the_largest(
    smallest, octaves, size, per_octave
):
    largest = smallest * 2**octaves
    grid = ScaleGrid.windows(smallest, largest, size, per_octave)
    windows = [size * scale for scale in grid]
    assert windows[0] == pytest.approx(smallest, rel=1e-15)
    assert largest * (1 - 1e-6) <= windows[-1] <= largest * grid.spacing
    assert len(grid) == 1 or windows[-2] < largest  # no window more than needed
    assert grid.per_octave == per_octave


def test_windows_as_numbers_and_as_text():
    grid = ScaleGrid.windows(56, 448, size=112)
    assert grid == ScaleGrid(0.5, 4, per_octave=2)
    assert parse_windows("56-448", 112) == parse_windows(" 56.0-448 ", 112, per_octave=2) == grid
    assert parse_windows("112", 112).values == (1.0,)
    assert parse_windows("56:896:4", 160) == ScaleGrid.windows(56, 896, size=160, per_octave=4)
    assert parse_windows("56:448:2", 112, per_octave=7) == grid
    assert ScaleGrid.windows(10, 25, size=10, per_octave=1).values == (1.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 4, 8), "smallest must be finite and above 0, got 0"),
        ((4, math.inf, 8), "largest must be finite"),
        ((4, 8, 0), "size must be finite and above 0, got 0"),
        ((4, 8, "8"), "size must be a number above 0, got '8'"),
        ((8, 4, 8), "largest must be at least smallest, got 8 to 4; swap"),
        ((1, 1e300, 8, 100), "too many"),
        ((4, 8, 8, 0), "per_octave must be finite and above 0"),
    ],
)
def test_windows_that_cannot_be(arguments, words):
    with pytest.raises(ConfigError, match=words) as caught:
        ScaleGrid.windows(*arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "56-", "-56", "56:448", "56:448:", "56-448:4", "a-b", "56-448-2", "1e3-1e4", "٣-٤"]
)
def test_windows_as_text_that_cannot_be(text):
    with pytest.raises(ConfigError, match="windows must look like 56-448"):
        parse_windows(text, 112)
    with pytest.raises(ConfigError, match="must be finite"):
        parse_windows("9" * 400, 112)
