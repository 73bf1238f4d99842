"""`foveate audit` as a person meets it: what it prints and writes, and how it fails."""

import csv
import html
import json
import re
from pathlib import Path

import audited_nets
import pytest
import torch.nn.functional as F
from audited_nets import NAMES, SIZE, write_pictures

from foveate.cli.app import run
from foveate.data.sources import load_source
from foveate.evaluation.audit.measure import MEASURES, audit
from foveate.evaluation.audit.report import COLUMNS, IN_CHANNELS, ORIGINAL

FILES = ["audit.csv", "audit.html", "audit.json", "audit.png", "audit.svg"]
SCALES = ["--scales", "0.5:2:1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Digits with train and test, one of the test files damaged."""
    path = write_pictures(tmp_path_factory.mktemp("digits"), count=120, splits=True)
    (path / "test" / NAMES[3] / "damaged.png").write_bytes(b"\x89PNG no more")
    return path


@pytest.fixture(scope="module")
def audited(folder, tmp_path_factory):
    """One audit: its folder, what was printed, and what was warned of."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    out = tmp_path_factory.mktemp("audit")
    printed, warned = StringIO(), StringIO()
    arguments = ["audit", "audited_nets:net", "--source", f"folder:{folder}", *SCALES]
    with redirect_stdout(printed), redirect_stderr(warned):
        assert run([*arguments, "--border", "0", "--out", str(out)]) == 0
    return out, printed.getvalue(), warned.getvalue()


def content(out):
    return json.loads((Path(out) / "audit.json").read_text())


def test_it_prints_a_table_a_summary_and_the_paths(audited):
    out, printed, _ = audited
    lines = printed.splitlines()
    header = "scale accuracy agreement confidence accuracy in scale channels"
    assert " ".join(lines[0].split()) == header
    assert [line.split()[0] for line in lines[1:4]] == ["0.500", "1.000", "2.000"]
    found = content(out)["audits"]
    for line, plain, inside in zip(
        lines[1:4], found[ORIGINAL]["scales"], found[IN_CHANNELS]["scales"], strict=True
    ):
        shares = [plain[measure] for measure in MEASURES] + [inside["accuracy"]]
        cells = [
            f"{100 * s['value']:.1f} ({100 * s['low']:.0f}–{100 * s['high']:.0f})" for s in shares
        ]
        assert line.split() == [line.split()[0], *" ".join(cells).split()]
    assert "% accuracy at the native scale 1, on 120 images." in lines[4]
    assert [Path(line).name for line in lines[5:]] == [
        "audit.csv", "audit.json", "audit.html", "audit.png", "audit.svg"
    ]  # fmt: skip
    assert sorted(path.name for path in out.iterdir()) == FILES


def test_what_could_not_be_read_is_named_and_counted(audited):
    out, _, warned = audited
    lines = warned.splitlines()
    assert len(lines) == 2 and "damaged.png" in lines[0] and lines[0].startswith("warning: ")
    assert lines[1] == "warning: skipped 1 of 121 images that cannot be read"
    assert content(out)["images"] == 120 and len(content(out)["unreadable"]) == 1


def test_the_numbers_are_those_of_the_function(audited):
    out, *_ = audited
    test = load_source("mnist-5k").test
    images = audited_nets.framed(test.images[:120])
    found = audit(audited_nets.net(), images, test.labels[:120], [0.5, 1, 2], border=0.0)
    for point, counts in zip(
        content(out)["audits"][ORIGINAL]["scales"], found.overall, strict=True
    ):
        assert (point["right"], point["agreeing"]) == (counts.right, counts.agreeing)
        assert point["confidence"]["value"] == pytest.approx(counts.confidence.value, abs=1e-5)
        assert point["accuracy"] == counts.accuracy._asdict()


def test_the_csv_has_a_line_per_model_scale_and_class(audited):
    out, *_ = audited
    lines = list(csv.DictReader((out / "audit.csv").read_text().splitlines()))
    assert tuple(lines[0]) == COLUMNS
    keys = [(line["model"], line["scale"], line["class"]) for line in lines]
    assert keys == [
        (model, scale, name)
        for model in (ORIGINAL, IN_CHANNELS)
        for scale in ("0.5", "1.0", "2.0")
        for name in ("", *NAMES)
    ]
    points = content(out)["audits"][IN_CHANNELS]["scales"]
    (line,) = [x for x in lines if (x["model"], x["scale"], x["class"]) == (
        IN_CHANNELS, "2.0", NAMES[4]
    )]  # fmt: skip
    known = points[2]["per_class"][NAMES[4]]
    assert int(line["count"]) == known["count"]
    for measure in MEASURES:
        ends = [float(line[measure + end]) for end in ("", "_low", "_high")]
        assert ends == list(known[measure].values())


def test_the_json_says_how_it_was_made(audited, folder):
    out, *_ = audited
    found = content(out)
    assert found["model"] == "audited_nets:net" and found["source"] == f"folder:{folder}"
    assert found["split"] == "test" and len(found["checksum"]) == 64
    assert found["transform"] == {
        "size": [SIZE, SIZE], "channels": 1, "recipe": "frame", "border": 0.0,
        "mean": [0.0], "std": [1.0], "fit": "fill", "view": "zoom",
    }  # fmt: skip
    assert found["version"] == foveate_version() and "CPU" in found["hardware"]
    assert found["channels"] == [0.5, 1.0, 2.0] and found["pool"] == "logsumexp"
    assert found["patch"] == SIZE and found["cost"] == {"pixels": 3}
    assert "commit" in found and found["notes"] == []


def foveate_version():
    import foveate

    return foveate.__version__


def test_the_page_shows_it_all(audited):
    out, *_ = audited
    page = (out / "audit.html").read_text()
    assert page.count("<svg") == 4  # three measures, and what the model saw
    for title in (
        "Accuracy, agreement",
        "Accuracy per class",
        "Model input",
        "The model in scale channels",
        "Provenance",
    ):
        assert f"<h2>{title}" in page
    text = html.unescape(re.sub(r"<[^>]+>", " ", page))
    assert "Padding: 0.0." in text and "damaged.png" in text
    assert all(name in text for name in NAMES)
    assert (out / "audit.png").read_bytes().startswith(b"\x89PNG")


def test_the_code_on_the_page_is_the_network_in_scale_channels(audited):
    out, *_ = audited
    page = (out / "audit.html").read_text()
    (code,) = re.findall(r"<pre><code>(.*?)</code></pre>", page, re.DOTALL)
    names = {}
    exec(html.unescape(code), names)  # noqa: S102
    test = load_source("mnist-5k").test
    wide = F.pad(audited_nets.framed(test.images[:120]), (SIZE // 2,) * 4)
    found = audit(names["net"], wide, test.labels[:120], [0.5, 1, 2], border=0.0)
    known = content(out)["audits"][IN_CHANNELS]["scales"]
    assert [counts.right for counts in found.overall] == [point["right"] for point in known]
    assert names["net"].training  # ready to be fine-tuned


def test_options_reach_the_audit(folder, tmp_path, capsys):
    command = ["audit", "audited_nets:net", "--source", f"folder:{folder}", "--samples", "10"]
    options = ["--scales", "1.5:3:1", "--size", "32", "--border", "reflect"]
    options += ["--mean", "0.1", "--std", "0.5", "--pool", "none", "--batch", "4"]
    names = tmp_path / "names.txt"
    names.write_text("\n".join(NAMES) + "\n")
    options += ["--split", "train", "--classes", str(names)]
    assert run([*command, *options, "--out", str(tmp_path / "a")]) == 0
    found = content(tmp_path / "a")
    transform = {"size": [32, 32], "border": "reflect", "mean": [0.1], "std": [0.5]}
    assert {key: found["transform"][key] for key in transform} == transform
    assert [p["scale"] for p in found["audits"][ORIGINAL]["scales"]] == [1.0, 1.5, 3.0]
    assert found["audits"][ORIGINAL]["native"] == 1 and set(found["audits"]) == {ORIGINAL}
    assert (found["split"], found["images"], found["pool"]) == ("train", 10, None)
    assert found["audits"][ORIGINAL]["classes"] == list(NAMES)
    capsys.readouterr()


def test_a_model_from_the_current_folder(folder, tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_net.py").write_text(
        "import torch\n\n\ndef classify(images):\n    return images.flatten(1)[:, 800:810]\n"
    )
    monkeypatch.chdir(tmp_path)
    source = ["--source", f"folder:{folder}", "--samples", "9"]
    assert run(["audit", "my_own_net:classify", *source, *SCALES]) == 0
    assert sorted(path.name for path in (tmp_path / "audit").iterdir()) == FILES
    capsys.readouterr()


def test_errors_are_one_line_and_nothing_is_written(folder, tmp_path, capsys):
    (tmp_path / "weights.pt").write_bytes(b"PK something")
    (tmp_path / "latin.txt").write_bytes("café\nthé".encode("latin-1"))
    (tmp_path / "empty").mkdir()
    source, net = f"folder:{folder}", "audited_nets:net"
    cases = {
        "no model 'net.onnx'; pass": ["net.onnx", "--source", source],
        "cannot import 'nowhere'": ["nowhere:net", "--source", source],
        "contains no TorchScript, torch.export or ONNX": [
            str(tmp_path / "weights.pt"), "--source", source
        ],
        "is not a run": [str(tmp_path / "empty"), "--source", source],
        "shape (2, 10), one per class, got (2, 3)": ["audited_nets:few", "--source", source],
        "non-finite logits for 32 of 32 images at scale 1;": [
            "audited_nets:not_a_number", "--source", source
        ],
        "failed on images of shape (2, 1, 33, 33)": [
            "audited_nets:coloured", "--source", source, "--size", "33"
        ],
        # Its own number of channels: with the other one, any size fails.
        "failed on images of shape (2, 3, 33, 33)": [
            "audited_nets:coloured", "--source", source, "--size", "33"
        ],
        "No such file": [net, "--source", f"folder:{tmp_path / 'none'}"],
        "has no class subfolders": [net, "--source", f"folder:{tmp_path / 'empty'}"],
        "unknown data source 'nothing'": [net, "--source", "nothing"],
        "split must be one of": [net, "--source", source, "--split", "some"],
        "scales must look like": [net, "--source", source, "--scales", "1:2"],
        "pool must be one of": [net, "--source", source, "--pool", "mean"],
        "and --pool none makes none; leave it out": [
            net, "--source", source, "--patch", "8", "--pool", "none"
        ],
        "and fovmax has them already": ["fovmax", "--source", source, "--patch", "8"],
        "border must be": [net, "--source", source, "--border", "around"],
        "std must be a number": [net, "--source", source, "--std", "a"],
        "mean must be one number or one per channel (1), got 3": [
            net, "--source", source, "--mean", "1,2,3"
        ],
        "unknown device 'abacus'": [net, "--source", source, "--device", "abacus"],
        "class 'digit-0', which is not among the 2": [
            net, "--source", source, "--classes", "a,b"
        ],
        "class 'digit-0', which is not among the 40": [  # longer than a file name can be
            net, "--source", source, "--classes", ",".join(f"number {i}" for i in range(40))
        ],
        "cannot read the classes in": [
            net, "--source", source, "--classes", str(tmp_path / "latin.txt")
        ],
        "classes must be a,b,c or a file": [net, "--source", source, "--classes", " , "],
        "Missing option '--source'": [net],
    }  # fmt: skip
    for words, arguments in cases.items():
        assert run(["audit", *arguments, "--out", str(tmp_path / "out")]) == 2, words
        printed, err = capsys.readouterr()
        assert printed == "" and err.startswith("error: ") and err.count("\n") == 1, words
        assert words in err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_written_is_said(folder, tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    command = [
        "audit",
        "audited_nets:net",
        "--source",
        f"folder:{folder}",
        "--samples",
        "5",
        *SCALES,
    ]
    assert run([*command, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert f"cannot use {tmp_path / 'out'} (Not a directory)" in err and err.count("\n") == 1


def test_a_folder_without_a_picture_that_can_be_read(tmp_path, capsys):
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "a" / "x.png").write_bytes(b"nothing")
    source = f"folder:{tmp_path / 'in'}"
    assert run(["audit", "audited_nets:net", "--source", source, "--out", str(tmp_path / "o")]) == 2
    assert "none of the 1 images" in capsys.readouterr().err


def test_a_frame_that_is_not_square_gets_no_channels_and_says_so(tmp_path, capsys):
    from PIL import Image

    for name in "ab":
        (tmp_path / name).mkdir()
        Image.new("L", (12, 8), 40).save(tmp_path / name / "1.png")
    (tmp_path / "wide_net.py").write_text(
        "def classify(images):\n    return images.mean((2, 3)).repeat(1, 2)\n"
    )
    import sys

    sys.path.insert(0, str(tmp_path))
    try:
        command = ["audit", "wide_net:classify", "--source", f"folder:{tmp_path}", *SCALES]
        assert run([*command, "--out", str(tmp_path / "out")]) == 0
    finally:
        sys.path.remove(str(tmp_path))
    assert "scale channels require a square input, got 8 x 12" in capsys.readouterr().err
    assert set(content(tmp_path / "out")["audits"]) == {ORIGINAL}
