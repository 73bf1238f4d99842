"""Files that can run code: programs in model files, names in run folders and studies.

Each trap leaves a mark when it springs, and is shown to spring where nothing holds it back.
"""

import json
import os
import shutil
import subprocess
import sys
import warnings
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_runs import AS_TINY, tiny
from torch import nn
from traps import NET, PLANT, forget, sprung

from foveate import provenance
from foveate.baselines.pyramid import Pyramid
from foveate.cli.app import run
from foveate.demo.server import open_page
from foveate.errors import ConfigError, DataError, FoveateError
from foveate.evaluation.models import load_model
from foveate.models.zoo import ModelConfig
from foveate.scales import ScaleGrid
from foveate.sweeps.study import read_study
from foveate.training.checkpoint import RunFolder
from foveate.training.config import build_net
from foveate.training.loop import train


def refusal(action, kind=ConfigError):
    """The one line with which a Python call is refused for want of trust."""
    with pytest.raises(kind) as caught:
        action()
    said = str(caught.value)
    assert "\n" not in said and "pass --trust (trust=True in Python)" in said
    return said


def refused(capsys, *arguments):
    """The one line with which a command is refused for want of trust."""
    capsys.readouterr()
    assert run(list(map(str, arguments))) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert "pass --trust" in said
    return said


# Files with models


def poisoned(path, mark):
    """A torch.export program whose batch size is an expression that runs a command."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(16, 3)

        def forward(self, images):
            return self.layer(images.flatten(1))

    shapes = ({0: torch.export.Dim("batch", max=64)},)
    program = torch.export.export(Net(), (torch.zeros(2, 1, 4, 4),), dynamic_shapes=shapes)
    torch.export.save(program, path.with_suffix(".good"))
    with zipfile.ZipFile(path.with_suffix(".good")) as good, zipfile.ZipFile(path, "w") as bad:
        for name in good.namelist():
            text = good.read(name)
            if name.endswith("models/model.json"):
                graph = text.decode()
                before = graph.count('"expr_str": "')
                order = f"__import__('os').system('touch {mark}') or "
                text = graph.replace('"expr_str": "', f'"expr_str": "{order}').encode()
                assert before
            bad.writestr(name, text)
    return path


def test_an_exported_program_runs_its_code_only_if_trusted(tmp_path, capsys):
    mark = tmp_path / "SPRUNG"
    path = poisoned(tmp_path / "net.pt2", mark)
    said = refusal(lambda: load_model(str(path)))
    assert said.startswith(f"{path} is a torch.export program, which can run arbitrary code; ")
    pictures = f"folder:{tmp_path}"
    assert str(path) in refused(capsys, "audit", path, "--source", pictures)
    assert not mark.exists()
    load_model(str(path), trust=True)
    assert mark.exists()


class Writer(nn.Module):
    """Writes a file when it is asked."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        torch.save(images, self.path)
        return images.flatten(1)


def test_torchscript_runs_only_if_trusted(tmp_path, capsys, monkeypatch):
    mark, path = tmp_path / "SPRUNG", tmp_path / "net.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(Writer(str(mark))).save(str(path))
    with monkeypatch.context() as patch:
        patch.setattr(torch.jit, "load", lambda *given, **more: pytest.fail("it was opened"))
        said = refusal(lambda: load_model(str(path)))
        assert said.startswith(f"{path} is a TorchScript program, which can run code; ")
        refused(capsys, "audit", path, "--source", f"folder:{tmp_path}")
    load_model(str(path), trust=True).net(torch.zeros(1, 1, 2, 2))
    assert mark.exists()


def reading(path, location, offset=0, domain=""):
    """An ONNX model that gives 16 bytes of another file."""
    onnx = pytest.importorskip("onnx")
    tensor = onnx.TensorProto(name="bytes", data_type=onnx.TensorProto.UINT8, dims=[16])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in {"location": location, "offset": offset, "length": 16}.items():
        tensor.external_data.add(key=key, value=str(value))
    make, kinds = onnx.helper, onnx.TensorProto
    shown = make.make_tensor_value_info("images", kinds.FLOAT, ["batch", 1, 4, 4])
    given = make.make_tensor_value_info("logits", kinds.UINT8, [16])
    node = make.make_node("Identity", ["bytes"], ["logits"], domain=domain)
    graph = make.make_graph([node], "graph", [shown], [given], [tensor])
    sets = [make.make_opsetid("", 17), *([make.make_opsetid(domain, 1)] if domain else [])]
    path.write_bytes(make.make_model(graph, opset_imports=sets, ir_version=8).SerializeToString())
    return path


def test_an_onnx_model_reads_only_its_own_folder(tmp_path):
    """And neither memory nor code: operators of other libraries are not loaded."""
    folder = tmp_path / "model"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "weights").write_bytes(b"0123456789abcdef")
    (tmp_path / "secret").write_bytes(b"a secret of mine")
    (folder / "link").symlink_to(tmp_path / "secret")
    secret = np.frombuffer(b"a secret of mine", np.uint8)
    good = load_model(str(reading(folder / "good.onnx", "data/weights")))
    assert bytes(good.net(torch.zeros(1, 1, 4, 4)).tolist()) == b"0123456789abcdef"
    for location in ("../secret", f"{tmp_path}/secret", "link", "data/../../secret", "/etc/passwd"):
        with pytest.raises(DataError, match="cannot load the model"):
            load_model(str(reading(folder / "bad.onnx", location)))
    with pytest.raises(DataError, match="cannot load the model"):
        load_model(str(reading(folder / "bad.onnx", "*/_ORT_MEM_ADDR_/*", secret.ctypes.data)))
    with pytest.raises(DataError, match="cannot load the model"):
        load_model(str(reading(folder / "bad.onnx", "data/weights", domain="ai.onnx.contrib")))


def test_an_onnxruntime_that_reads_any_file_is_refused(tmp_path, monkeypatch):
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.setattr(onnxruntime, "__version__", "1.23.2")
    with pytest.raises(
        ConfigError, match=r"onnxruntime 1\.23\.2 lets a model read arbitrary files"
    ):
        load_model(str(reading(tmp_path / "net.onnx", "../secret")))


# Folders of runs, and studies

FRAME = ModelConfig(pool="avg", size=32, scales=ScaleGrid(1, 1, per_octave=1))


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    return train(tiny(epochs=1), tmp_path_factory.mktemp("runs") / "honest").path


@pytest.fixture(params=["os:system", "planted:net"])
def hostile(request, honest, here):
    """A finished run that came from elsewhere, and names a function of its author's choice."""
    (here / "planted.py").write_text(NET)
    shutil.copytree(honest, here / "run")
    path = here / "run" / "config.json"
    about = json.loads(path.read_text())
    about["config"]["backbone"] = request.param
    path.write_text(json.dumps(about))
    return here / "run"


def test_a_run_does_not_choose_what_is_imported(hostile, capsys):
    picture = hostile.parent / "digit.png"
    Image.fromarray(np.eye(28, dtype=np.uint8) * 255).save(picture)
    config = RunFolder(hostile).config()
    named = f"{hostile / 'config.json'} names the backbone {config.backbone!r}"
    commands = [
        ("evaluate", hostile),
        ("predict", picture, "--model", hostile),
        ("export", hostile, "--out", hostile.parent / "net.onnx"),
        ("audit", hostile, "--source", "mnist-5k"),
    ]
    for command in commands:
        assert f"error: {named}" in refused(capsys, *command)
    calls = [
        lambda: RunFolder(hostile).net(),
        lambda: load_model(str(hostile)),
        lambda: open_page([str(hostile)]),
    ]
    for call in calls:
        assert refusal(call).startswith(named)
    assert config.backbone in refusal(lambda: build_net(config))
    assert sprung(hostile.parent) == [] and "planted" not in sys.modules


def test_a_run_that_goes_on_does_not_choose_either(hostile, capsys):
    options = [*AS_TINY, "--epochs", "1", "--out", str(hostile)]
    for finished in (True, False):
        if not finished:
            (hostile / "weights.safetensors").unlink()
        assert run(options) == 2
        assert "has a run with other settings (backbone)" in capsys.readouterr().err
    assert sprung(hostile.parent) == []


def test_a_trusted_run_is_built(honest, here):
    (here / "planted.py").write_text(NET)
    made = train(tiny(epochs=1, backbone="planted:net"), here / "run").path
    assert sprung(here) == ["planted"]
    forget(here)
    net = RunFolder(made).net(trust=True)
    assert isinstance(net.backbone, nn.Sequential)
    assert sprung(here) == ["planted", "planted"]
    assert run(["evaluate", str(made), "--trust", "--scales", "1", "--device", "cpu"]) == 0


def named(run, backbone):
    """Let a run name another backbone."""
    path = run / "config.json"
    about = json.loads(path.read_text())
    about["config"]["backbone"] = backbone
    path.write_text(json.dumps(about))
    return RunFolder(run)


def test_only_baselines_of_the_package_itself_need_no_trust(honest, here):
    """Not those of a folder with its name, and no other functions of the package."""
    folder = here / "foveate" / "baselines"
    folder.mkdir(parents=True)
    for path in (folder.parent / "__init__.py", folder / "__init__.py", folder / "pyramid.py"):
        path.write_text(PLANT)
    (folder / "planted.py").write_text(NET)
    run = shutil.copytree(honest, here / "run")
    made = build_net(tiny(backbone="foveate.baselines.pyramid:network", size=32, model=FRAME))
    assert isinstance(made.backbone, Pyramid)
    with pytest.raises(ConfigError, match=r"cannot import 'foveate\.baselines\.planted'"):
        named(run, "foveate.baselines.planted:net").net()
    for name in ("hermite_basis", "Sequence"):  # imported there
        with pytest.raises(ConfigError, match=f"'{name}' is not defined in 'foveate"):
            named(run, f"foveate.baselines.steerable:{name}").net()
    for spec in ("foveate.baselines:pyramid", "foveate.baselinesx.a:b", "foveate.trust:os"):
        assert spec in refusal(lambda spec=spec: named(run, spec).net())
    for where in (here, folder, folder.parent):
        assert sprung(where) == []


def test_a_folder_of_the_paper_does_not_choose_either(hostile, capsys):
    from foveate.paper.tables import find_rows, paper_jobs

    rows = find_rows(["table1"], ["cnn-tr2"])
    (job,) = paper_jobs(rows, 1, "float32")
    hostile.rename(hostile.parent / job.folder)
    out = ["--out", str(hostile.parent), "--device", "cpu"]
    assert run(["reproduce", "table1", "--rows", "cnn-tr2", "--seeds", "1", *out]) == 2
    assert "with other settings; choose another" in capsys.readouterr().err
    assert sprung(hostile.parent) == []


STUDY = """name = "small"
[defaults]
source = "mnist-5k"
scales = 1
samples = 96
size = 24
model.features = [4, 8]
model.size = 12
model.scales = "1:2:1"
[[runs]]
preset = "fovavg"
BACKBONE
"""


def test_a_study_does_not_choose_either(here, capsys):
    (here / "planted.py").write_text(NET)
    study = here / "study.toml"
    study.write_text(STUDY.replace("BACKBONE", 'backbone = "planted:net"'))
    told = refused(capsys, "sweep", study)
    assert f"{study}: runs[0].backbone: the backbone 'planted:net'" in told
    refusal(lambda: read_study(study), FoveateError)
    for more in ([], ["--trust"]):
        assert run(["sweep", str(study), "--dry-run", *more, "--device", "cpu"]) == 0
        assert "1 runs: 0 finished, 1 remaining" in capsys.readouterr().out
    assert sprung(here) == []
    assert read_study(study, trust=True).jobs[0].config.backbone == "planted:net"
    assert sprung(here) == ["planted"]


# Other programs that a file could start


def test_postscript_is_not_given_to_ghostscript(here, capsys, monkeypatch):
    mark, folder = here / "SPRUNG", here / "bin"
    folder.mkdir()
    (folder / "gs").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (folder / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    picture = here / "digit.png"
    picture.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n%%EOF\n")
    assert run(["predict", str(picture), "--device", "cpu"]) == 1
    assert "is a PostScript program; save it as PNG" in capsys.readouterr().err
    assert not mark.exists()
    with Image.open(picture) as image, pytest.raises(OSError):
        image.load()
    assert mark.exists()


def test_git_does_not_look_at_folders_around_the_package(tmp_path, monkeypatch):
    """A folder with a hostile .git, in which someone made the environment with foveate."""
    mark, package = tmp_path / "SPRUNG", tmp_path / "env" / "foveate"
    package.mkdir(parents=True)
    (package / "provenance.py").touch()
    (tmp_path / "hook").write_text(f"#!/bin/sh\ntouch {mark}\n")
    (tmp_path / "hook").chmod(0o755)
    for order in (["init", "-q"], ["add", "env"], ["config", "core.fsmonitor", "./hook"]):
        subprocess.run(["git", "-C", tmp_path, *order], check=True)
    monkeypatch.delenv("FOVEATE_COMMIT", raising=False)
    monkeypatch.setattr(provenance, "__file__", str(package / "provenance.py"))
    monkeypatch.setattr(provenance, "_commit", provenance._commit.__wrapped__)
    assert provenance.commit() == "" and not mark.exists()
    subprocess.run(["git", "-C", package, "ls-files"], check=True, capture_output=True)
    assert mark.exists()


def test_settings_of_matplotlib_in_the_current_folder_are_no_program(tmp_path):
    """matplotlib reads ./matplotlibrc; up to 3.10 it evaluated parts of it."""
    matplotlib = pytest.importorskip("matplotlib")
    order = f"['__builtins__']['__import__']('os').mkdir('{tmp_path}/SPRUNG')"
    frames = "(g := (g.gi_frame.f_back.f_back.f_globals for _ in [1]))"
    path = tmp_path / "matplotlibrc"
    path.write_text(f"axes.prop_cycle: cycler('color', [{frames} and [*g][0]{order} or 'r'])\n")
    matplotlib.rc_params_from_file(path, fail_on_error=False)
    assert not (tmp_path / "SPRUNG").exists()
