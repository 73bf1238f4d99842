"""The table of benchmarks: drawn from its JSON files alone, with correctly counted limits."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "benchmarks"))
import limits  # noqa: E402
import table  # noqa: E402
import timing  # noqa: E402

sys.path.pop()
CPU = torch.device("cpu")
ABOUT = {
    "machine": "a machine", "torch": "2.13", "load": 0.0, "quick": False, "copy": 2e9,
    "products": {"float32": 1e9},
}  # fmt: skip


WHEN = {"date": "2026-11-17", "commit": "abc", "load": 1.0}


def made(folder, **rows):
    (folder / "cpu.json").write_text(json.dumps({"about": ABOUT, "rows": rows}))
    lines = [line for line in table.page(folder).splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: dict(zip(table.COLUMNS, row, strict=False)) for row in cells}


def step():
    columns = {
        "ours": {"ms": [10.0, 12.0, 11.0]},
        "loop": {"ms": [20.0, 36.0, 44.0]},
        "compiled": {"missing": "ValueError: no"},
    }
    return {
        "title": "a step", "ours": "train", "alternative": "", "precision": "float32",
        "bytes": 4e6, "operations": 1e6, "columns": columns, **WHEN,
    }  # fmt: skip


def test_the_table_is_drawn_from_the_numbers(tmp_path):
    row = made(tmp_path, **{"fovavg-step": step()})["a step"]
    assert row["foveate"] == "11.0 (10.0–12.0)"
    assert row["loop over channels"] == "36.0 (20.0–44.0)"
    assert row["loop, compiled"] == "ValueError: no"
    assert row["alternative"] == "–"
    # 4 MB at 2 GB/s take 2 ms, 1 M operations at 1 G/s take 1 ms
    assert (row["limit: bytes"], row["limit: operations"]) == ("2.00", "1.00")
    assert row["loop / foveate"] == "3.00"  # the median of 2, 3 and 4, not 36 / 11
    assert row["foveate / limit"] == "5.50"


def test_rows_and_devices_without_numbers_are_shown(tmp_path):
    rows = made(tmp_path, **{"fovavg-step": {"title": "a step", "missing": "no", **WHEN}})
    assert rows["a step"]["foveate"] == "no"
    shown = {name for name, row in rows.items() if row.get("foveate") == "not measured"}
    assert shown == set(table.ROWS) - {"fovavg-step"} - set(table.GPU_ONLY)
    assert "## GPU\n\nNot measured yet." in table.page(tmp_path)


def test_the_published_page_is_that_of_the_published_numbers():
    folder = ROOT / "results" / "benchmarks"
    if not (folder / "README.md").exists():
        pytest.skip("the results are not part of this copy")
    assert (folder / "README.md").read_text(encoding="utf-8") == table.page(folder)


@pytest.mark.parametrize(("training", "operations"), [(False, 864), (True, 1944)])
def test_the_operations_of_a_network(training, operations):
    """A 3 x 3 convolution from 5 x 5 to 2 x 3 x 3 pixels, and a linear layer from 18 to 3 values.

    A patch takes 18 outputs x 9 products and 18 x 3 products, each with an addition: 324 + 108. The
    gradients of the weights take as many, and that of the linear layer's input another 108. The
    image needs no gradient.
    """
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(18, 3))
    work = limits.work_of(net, torch.randn(2, 1, 5, 5), training)
    assert work.operations == operations
    assert work.activations == 2 * (18 + 3)
    assert work.parameters == 2 * 9 + 2 + 3 * 18 + 3


def test_the_bytes_of_a_network():
    work = limits.Work(operations=7, activations=100, parameters=10, logits=3)
    images = (2, 1, 5, 5)
    evaluation = limits.of_network(work, images, training=False)
    assert evaluation == limits.Counts(bytes=4 * (50 + 10 + 2 * 3), operations=14)
    # bf16 activations of two images, written and read; weights and two moments, read and written
    training = limits.of_network(work, images, training=True, width=2)
    assert training.bytes == 4 * 50 + 2 * 2 * (2 * 100) + 6 * 4 * 10


def test_the_counts_of_resampling():
    """Two channels of a 16 x 16 image: windows of 4 and 8 pixels, patches of 4 x 4.

    Bilinear: 2 x 2 taps of 2 operations for each of 16 values. Antialiased at scale 2: 4 taps per
    axis; 8 operations for each of 4 x 8 values on the first axis, then for each of 16.
    """
    images, scales = (3, 1, 16, 16), (1.0, 2.0)
    plain = limits.of_resampling(images, scales, 4, antialias=False, backward=False)
    assert plain == limits.Counts(bytes=3 * 4 * (64 + 32), operations=3 * 2 * 8 * 16)
    smooth = limits.of_resampling(images, scales, 4, antialias=True, backward=True)
    assert smooth == limits.Counts(
        bytes=2 * plain.bytes, operations=2 * 3 * (8 * 16 + 8 * 32 + 8 * 16)
    )


def test_a_failure_costs_only_its_own_column():
    def fail():
        raise ValueError("no such thing\nand more")

    calls = []
    found = timing.alternate({"a": fail, "b": lambda: lambda: calls.append(1)}, CPU, 2, 1)
    assert found["a"] == {"missing": "ValueError: no such thing"}
    assert len(found["b"]["ms"]) == 2 and calls


def test_compiling_is_interrupted():
    compiler = timing.Compiler(1.05)
    with pytest.raises(timing.SkippedError, match="not compiled within 1 s"), compiler.limit():
        time.sleep(60)
    with pytest.raises(timing.SkippedError, match="used up"), compiler.limit():
        pass


def test_the_command_measures_one_row(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "run.py", "--quick", "--threads", "1"]
    command += ["--only", "resampling-bilinear-forward", "--out", tmp_path]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "cpu.json").read_text())
    (row,) = found["rows"].values()
    assert len(row["columns"]["ours"]["ms"]) == len(row["columns"]["loop"]["ms"]) == 2
    assert "--quick" in row["columns"]["compiled"]["missing"]
    assert row["title"] in (tmp_path / "README.md").read_text(encoding="utf-8")


def test_the_page_reads_what_the_lazy_benchmark_writes(tmp_path):
    command = [sys.executable, ROOT / "benchmarks" / "lazy.py", "none", "--out"]
    subprocess.run([*map(str, command), str(tmp_path / "lazy.json")], check=True)
    assert "1 thread of " in table.page(tmp_path)
