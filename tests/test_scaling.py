"""The pages on scaling and studies: tables are those of the measurement, examples are sound."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from foveate.cli.app import app
from foveate.sweeps.study import read_study

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "scaling.md").read_text()
STUDIES = (ROOT / "docs" / "studies.md").read_text()
COMMANDS = typer.main.get_command(app).commands
sys.path.append(str(ROOT / "benchmarks"))
import scaling  # noqa: E402
import scaling_tables  # noqa: E402

sys.path.pop()
FOUND = json.loads(scaling_tables.RESULTS.read_text())[0]["printed"]


def parses(command):
    """Whether the command line knows this command, and all of its options."""
    program, name, *arguments = shlex.split(command)
    return program == "foveate" and COMMANDS[name].make_context(name, arguments) is not None


def test_the_tables_are_those_of_the_results():
    assert scaling_tables.refresh(PAGE, FOUND) == PAGE
    assert len(re.findall("<!-- scaling:begin", PAGE)) == len(scaling_tables.tables(FOUND))


def test_other_results_give_another_page():
    other = json.loads(json.dumps(FOUND))
    other["channels"]["17"] = 123456.0
    assert "| 17 | 123,000 |" in scaling_tables.refresh(PAGE, other)


def test_the_files_of_a_run_are_those_of_the_page():
    found = scaling.rounded(scaling.of_a_run())
    assert found.keys() == FOUND["run"].keys()
    assert found["checkpoint, kB"] == FOUND["run"]["checkpoint, kB"]


def test_many_gpus_help_a_long_step_more_than_a_short_one():
    rows = [line.split("|")[1:-1] for line in scaling_tables.one_run(FOUND).splitlines()[2:]]
    speed = {int(count): (float(short), float(long)) for count, _, short, _, long in rows}
    assert speed[1] == (1.0, 1.0)
    assert all(speed[n][0] < 2 < speed[n][1] < n for n in (8, 16, 64))


def test_the_study_of_the_page_can_be_read(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", STUDIES, re.DOTALL)
    (tmp_path / "study.toml").write_text(text)
    study = read_study(tmp_path / "study.toml")
    assert len(study.jobs) == 2 * 2 * 3
    assert (study.cpus, study.gpus) == (1, None)


def test_the_commands_of_the_page_are_commands():
    found = [line for line in STUDIES.splitlines() if line.startswith("foveate ")]
    assert len(found) == 4
    assert all(parses(line) for line in found)


def test_the_slurm_script_is_a_script_and_calls_the_command():
    path = ROOT / "examples" / "cluster" / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    (line,) = [line for line in path.read_text().splitlines() if line.startswith("foveate ")]
    assert parses(line)


def test_the_kubernetes_file_asks_for_what_the_page_says():
    yaml = pytest.importorskip("yaml", reason="needs PyYAML, which Ray brings")
    spec = yaml.safe_load((ROOT / "examples" / "cluster" / "kuberay.yaml").read_text())["spec"]
    assert parses(spec["entrypoint"])
    (workers,) = spec["rayClusterSpec"]["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert workers["replicas"] * gpus == scaling_tables.GPUS
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounts = [mount["name"] for mount in container["volumeMounts"]]
    assert mounts == [volume["name"] for volume in head["volumes"]] == ["study", "results"]
