"""The project files agree: version, changelog, citation, supported versions and workflows."""

import re
import tomllib
from pathlib import Path

import pytest

import foveate

ROOT = Path(__file__).parent.parent
GITHUB = ROOT / ".github"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FORMS = ("bug_report", "feature_request")

yaml = pytest.importorskip("yaml", reason="needs PyYAML, a dependency of mkdocs and Ray")


def parsed(path):
    return yaml.safe_load((GITHUB / path).read_text(encoding="utf-8"))


def matrix():
    return parsed("workflows/ci.yml")["jobs"]["versions"]["strategy"]["matrix"]["include"]


def test_the_version_has_a_dated_entry_in_the_changelog():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    releases = re.findall(r"^## ([\d.]+) \(\d{4}-\d{2}-\d{2}\)$", text, re.MULTILINE)
    assert releases[0] == foveate.__version__
    order = [tuple(map(int, release.split("."))) for release in releases]
    assert order == sorted(order, reverse=True)


def test_the_citation_has_the_same_version():
    path = ROOT / "CITATION.cff"
    if not path.exists():
        pytest.skip("no CITATION.cff")
    assert yaml.safe_load(path.read_text(encoding="utf-8"))["version"] == foveate.__version__


def test_ci_covers_the_python_versions_of_the_package():
    pattern = r"Programming Language :: Python :: (3\.\d+)"
    declared = [m[1] for line in PROJECT["classifiers"] if (m := re.fullmatch(pattern, line))]
    assert declared == [job["python"] for job in matrix()]
    assert PROJECT["requires-python"] == f">={declared[0]}"


def test_ci_covers_the_lowest_and_the_newest_torch():
    (allowed,) = (d for d in PROJECT["dependencies"] if d.startswith("torch"))
    lowest = re.fullmatch(r"torch>=(\d+\.\d+)", allowed)[1]
    tested = [job["torch"] for job in matrix()]
    assert tested[0] == f"=={lowest}.*"
    assert tested[-1] == f">={lowest}"  # pip installs the newest release


def test_the_pinned_job_runs_the_checks_of_every_change():
    steps = parsed("workflows/ci.yml")["jobs"]["pinned"]["steps"]
    assert steps[-1]["run"] == ".ci/run"
    pinned = (ROOT / "constraints.txt").read_text()
    assert any(f"\ntorch{job['torch'][:-1]}" in pinned for job in matrix())


def test_a_release_publishes_only_a_tested_wheel():
    jobs = parsed("workflows/release.yml")["jobs"]
    assert (jobs["publish"]["needs"], jobs["test"]["needs"]) == ("test", "build")
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    program = jobs["test"]["steps"][-1]["run"].split()[0]
    assert (ROOT / program).stat().st_mode & 0o100


@pytest.mark.parametrize("name", FORMS)
def test_an_issue_form_is_complete(name):
    form = parsed(f"ISSUE_TEMPLATE/{name}.yml")
    assert form["name"] and form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)
    assert any(field.get("validations", {}).get("required") for field in fields)
