"""The pictures and the page of an audit, from counts that were made up."""

import html
import re
import warnings
from dataclasses import replace

import pytest
import torch

from foveate.evaluation.audit.changes import Change
from foveate.evaluation.audit.images import Transform
from foveate.evaluation.audit.measure import Audit, Counts
from foveate.evaluation.audit.report import IN_CHANNELS, ORIGINAL, AuditReport
from foveate.report.audit_page import CLASSES, audit_curves, audit_page, format_estimate, summary

SCALES = (0.5, 1.0, 2.0)
ABOUT = {
    "source": "folder:my photos", "split": "test", "images": 100, "checksum": "abc", "pool": "max",
    "patch": 9, "cost": {"pixels": 3.0},
    "version": "1", "commit": "", "hardware": "a CPU",
}  # fmt: skip
PICTURES = [torch.full((1, 9, 9), 40, dtype=torch.uint8)]


def counts(right, count=100):
    return Counts(count, right, right // 2, 0.8 * count, 0.65 * count)


def made(rights, classes=("a", "b"), scales=SCALES):
    """An audit with so many of 100 right at each scale, and half of that in each class."""
    each = tuple(
        tuple(counts(max(0, right - 5 * k), 100) for k in range(len(classes))) for right in rights
    )
    return Audit(
        scales=scales,
        native=1.0,
        classes=tuple(classes),
        overall=tuple(map(counts, rights)),
        per_class=each,
    )


def report(audits=None, metadata=None, **changes):
    usual = {
        "model": "mynet:net",
        "transform": Transform(size=(9, 9), channels=1),
        "channels": SCALES,
        "audits": audits or {ORIGINAL: made([30, 90, 50]), IN_CHANNELS: made([60, 80, 70])},
        "metadata": {**ABOUT, **(metadata or {})},
    }
    return AuditReport(**{**usual, **changes})


def words(found, trainable=True, changed=()):
    page = audit_page(found, PICTURES, trainable, changed).html()
    inside = re.sub(r"<(style|svg)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", inside)).replace("\u2060", "").split())


@pytest.mark.parametrize("measure", ["accuracy", "agreement", "confidence"])
def test_a_curve_is_the_measure_and_its_band_the_interval(measure):
    audits = report().audits
    (axes,) = audit_curves(audits, [measure]).axes
    assert measure in axes.get_ylabel() and axes.get_xscale() == "log"
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1/2", "1", "2"]
    for line, band, audit in zip(axes.get_lines(), axes.collections, audits.values(), strict=False):
        found = [getattr(c, measure) for c in audit.overall]
        assert list(line.get_xdata()) == list(SCALES)
        assert list(line.get_ydata()) == pytest.approx([100 * e.value for e in found])
        heights = band.get_paths()[0].vertices[:, 1]
        assert heights.max() == pytest.approx(100 * max(e.high for e in found))
        assert heights.min() == pytest.approx(100 * min(e.low for e in found))
    native = axes.get_lines()[2]
    assert list(native.get_xdata()) == [1.0, 1.0]
    guessing = [list(line.get_ydata()) for line in axes.get_lines()[3:]]
    assert guessing == ([[50, 50]] if measure == "accuracy" else [])


def test_all_measures_side_by_side_with_one_legend():
    figure = audit_curves(report().audits)
    assert len(figure.axes) == 3 and len(figure.legends) == 1
    assert [t.get_text() for t in figure.legends[0].get_texts()] == ["original model", IN_CHANNELS]
    assert not audit_curves({ORIGINAL: made([1, 2, 3])}).legends


def test_the_summary_says_how_it_holds():
    text = summary(made([30, 90, 50]))
    best = format_estimate(counts(90).accuracy)
    assert text.startswith(f"{best} % accuracy at the native scale 1")
    assert "on 100 images" in text and "more than 5 points at the neighbouring scales" in text
    assert f"it is {format_estimate(counts(30).accuracy)} % at scale 0.5" in text
    assert f"and {format_estimate(counts(50).accuracy)} % at scale 2" in text
    assert "at most 5 points from scale 1 to 2;" in summary(made([30, 90, 87]))
    alone = summary(made([90], scales=(1.0,)))
    assert alone == f"{best} % accuracy at the native scale 1, on 100 images."
    assert format_estimate(counts(90).accuracy) == "90.0 (83–94)"  # Wilson's interval, from tables


def test_the_page_has_both_forms_and_their_difference():
    text = words(report())
    assert (
        "accuracy changes by −10.0 points at the native scale and by +13.3 points on average"
        in text
    )
    row = [getattr(counts(30), measure) for measure in ("accuracy", "agreement", "confidence")]
    cells = map(format_estimate, [*row, counts(60).accuracy])
    assert " ".join(["0.500", *cells]) in text
    assert "load_model('mynet:net').net.train()" in text
    assert "scales = [0.5, 1, 2]" in text
    assert "ScaleChannels(backbone, scales, size=9, pool='max', antialias=True)" in text
    assert "in scale channels 60.0 80.0 70.0 70.0 difference +30.0 −10.0 +20.0 +13.3" in text
    assert "processes 3 times the pixels" in text


def test_the_page_says_what_lies_outside_of_the_image():
    small = {ORIGINAL: made([30, 50, 90], scales=(0.25, 0.5, 1.0))}
    kinds = ({}, {"recipe": "mnist-large-scale"}, {"recipe": "mirrored"}, {"view": "resolution"})
    transforms = [Transform(size=(9, 9), channels=1, **kind) for kind in kinds]
    framed, black, mirrored, less = (words(report(small, transform=t)) for t in transforms)
    assert "is cropped, and the area around a smaller image is padded." in framed
    assert "is cropped, and the area around a smaller image is black." in black
    assert "is cropped, and mirror images surround a smaller image." in mirrored
    assert "the same scene" in less and "is cropped" not in less
    assert all("is padded" not in text for text in (black, mirrored, less))


def test_the_code_of_the_page_loads_a_torchscript_file(tmp_path):
    """Such a file can run code, so it is loaded with trust only."""
    program = str(tmp_path / "net.pt")
    layers = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(81, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.script(layers).save(program)
    page = html.unescape(audit_page(report(model=program), PICTURES).html())
    names = {}
    exec(re.search(r"<pre><code>(.*?)</code>", page, re.DOTALL)[1], names)  # noqa: S102
    assert names["net"](torch.rand(2, 1, 18, 18)).shape == (2, 2)


def test_without_weights_or_channels_the_page_says_so():
    assert "audit the PyTorch module" in words(report(), trainable=False)
    alone = report({ORIGINAL: made([1, 2, 3])}, channels=())
    text = words(alone, trainable=False)
    assert (
        "was not wrapped in scale channels: it already has them, --pool none was given, or" in text
    )


def test_notes_and_what_was_left_out_are_on_the_page():
    text = words(report(notes=("mind <this>",), unreadable=("cannot read image x.png",)))
    assert "Mind <this>." in text and "cannot read image x.png" in text
    assert "skipped 1 unreadable image " in text


def test_classes_come_with_those_first_that_lose_most_and_not_without_end():
    names = [f"class{k:02}" for k in range(CLASSES + 3)]
    # Class k has 50 + k of 100 right at the native scale, and loses these k points elsewhere.
    per_class = tuple(
        tuple(counts(50 + k if i == 1 else 50) for k in range(len(names))) for i in range(3)
    )
    audit = Audit(
        scales=SCALES, native=1.0, classes=tuple(names), overall=(counts(50),) * 3,
        per_class=per_class,
    )  # fmt: skip
    text = words(report({ORIGINAL: audit}))
    shown_names = re.findall(r"class\d\d", text)
    assert shown_names == names[::-1][:CLASSES]
    assert "and the remaining 3 classes" in text


def test_few_images_of_a_class_give_no_shares_and_a_class_without_any_is_not_shown():
    names = ("many", "few", "enough", "nowhere")
    per_class = ((counts(50), counts(4, 9), counts(5, 10), counts(0, 0)),) * 3
    audit = Audit(
        scales=SCALES, native=1.0, classes=names, overall=(counts(50),) * 3, per_class=per_class
    )
    text = words(report({ORIGINAL: audit}))
    assert "many 100 50.0 50.0 50.0 enough 10 50.0 50.0 50.0 few 9 (too few) – – –" in text
    assert "classes with fewer than 10 images are at the end" in text
    assert "nowhere" not in text


def test_changed_predictions_are_shown_at_both_scales():
    change = Change(7, 1, 0.5, 1, 0.93, 0, 0.81)
    found = report({ORIGINAL: replace(made([30, 90, 50], ("hat", "shoe")), changes=(change,))})
    text = words(found, changed=PICTURES)
    assert "shoe scale 1: shoe, 93 % scale 0.5: hat, 81 %" in text
    assert "at most 3 are of one class" in text
    page = audit_page(found, PICTURES, changed=PICTURES).html()
    assert page.count('<img src="data:image/jpeg;base64,') == 2
    assert "Changed predictions" not in words(found)
