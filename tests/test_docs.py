"""What README and docs say works: commands and snippets run, links lead somewhere."""

import csv
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
    PAGES,
    ROOT,
    SHELL,
    SHOWN,
    blocks,
    check_command,
    made_tiny,
    perform,
)
from photo_runs import PHOTOGRAPHS

from foveate.evaluation.models import load_model
from foveate.evaluation.predict import predict
from foveate.scales import as_scales
from foveate.training.checkpoint import RunFolder

DOCS = ROOT / "docs"
NEEDED = {"training-loop.md": ["timm"], "lightning.md": ["timm", "pytorch_lightning"]}
NOT_RUN = 12  # blocks that may be left out, at most
RUNNABLE = [page for page in PAGES if any(not block.reason for block in blocks(page))]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in, of which nothing stays behind, modules neither."""
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
    for package in NEEDED.get(page.name, ()):
        pytest.importorskip(package)
    if photos := page.name == "photographs.md":
        pytest.importorskip("torchvision", reason="pip install 'foveate[photos]'")
        lay_out_photographs()
    for block in blocks(page):
        if not block.reason:
            perform(made_tiny(block) if photos else block, names)
            assert_pools(block, names)
    SAID.get(page.name, lambda names: None)(names)


def lay_out_photographs():
    """What the reader of photographs.md has: a folder, and two photographs beside it."""
    for split in ("train", "validation", "test"):
        shutil.copytree(PHOTOGRAPHS / split, Path("clothes") / split)
    for name in ("shoe.jpg", "scene.jpg"):
        shutil.copy(PHOTOGRAPHS / "test" / "shoes" / "0.jpg", name)


def assert_pools(block, names):
    """What a block shows of the channels pools to the logits that it shows."""
    if "net.channels(" in block.code:
        assert not names["net"].training, f"{block.place}: call .eval()"
    if "foveate.json" in block.code:
        names["net"] = load_model("runs/clothes").net
    if found := re.search(r"^(?:logits, )?(answers|channels) = ", block.code, re.M):
        logits, channels = (torch.as_tensor(names[key]) for key in ("logits", found[1]))
        torch.testing.assert_close(names["net"].combine(channels), logits)


def readme(names):
    assert names["logits"].shape == (2, 5)
    assert names["channels"].shape == (2, 17, 5)
    assert names["scales"].shape == (2,)


def guide(names):
    cnn, fovmax = (accuracies(Path("runs/compared"), f"runs/{name}") for name in ("cnn", "fovmax"))
    assert max(cnn[1.0], cnn[4.0]) < 0.5 < cnn[2.0]
    assert min(fovmax.values()) > fovmax[2.0] - 0.1
    before, after = (audited(Path("audit") / name) for name in ("before", "after"))
    assert min(before.values()) < 0.5 < min(after.values())


def recipes(names):
    # Of stripes 1/2 ± 1/2 a triangle of half-width 2.7 leaves 2 sinc²(1.35) / 2 = 0.044.
    assert (names["smooth"] - 0.5).abs().max() < 0.05
    assert (names["sharp"] - 0.5).abs().max() > 0.4
    assert names["logits"].shape == (2, 10) and names["there"].shape == (2, 10)
    assert names["maps"].logits.shape == (2, 10, 14, 14)
    assert len(names["net"].scales) == 17
    assert names["windows"] == [40, 57, 80, 113]


def photographs(names):
    said = predict(load_model("runs/clothes"), Path("shoe.jpg"))
    expected, found = torch.tensor(said.channels), torch.as_tensor(names["channels"][0])
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()  # of an even frame
    assert list(accuracies(Path("runs/compared"), "runs/whole")) == list(as_scales("0.25:2:2"))
    model = RunFolder(Path("runs/smaller")).config().model
    assert model.size * model.scales[0] == 28
    assert len(names["net"].scales) == 7 and torch.isfinite(names["loss"])
    assert all(Path(name).stat().st_size for name in ("clothes.png", "found.png", "scene.png"))


def training_loop(names):
    channels, plain = (names["accuracies"](names[key]) for key in ("restored", "plain"))
    # Of 500 images 15 points are five standard errors of a difference.
    assert all(channels[scale] > plain[scale] + 0.15 for scale in channels if scale != 1)
    assert min(channels.values()) > 0.5


def lightning(names):
    found = names["trainer"].callback_metrics
    assert min(found[f"accuracy/{scale}"] for scale in names["SCALES"]) > 0.5
    saved = torch.load(names["checkpoint"].best_model_path, weights_only=True)["state_dict"]
    for key, tensor in names["best"].state_dict().items():
        assert torch.equal(tensor.cpu(), saved[key]), key
    assert [path.name for path in Path().iterdir()] == ["checkpoints"]


SAID = {"README.md": readme, "guide.md": guide, "recipes.md": recipes}
SAID |= {"photographs.md": photographs}
SAID |= {"training-loop.md": training_loop, "lightning.md": lightning}


def accuracies(folder, run):
    """Accuracy of a run by scale."""
    with (folder / "accuracy.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["run"] == run]
    return {float(row["scale"]): float(row["accuracy"]) for row in rows}


def audited(folder):
    """Accuracy of a model as it is, over all classes, by scale."""
    with (folder / "audit.csv").open() as file:
        rows = [r for r in csv.DictReader(file) if (r["model"], r["class"]) == ("as it is", "")]
    return {float(row["scale"]): float(row["accuracy"]) for row in rows}


def test_every_block_says_what_it_is():
    for block in ALL:
        assert block.kind in (*SHELL, *SHOWN, "python"), f"{block.place}: {block.kind!r}"
        if block.kind in SHOWN:
            assert not re.search(r"^(\$ )?(foveate|python|make) ", block.code, re.M), block.place


def test_few_blocks_are_not_run_and_each_has_a_reason():
    left_out = [block for block in ALL if block.reason]
    assert len(left_out) <= NOT_RUN
    for block in left_out:
        assert len(block.reason.split()) > 2, block.place
    marks = sum(page.read_text().count("<!-- not executed") for page in PAGES)
    assert marks == len(left_out)  # a mark stands right above its block


@pytest.mark.parametrize(
    "block", [b for b in ALL if b.reason and b.kind in SHELL], ids=lambda block: block.place
)
def test_what_is_not_run_could_be(block):
    for words in block.commands():
        check_command(words)


def test_the_notebook_runs(here):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    cells = json.loads((DOCS / "notebook.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert len(cells) >= 8 and not any(cell["outputs"] for cell in code)
    names = {"__name__": "notebook"}
    for number, cell in enumerate(code):
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)  # noqa: S102
    from matplotlib import pyplot

    assert len(pyplot.get_fignums()) >= 3
    pyplot.close("all")
    cnn, fovmax = (names["curves"][name] for name in ("cnn", "fovmax"))
    assert max(cnn[0], cnn[-1]) < 0.5 < min(fovmax)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_every_command_is_in_the_guide():
    guide = (DOCS / "guide.md").read_text()
    named = set(re.findall(r"^\| `foveate (\w+)` \|", guide, re.MULTILINE))
    assert named == set(COMMANDS)
