"""README and docs: commands and snippets run, the notebook runs, no link is dead."""

import contextlib
import csv
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from doc_pages import (
    ALL,
    COMMANDS,
    NOT_EXECUTED_KINDS,
    PAGES,
    ROOT,
    SHELL,
    anchors,
    blocks,
    check_command,
    links,
    run_block,
    shrink_block,
)
from photo_runs import PHOTOGRAPHS

import foveate
from foveate.evaluation.models import load_model
from foveate.evaluation.predict import predict
from foveate.scales import as_scales
from foveate.training.checkpoint import RunFolder

DOCS = ROOT / "docs"
NOT_RUN = 18  # at most: installs, servers, long runs and clusters
NEEDS = {
    "index.md": ["timm"],
    "lightning.md": ["pytorch_lightning", "timm"],
    "photographs.md": ["timm", "torchvision"],
    "training-loop.md": ["timm"],
}
LINKING = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "results").rglob("*.md")])
RUNNABLE = [page for page in PAGES if any(not block.reason for block in blocks(page))]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working folder; files and imported modules are removed afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]
    shutil.rmtree(tmp_path)


@pytest.mark.filterwarnings(
    "ignore:.isinstance.treespec, LeafSpec:FutureWarning",  # Lightning's use of PyTorch
    "ignore:The '(train|val)_dataloader' does not have many workers",  # depends on the machine
)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda page: page.name)
def test_commands_and_snippets_run(page, here):
    names = {"__name__": "page"}
    for package in NEEDS.get(page.name, []):
        pytest.importorskip(package, reason="pip install 'foveate[dev]'")
    if photos := page.name == "photographs.md":
        lay_out_photographs()
    for block in blocks(page):
        if not block.reason:
            run_block(shrink_block(block) if photos else block, names)
            assert_pools(block, names)
    CHECKS.get(page.name, lambda names: None)(names)


def lay_out_photographs():
    """Create the folder of photographs and the two single files that photographs.md uses."""
    for split in ("train", "validation", "test"):
        shutil.copytree(PHOTOGRAPHS / split, Path("clothes") / split)
    for name in ("shoe.jpg", "scene.jpg"):
        shutil.copy(PHOTOGRAPHS / "test" / "shoes" / "0.jpg", name)


def assert_pools(block, names):
    """Check that the channel logits of a block, pooled, equal its logits."""
    if "net.channels(" in block.code:
        assert not names["net"].training, f"{block.place}: call .eval()"
    if "foveate.json" in block.code:
        names["net"] = load_model("runs/clothes").net
    if '"fovmax.onnx"' in block.code:
        names["net"] = load_model("fovmax-mnist-tr2").net
    if found := re.search(r"^(?:logits, )?(answers|channels) = ", block.code, re.M):
        logits, channels = (torch.as_tensor(names[key]) for key in ("logits", found[1]))
        torch.testing.assert_close(names["net"].combine(channels), logits)


def readme(names):
    assert names["logits"].shape == (2, 5)
    assert names["channels"].shape == (2, 17, 5)
    assert names["scales"].shape == (2,)


def index(names):
    assert [round(names["net"].size * scale) for scale in names["net"].scales][::6] == [56, 448]


def digits(names):
    cnn, fovmax = (accuracies(Path("runs/compared"), f"runs/{name}") for name in ("cnn", "fovmax"))
    assert max(cnn[1.0], cnn[4.0]) < 0.5 < cnn[2.0]
    assert min(fovmax.values()) > fovmax[2.0] - 0.1
    small, large = (
        predict(load_model("runs/fovmax"), Path(f"{n}.png")) for n in ("small", "large")
    )
    assert small.label == large.label == "3"
    assert large.scale / small.scale == pytest.approx(2, rel=0.1)


def audit(names):
    before, after = (audited(Path("audit") / name) for name in ("before", "after"))
    assert min(before.values()) < 0.5 < min(after.values())
    assert [counts.accuracy.value for counts in names["result"].overall] == pytest.approx(
        [after[scale] for scale in (0.5, 1.0, 2.0)], abs=1e-6
    )


def backbones(names):
    assert names["logits"].shape == (4, 10) and names["channels"].shape == (4, 5, 10)
    assert names["scales"].shape == (4,)
    assert Path("mynet.onnx").stat().st_size


def prediction(names):
    assert names["prediction"].label == "0" and Path("found.png").stat().st_size
    model = load_model("fovmax-mnist-tr2")
    y, x = predict(model, Path("scene.png"), search=True).centre
    assert abs(y - 58) < 28 and abs(x - 228) < 28  # the digit of 56 pixels covers its centre


def export(names):
    assert names["logits"].shape == (3, 10) and names["channels"].shape == (3, 17, 10)


def recipes(names):
    # A triangle filter of half-width 2.7 turns stripes 1/2 ± 1/2 into 1/2 ± sinc²(1.35) (0.044).
    assert (names["smooth"] - 0.5).abs().max() < 0.05
    assert (names["sharp"] - 0.5).abs().max() > 0.4
    assert names["logits"].shape == (2, 10) and names["there"].shape == (2, 10)
    assert names["maps"].logits.shape == (2, 10, 14, 14)
    assert len(names["net"].scales) == 17
    assert names["windows"] == [40, 57, 80, 113]


def photographs(names):
    said = predict(load_model("runs/clothes"), Path("shoe.jpg"))
    expected, found = torch.tensor(said.channels), torch.as_tensor(names["channels"][0])
    # The frame is even, so the documented preprocessing has no shift of half a pixel.
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    assert list(accuracies(Path("runs/compared"), "runs/whole")) == list(as_scales("0.25:2:2"))
    model = RunFolder(Path("runs/smaller")).config().model
    assert model.size * model.scales[0] == 28
    assert len(names["net"].scales) == 7 and torch.isfinite(names["loss"])
    assert all(Path(name).stat().st_size for name in ("clothes.png", "found.png", "scene.png"))


def training_loop(names):
    channels, plain = (names["accuracies"](names[key]) for key in ("restored", "plain"))
    # With 500 images, 15 points are five standard errors of a difference.
    assert all(channels[scale] > plain[scale] + 0.15 for scale in channels if scale != 1)
    assert min(channels.values()) > 0.5


def lightning(names):
    found = names["trainer"].callback_metrics
    assert min(found[f"accuracy/{scale}"] for scale in names["SCALES"]) > 0.5
    saved = torch.load(names["checkpoint"].best_model_path, weights_only=True)["state_dict"]
    for key, tensor in names["best"].state_dict().items():
        assert torch.equal(tensor.cpu(), saved[key]), key
    assert [path.name for path in Path().iterdir()] == ["checkpoints"]


CHECKS = {
    "README.md": readme,
    "audit.md": audit,
    "backbones.md": backbones,
    "digits.md": digits,
    "export.md": export,
    "index.md": index,
    "lightning.md": lightning,
    "photographs.md": photographs,
    "predict.md": prediction,
    "recipes.md": recipes,
    "training-loop.md": training_loop,
}
"""What holds after all blocks of a page have run, given its variables."""


def accuracies(folder, run):
    """Accuracy of a run by scale."""
    with (folder / "accuracy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == run]
    return {float(row["scale"]): float(row["accuracy"]) for row in rows}


def audited(folder):
    """Accuracy of the unchanged model over all classes, by scale."""
    with (folder / "audit.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["model"], r["class"]) == ("as it is", "")]
    return {float(row["scale"]): float(row["accuracy"]) for row in rows}


def test_every_block_says_what_it_is():
    for block in ALL:
        assert block.kind in (*SHELL, *NOT_EXECUTED_KINDS, "python"), (
            f"{block.place}: {block.kind!r}"
        )
        if block.kind in NOT_EXECUTED_KINDS:
            assert not re.search(r"^(\$ )?(foveate|python|make) ", block.code, re.M), block.place


def test_few_blocks_are_not_run_and_each_has_a_reason():
    left_out = [block for block in ALL if block.reason]
    assert len(left_out) <= NOT_RUN
    for block in left_out:
        assert len(block.reason.split()) > 2, block.place
    marks = sum(page.read_text().count("<!-- not executed") for page in PAGES)
    assert marks == len(left_out)  # each comment is directly above its block


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.reason and b.kind in SHELL], ids=lambda block: block.place
)
def test_what_is_not_run_could_be(block):
    for words in block.commands():
        check_command(words)


def test_the_notebook_runs_and_its_outputs_are_stored(here):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    names, printed = {"__name__": "notebook"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        for number, cell in enumerate(code):
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)  # noqa: S102
    from matplotlib import pyplot

    figures = len(pyplot.get_fignums())
    pyplot.close("all")
    cnn, fovmax = (names["curves"][name] for name in ("cnn", "fovmax"))
    assert max(cnn[0], cnn[-1]) < 0.5 < min(fovmax)
    stored = [output for cell in code for output in cell["outputs"]]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    assert figures == sum("image/png" in output.get("data", {}) for output in stored) >= 3
    lines = "".join(line for output in stored for line in output.get("text", []))
    assert len(lines.splitlines()) == len(printed.getvalue().splitlines())
    assert {output["output_type"] for output in stored} == {"display_data", "stream"}
    assert {output.get("name", "stdout") for output in stored} == {"stdout"}  # no warning


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    for target, anchor in links(page):
        file = page.parent / target if target else page
        assert file.exists(), f"{target} does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{target}#{anchor}: there is no such heading"


def test_a_dead_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("# One\n[a](gone.md) [b](#two)\n```text\n[c](code.md)\n```\n## Two, and `x`\n")
    assert list(links(page)) == [("gone.md", ""), ("", "two")]
    assert anchors(page) == {"one", "two-and-x"}


def test_every_command_is_in_the_table():
    table = (DOCS / "commands.md").read_text()
    named = set(re.findall(r"^\| `foveate (\w+)` \|", table, re.MULTILINE))
    assert named == set(COMMANDS)


def test_the_citation_is_of_this_version_and_of_the_paper():
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["message"] and cited["authors"]
    assert cited["version"] == foveate.__version__ and cited["license"] == "Apache-2.0"
    readme = (ROOT / "README.md").read_text()
    assert f"version = {{{foveate.__version__}}}" in readme
    paper = cited["preferred-citation"]
    assert paper["title"] in readme.replace("{CNNs}", "CNNs")
    names = [f"{a['family-names']}, {a['given-names']}" for a in paper["authors"]]
    assert " and ".join(names) in readme
    assert f"{paper['start']}--{paper['end']}" in readme and f"{{{paper['year']}}}" in readme
