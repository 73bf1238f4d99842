"""The results of fovplus: measured by the benchmark, published with weights and cards."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fovplus_results
import pytest
import ship
from fovplus_results import page, publish, requirements

from foveate.errors import ConfigError
from foveate.models.pretrained import from_pretrained, pretrained_info
from foveate.paper.tables import SCALES
from foveate.sweeps.records import Record, read_records
from foveate.training.presets import preset

ROOT = Path(__file__).parent.parent
PUBLISHED = ROOT / "results" / "fovplus"
GOOD = Record(
    table="fovplus", row="", seed=0, scale=0.0, accuracy=0.996, validation=0.99, seconds=20.0,
    memory=1, config="", version="0.2.0", commit="abc1234", hardware="a GPU", count=10_000,
    parameters=108_390, training_seconds=18.0,
)  # fmt: skip


def made(**changes):
    """Records of all presets and of FovAvg, those of seed 3 of fovplus-tr2 changed at one scale."""
    rows = {**dict.fromkeys(fovplus_results.PRESETS, 18.0), "fovavg-tr2": 12.0}
    records = [
        replace(GOOD, row=row, seed=seed, scale=scale, training_seconds=seconds)
        for row, seconds in rows.items()
        for seed in range(5)
        for scale in SCALES
    ]
    at = changes.pop("scale", None)
    weak = ("fovplus-tr2", 3, at)
    return [replace(r, **changes) if (r.row, r.seed, r.scale) == weak else r for r in records]


def clothes(at_half):
    return [
        replace(GOOD, table="fashion", row="fovplus-tr2", seed=seed, scale=scale, accuracy=found)
        for seed in range(3)
        for scale in SCALES
        for found in [at_half if (seed, scale) == (2, 0.5) else 0.92]
    ]


def verdicts(records):
    return [claim.verdict for claim in requirements(fovplus_results.Rows(records))]


def test_the_requirements_are_judged_by_the_lowest_seed():
    good = [*made(), *clothes(0.90)]
    assert verdicts(good) == ["holds"] * 4
    assert verdicts([*made(scale=8.0, accuracy=0.919), *clothes(0.90)])[1] == "fails"
    assert verdicts([*made(scale=SCALES[-2], accuracy=0.97), *clothes(0.90)])[1] == "fails"
    assert verdicts([*made(scale=1.0, accuracy=0.9), *clothes(0.90)])[1] == "fails"
    assert verdicts([*made(), *clothes(0.89)])[3] == "fails"


def test_missing_runs_leave_a_requirement_undecided():
    assert verdicts(made()) == ["holds"] * 3 + ["undecided"]
    assert verdicts([r for r in made() if r.row != "fovavg-tr2"])[:3] == ["undecided"] * 3
    four = [r for r in made() if (r.row, r.seed) != ("fovplus-tr4", 0)]
    assert verdicts(four)[:3] == ["holds", "holds", "undecided"]


def test_the_table_has_the_mean_the_lowest_seed_and_the_paper():
    text = page(made(scale=8.0, accuracy=0.946), [])
    (line,) = [line for line in text.splitlines() if line.startswith("| 8 |")]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    # trained on 2: four seeds of 99.6 and one of 94.6, and the highest of the paper
    assert cells[3:6] == ["98.60", "94.60", "88.46"]


@pytest.mark.parametrize("scale", [1, 2, 4])
def test_the_presets_are_shipped_by_name(scale):
    config = replace(preset(f"fovplus-tr{scale}"), seed=3, precision="bf16")
    assert ship.row_name(config) == f"fovplus-tr{scale}"


def test_the_benchmark_is_published(tmp_path, monkeypatch):
    command = [sys.executable, ROOT / "benchmarks" / "fovplus.py", "--quick", "--device", "cpu"]
    command += ["--out", tmp_path / "out", "--runs", tmp_path / "runs"]
    command += ["--groups", "fovplus-tr2", "ablation-fovplus-tr2"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    places = {"out": tmp_path / "results", "cards": tmp_path / "cards", "weights": tmp_path / "w"}
    with pytest.raises(ConfigError, match="not a row of Table I or fovplus"):
        publish([tmp_path / "out"], **places)  # a quick run is not the preset
    monkeypatch.setattr(ship, "row_name", lambda config: f"fovplus-tr{config.scales}")
    publish([tmp_path / "out"], **places)
    info = pretrained_info("fovplus-tr2", places["weights"])
    from_pretrained("fovplus-tr2", places["weights"])
    records = [r for r in read_records(places["out"]) if r.table == "fovplus"]
    assert {r.scale: r.accuracy for r in records if r.seed == info.seed} == info.accuracy
    assert {r.count for r in records} == {1000}
    groups = json.loads((places["out"] / "about.json").read_text())
    assert [(g["table"], g["split"]) for g in groups] == [("fovplus", "test"), ("ablation", "val")]
    assert {r.config for r in records} == set(groups[0]["digests"])
    assert (places["cards"] / "fovplus-tr2.md").exists()
    assert page(read_records(places["out"]), groups) == (places["out"] / "README.md").read_text()


def test_the_published_page_is_that_of_the_published_numbers():
    if not (PUBLISHED / "README.md").exists():
        pytest.skip("the results are not part of this copy")
    groups = json.loads((PUBLISHED / "about.json").read_text())
    assert (PUBLISHED / "README.md").read_text() == page(read_records(PUBLISHED), groups)
