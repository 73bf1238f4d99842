"""The page of the reproduction, its command, and the tables in README and docs."""

import html
import re
from pathlib import Path
from statistics import mean, stdev

import pytest
from made_results import made_records, made_winners
from update_docs import BLOCK, BLOCKS, DOCS, FIGURES, fill_blocks, tables_markdown, update_docs

from foveate.cli.app import run
from foveate.errors import ConfigError
from foveate.paper.tables import published_folder
from foveate.report import figures
from foveate.report.reproduction import (
    CaptionedFigure,
    Reproduction,
    captioned_figures,
    format_difference,
    format_mean,
    reproduction_page,
)
from foveate.sweeps.records import write_results

ROOT = Path(__file__).parent.parent
NAMES = (
    "generalisation", "close-up", "spacing", "multi-scale", "few-samples",
    "winning-scale",
)  # fmt: skip


def better(row, scale, figure):
    return figure + 0.05


@pytest.fixture(scope="module")
def whole():
    return Reproduction(made_records(change=better), made_winners())


@pytest.fixture(scope="module")
def partial():
    records = [r for r in made_records() if not (r.row == "fovavg-tr2" and r.seed)]
    return Reproduction([r for r in records if r.row != "cnn-few100"], made_winners())


def words(found, drawn=None):
    page = reproduction_page(found, drawn or {}, "somewhere").html()
    inside = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", inside)).split())


def test_the_page_has_every_verdict_with_its_number(whole):
    text = words(whole)
    for claim in whole.claims:
        assert f"{claim.name} {claim.verdict} {claim.statement}" in text
        for check in claim.checks:
            assert f"{check.measured} {check.threshold}" in text
    assert "Of the paper's 7 claims, 7 hold. 180 runs took" in text
    assert "Seeds per row of its three tables: 3. " in text and "Partial" not in text


def test_the_page_has_ours_the_papers_and_the_difference(whole):
    text = words(whole)
    assert "0.5 61.89±0.00 61.84 +0.05" in text  # CNN tr1, the first cells of Table I
    assert "10,000 98.00±0.00 97.95 +0.05" in text  # CNN, the first cells of Table III
    page = reproduction_page(whole, {}, "somewhere").html()
    assert page.count("rgb(0 114 178") > 27 * 17  # every difference is positive, so blue


def test_the_page_says_how_it_was_run_and_how_long_it_took(whole):
    text = words(whole)
    minutes = f"{whole.effort.seconds / 60:.1f} minutes"
    assert f"machine time {minutes}" in text and "hardware NVIDIA H200" in text
    assert "precision bf16 (180 runs)" in text and "results somewhere" in text
    assert "cnn-tr1 3 6.0 99.00 20,000" in text  # seconds per run


def test_settings_that_are_not_this_versions_are_told(whole):
    other = [r for r in whole.records if r.row == "cnn-tr1"]
    changed = [type(r)(**{**r.__dict__, "config": "0" * 12}) for r in other]
    assert "unknown: settings of another version (3 runs)" in words(Reproduction(changed))


def test_a_partial_page_says_what_is_missing_and_of_how_many_seeds_a_figure_is(partial):
    text = words(partial)
    assert "Partial results: 2 rows are incomplete; 5 runs are missing." in text
    assert "Incomplete rows: fovavg-tr2, cnn-few100." in text
    assert "Seeds per row of its three tables: 0 to 3. " in text
    assert "98.58 (1 of 3) 98.58" in text and "cannot be judged yet" in text
    assert "a undecided the mean accuracy of FovMax and FovAvg" in text


def test_a_page_without_results_says_so():
    text = words(Reproduction())
    assert "No results yet; run foveate reproduce to create them." in text
    assert "a undecided" in text and "a holds" not in text


def test_all_figures_are_drawn(whole):
    drawn = captioned_figures(whole)
    assert tuple(drawn) == NAMES
    assert all(each.figure.axes and each.caption for each in drawn.values())


def one_figure(found):
    return {"spacing": CaptionedFigure("Spacing", figures.spacing(found.results), "A caption.")}


def test_the_command_writes_the_page_and_the_figures(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("foveate.report.reproduction.captioned_figures", one_figure)
    write_results(tmp_path / "paper", made_records(seeds=1), made_winners(seeds=1))
    assert run(["report", str(tmp_path / "paper"), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    assert "report.html" in printed and "undecided" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 1 and "A caption." in page
    files = sorted((tmp_path / "out" / "figures").iterdir())
    assert [file.name for file in files] == ["spacing.png", "spacing.svg"]
    assert files[0].read_bytes().startswith(b"\x89PNG") and "<svg" in files[1].read_text()


def test_the_command_without_results_says_what_to_do(tmp_path, capsys):
    assert run(["report", str(tmp_path / "nowhere")]) == 2
    error = capsys.readouterr().err
    assert "has no results.csv" in error and len(error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_the_published_results_are_the_default(tmp_path, monkeypatch, capsys):
    write_results(tmp_path / "own", made_records(seeds=1), [])
    monkeypatch.setattr("foveate.paper.tables.published_folder", lambda: tmp_path / "own")
    monkeypatch.setattr("foveate.report.reproduction.captioned_figures", lambda found: {})
    assert run(["report", "--out", str(tmp_path / "out")]) == 0
    assert "published with foveate" in (tmp_path / "out" / "report.html").read_text()
    assert "60 runs took" in capsys.readouterr().out


@pytest.mark.parametrize("name", DOCS)
def test_the_committed_docs_say_what_the_committed_results_say(name):
    """If this fails, run 'python tools/update_docs.py'."""
    found = Reproduction.read(published_folder())
    text = (ROOT / name).read_text()
    assert fill_blocks(text, tables_markdown(found)) == text


def test_the_page_on_the_reproduction_has_every_table():
    text = (ROOT / "docs/reproduction.md").read_text()
    named = {match[1] for match in BLOCK.findall(text)}
    elsewhere = {"headline", "spread", "photographs", "all-photographs", "cifar"}
    assert named == BLOCKS.keys() - elsewhere
    assert text.count("results:begin") == len(named) == text.count("results:end")


def test_tables_are_put_between_their_markers_and_nowhere_else(tmp_path, whole, partial):
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "reproduction.md"
    page.write_text("before\n<!-- results:begin table3 -->\nold\n<!-- results:end -->\nafter\n")
    (tmp_path / "README.md").write_text("nothing here\n")
    assert update_docs(whole, tmp_path) == [page]
    text = page.read_text()
    assert text.startswith("before\n<!-- results:begin table3 -->\n\n| network | 10,000 |")
    assert text.endswith("|\n\n<!-- results:end -->\nafter\n") and "old" not in text
    assert "| FovAvg | 98.81 (+0.05) |" in text
    update_docs(whole, tmp_path)
    assert page.read_text() == text
    update_docs(partial, tmp_path)
    assert "\nPartial: " in page.read_text() and "52.48" not in page.read_text()
    update_docs(Reproduction(), tmp_path)
    assert "No results yet" in page.read_text()


def test_pictures_are_drawn_where_the_pages_have_theirs(tmp_path, whole):
    (tmp_path / "docs" / "images").mkdir(parents=True)
    page = tmp_path / "README.md"
    page.write_text("<!-- results:begin made -->\n<!-- results:end -->\n")
    written = update_docs(whole, tmp_path)
    pictures = sorted((tmp_path / "docs" / "images").iterdir())
    assert sorted(written) == sorted([page, *pictures])
    assert [path.stem for path in pictures] == sorted(FIGURES)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in pictures)


def test_a_marker_without_a_table_and_a_folder_without_pages_are_errors(tmp_path, whole):
    with pytest.raises(ConfigError, match="unknown table 'mine'"):
        fill_blocks("<!-- results:begin mine -->\n<!-- results:end -->", tables_markdown(whole))
    with pytest.raises(ConfigError, match="use a checkout"):
        update_docs(whole, tmp_path)


def test_every_block_is_a_table_or_a_sentence(whole, partial):
    blocks = tables_markdown(whole)
    for name, text in blocks.items():
        lines = [line for line in text.splitlines() if line.startswith("|")]
        assert (name == "made") == (not lines)
        assert len({line.count("|") for line in lines}) <= 1  # all rows have the same cells
    assert blocks["headline"].count("\n") == 6
    assert "| CNN tr2 | 14.42 (+0.05) | 53.62 (+0.05) | 99.43 (+0.05) |" in blocks["headline"]
    assert "FovAvg 17 tr2 | 98.58 (1 of 3) (0.00)" in tables_markdown(partial)["table1"]
    assert "| FovAvg 17 tr2 | – | " in tables_markdown(partial)["spread"]
    noisy = Reproduction(made_records(noise=0.5))
    at = noisy.results.row("cnn-tr2").points[0].values
    assert f"| CNN tr2 | {mean(at):.2f} ± {stdev(at):.2f} | " in tables_markdown(noisy)["spread"]
    assert "180 runs" in blocks["made"]


def test_numbers_are_told_with_their_sign_and_their_seeds(whole, partial):
    assert [format_difference(v) for v in (0.126, -0.07, 0.001, -0.001, None)] == [
        "+0.13", "−0.07", "0.00", "0.00", None
    ]  # fmt: skip
    assert format_mean(whole.results.row("cnn-tr1").at(1.0)) == "99.37"
    assert format_mean(partial.results.row("fovavg-tr2").at(1.0)) == "99.38 (1 of 3)"
    assert format_mean(Reproduction().results.row("cnn-tr1").at(1.0)) is None
