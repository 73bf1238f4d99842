"""The paper's tables as data: every row is there, with its figures and a run that fits them."""

import pytest

from foveate.errors import ConfigError
from foveate.paper.tables import SCALES, SCALES_1_TO_4, find_rows, paper_jobs, paper_rows
from foveate.training.presets import preset


def test_all_rows_are_there():
    count = {table: len(find_rows([table])) for table in ("table1", "table2", "table3")}
    assert count == {"table1": 21, "table2": 6, "table3": 35}
    assert len(SCALES) == 17 and len(SCALES_1_TO_4) == 9


def test_figures_stand_at_their_scales():
    (row,) = find_rows(["table1"], ["fovmax-tr2"])
    assert row.at(8.0).paper == 75.85
    (row,) = find_rows(["table2"], ["fovavg-tr2-5ch"])
    assert (row.at(0.5).paper, row.at(8).paper, row.channels) == (98.84, 86.20, 5)
    (row,) = find_rows(["table3"], ["swmax-few200"])
    assert ([p.paper for p in row.points], row.trained) == ([62.83], "200")


@pytest.mark.parametrize("row", paper_rows(), ids=lambda row: f"{row.table}-{row.name}")
def test_the_run_of_a_row_is_what_the_row_says(row):
    config = preset(row.name)
    form = {"CNN": "plain", "SWMax": "sliding"}.get(row.network, "foveated")
    pool = {"FovMax": "max", "FovAvg": "avg", "FovConc": "concat", "SWMax": "max"}
    assert config.model.form == form
    assert row.network == "CNN" or config.model.pool == pool[row.network]
    assert row.channels in (0, len(config.model.scales))
    trained = {"tr1": "1", "tr2": "2", "tr4": "4", "tr14": "1-4"}
    assert config.scales == trained.get(row.trained, "1-4")
    assert config.samples == (int(row.trained) if row.table == "table3" else 0)
    figures = 1 if row.table == "table3" else 17
    assert len(row.points) == figures and len(row.scales) == (9 if figures == 1 else 17)


def test_rows_that_two_tables_share_run_once():
    jobs = paper_jobs(paper_rows(), 3, "bf16")
    assert len(jobs) == 3 * (21 + 4 + 35)
    assert len({job.folder for job in jobs}) == len(jobs)
    (shared,) = [j for j in jobs if j.name == "fovavg-tr2" and j.config.seed == 1]
    assert shared.rows == (("table1", "fovavg-tr2"), ("table2", "fovavg-tr2"))
    assert {job.config.precision for job in jobs} == {"bf16"}


@pytest.mark.parametrize(
    ("tables", "names", "says"),
    [
        (["table4"], [], "choose from table1, table2, table3"),
        (["table1"], ["fovavg-tr3"], "did you mean fovavg-tr"),
        (["table3"], ["fovavg-tr2"], "no row 'fovavg-tr2' in table3"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(tables, names, says):
    with pytest.raises(ConfigError) as error:
        find_rows(tables, names)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_network_picks_all_its_rows():
    assert len(find_rows(names=["fovconc"])) == 3 + 7
    assert [row.name for row in find_rows(["table1"], ["cnn", "fovconc5-tr2"])] == [
        "cnn-tr1", "cnn-tr2", "cnn-tr4", "cnn-tr14", "fovconc5-tr2",
    ]  # fmt: skip
