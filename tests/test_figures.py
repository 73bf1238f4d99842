"""The figures draw the results, the paper's curves, and what generator and op really make."""

import math

import pytest
import torch
from illustration import foveated as draw_foveated
from made_results import made_records, made_winners
from matplotlib.figure import Figure

from foveate.data.large_scale import rescale
from foveate.data.sources import load_source
from foveate.models.channels import PAPER_SCALES
from foveate.paper.tables import SCALES, Summaries, paper_rows
from foveate.report import figures
from foveate.report.plots import sample_grid, save, scale_axis
from foveate.resampling import foveate

DRAWN = (
    figures.generalisation,
    figures.close_up,
    figures.spacing,
    figures.multiscale,
    figures.few_samples,
)
ROWS = {(row.table, row.name): row for row in paper_rows()}


def lines(axes, gid):
    return [line for line in axes.get_lines() if line.get_gid() == gid]


def ours(row, scale, figure):
    return figure - 0.1


@pytest.fixture(scope="module")
def results():
    return Summaries(made_records(noise=0.05, change=ours))


@pytest.fixture(scope="module")
def panels(results):
    """The axes of each figure that have curves, by the function that drew it."""
    return {draw: [a for a in draw(results).axes if lines(a, "paper")] for draw in DRAWN}


def test_each_panel_has_the_curves_it_should(panels):
    assert [len(panels[draw]) for draw in DRAWN] == [5, 2, 2, 5, 1]
    curves = [len(lines(panels[draw][0], "ours")) for draw in DRAWN]
    assert curves == [3, 4, 3, 2, 5]


@pytest.mark.parametrize(
    ("draw", "panel", "curve", "key"),
    [
        (figures.generalisation, 0, 0, ("table1", "fovmax-tr1")),
        (figures.generalisation, 3, 2, ("table1", "cnn-tr4")),
        (figures.generalisation, 4, 1, ("table1", "fovconc-tr2")),
        (figures.close_up, 1, 3, ("table1", "fovavg-tr14")),
        (figures.spacing, 0, 2, ("table2", "fovmax-tr2-5ch")),
        (figures.spacing, 1, 0, ("table2", "fovavg-tr2")),
        (figures.multiscale, 2, 1, ("table1", "swmax-tr2")),
        (figures.multiscale, 4, 0, ("table1", "fovconc5-tr14")),
    ],
)
def test_a_curve_is_ours_and_the_papers_is_beside_it(panels, results, draw, panel, curve, key):
    axes = panels[draw][panel]
    own, paper = lines(axes, "ours")[curve], lines(axes, "paper")[curve]
    found = results.row(key[1], key[0])
    assert list(own.get_xdata()) == list(paper.get_xdata()) == list(SCALES)
    assert list(own.get_ydata()) == pytest.approx([p.mean for p in found.points])
    assert list(paper.get_ydata()) == [point.paper for point in ROWS[key].points]
    assert own.get_color() == paper.get_color()
    assert own.get_linestyle() == "-" and paper.get_linestyle() == "--"
    heights = axes.collections[curve].get_paths()[0].vertices[:, 1]
    assert heights.max() == pytest.approx(max(p.mean + p.spread for p in found.points))
    assert heights.min() == pytest.approx(min(p.mean - p.spread for p in found.points))


def test_scale_axes_are_logarithmic_with_whole_octaves(panels):
    for draw in DRAWN[:-1]:
        for axes in panels[draw]:
            assert axes.get_xscale() == "log"
            names = [label.get_text() for label in axes.get_xticklabels()]
            assert names == ["1/2", "1", "2", "4", "8"]


@pytest.mark.parametrize(
    ("scales", "names"),
    [
        ([0.7, 1, 1.4], ["0.7", "1", "1.4"]),
        ([0.75 * 2 ** (k / 8) for k in range(9)], ["0.75", "0.892", "1.06", "1.26", "1.5"]),
        ([0.25, 0.7, 1], ["1/4", "1/2", "1"]),
    ],
)
def test_the_axis_of_few_octaves_names_scales_that_do_not_overlap(scales, names):
    axes = Figure().subplots()
    scale_axis(axes, scales)
    assert [label.get_text() for label in axes.get_xticklabels()] == names


def test_few_samples_go_over_the_size_of_the_training_set(panels, results):
    (axes,) = panels[figures.few_samples]
    for network, own, paper in zip(
        figures.NETWORKS, lines(axes, "ours"), lines(axes, "paper"), strict=True
    ):
        rows = results.table("table3", network)
        assert list(own.get_xdata()) == [int(row.trained) for row in rows]
        assert list(own.get_ydata()) == pytest.approx([row.points[0].mean for row in rows])
        assert list(paper.get_ydata()) == [row.points[0].paper for row in rows]
    assert axes.get_xticklabels()[0].get_text() == "100"


def hollow(axes):
    """The points that are drawn as partial."""
    marks = [line for line in axes.get_lines() if line.get_markerfacecolor() == "none"]
    return [(x, y) for line in marks for x, y in zip(*line.get_data(), strict=True)]


def test_partial_points_are_hollow_missing_ones_are_gaps_and_the_legend_says_so():
    records = [
        r
        for r in made_records(change=ours)
        if not (r.row == "cnn-tr2" and (r.scale > 5 or (r.seed == 2 and r.scale > 4.1)))
    ]
    figure = figures.generalisation(Summaries(records))
    axes = figure.axes[3]
    (x, y) = lines(axes, "ours")[1].get_data()
    assert [math.isnan(v) for v in y] == [scale > 5 for scale in x]
    ((at, value),) = hollow(axes)[:1]
    assert at == pytest.approx(2**2.25) and value == pytest.approx(29.91 - 0.1)
    assert "partial" in figure.axes[-1].get_legend().get_texts()[-1].get_text()


def test_complete_results_have_nothing_hollow(panels, results):
    for draw in DRAWN:
        shown = [p for axes in panels[draw] for p in hollow(axes) if not math.isnan(p[1])]
        assert shown == []
    words = [t.get_text() for t in figures.spacing(results).legends[0].get_texts()]
    assert words == ["17 channels", "9 channels", "5 channels", "paper"]


@pytest.mark.parametrize("draw", DRAWN)
def test_without_results_the_papers_curves_are_drawn(draw, tmp_path):
    figure = draw(Summaries())
    own = [line for axes in figure.axes for line in lines(axes, "ours")]
    assert own and all(math.isnan(y) for line in own for y in line.get_ydata())
    save(figure, tmp_path / "none.svg")  # draws without a warning


@pytest.fixture(scope="module")
def foveated():
    return draw_foveated(digit=2, scale=4.0)


def test_the_patches_are_those_of_the_op(foveated):
    image = rescale(load_source("mnist-5k").train.images[[2]], 4.0)
    patches = foveate(image, PAPER_SCALES, 28)[0, :, 0]
    shown = [a for a in foveated.axes if a.get_title()]
    assert [a.get_title() for a in shown] == [f"{s:.3g}" if s > 0.5 else "1/2" for s in SCALES]
    for axes, patch in zip(shown, patches, strict=True):
        torch.testing.assert_close(torch.tensor(axes.get_images()[0].get_array()), patch)


def test_the_windows_are_nested_about_the_centre_in_the_colours_of_their_patches(foveated):
    first = foveated.axes[0]
    shown = [a for a in foveated.axes if a.get_title()]
    assert len(first.patches) == 17
    for window, scale, axes in zip(first.patches, PAPER_SCALES, shown, strict=True):
        x, y = window.get_xy()
        assert window.get_width() == window.get_height() == pytest.approx(28 * scale)
        assert (x + 14 * scale, y + 14 * scale) == pytest.approx((56, 56))
        assert window.get_edgecolor() == axes.spines["top"].get_edgecolor()
    low, high = first.get_images()[0].get_extent()[:2]
    assert (low, high) == (56 - 112, 56 + 112)


def test_the_histograms_are_shares_and_their_mean_moves_with_the_digit():
    names = ["fovmax-tr2", "swmax-tr4"]
    figure = figures.winning_scales(made_winners(names=names))
    titles = [axes.get_title() for axes in figure.axes]
    assert titles[1] == "FovMax, trained on scale 2" and titles[8] == "SWMax, trained on scale 4"
    assert titles[0] == "FovMax, trained on scale 1\nno results yet"
    (mesh,) = figure.axes[1].collections
    shares = mesh.get_array().reshape(17, 17)
    assert shares.sum(0).tolist() == pytest.approx([1] * 17, abs=1e-5)
    assert shares[:, 8].argmax() == 8 and shares[:, 12].argmax() == 12  # channel of the true scale
    means, dotted = (line.get_ydata() for line in figure.axes[1].get_lines())
    assert means[12] - means[4] == pytest.approx(2, abs=0.1)
    assert dotted[12] - dotted[4] == pytest.approx(2) and dotted[8] == pytest.approx(means[8])
    assert not figure.axes[0].collections


def test_partial_histograms_say_so(tmp_path):
    some = [w for w in made_winners(seeds=1, names=["fovavg-tr4"]) if w.scale < 4]
    figure = figures.winning_scales(some)
    assert figure.axes[5].get_title() == "FovAvg, trained on scale 4\n1 of 3 seeds"
    save(figure, tmp_path / "partial.png")  # scales without images give no warning


@pytest.mark.parametrize("kind", ["png", "svg", "pdf"])
def test_equal_figures_have_equal_files(tmp_path, kind):
    records = Summaries(made_records())
    files = [save(figures.spacing(records), tmp_path / f"{n}.{kind}") for n in range(2)]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_samples_have_their_own_contrast_unless_they_exceed_the_range_of_colours():
    shades = torch.tensor([0.4, 0.5, 0.6]).reshape(1, 1, 1, 3)
    drawn = [axes.get_images()[0] for axes in sample_grid([shades, 5 * shades - 2], ["", ""]).axes]
    own, stretched = (image.get_array().ravel() for image in drawn)
    assert own.tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert stretched.tolist() == pytest.approx([0, 0.5, 1])
