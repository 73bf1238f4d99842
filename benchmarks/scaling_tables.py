"""Tables of docs/scaling.md, generated from the measurements of benchmarks/scaling.py.

python benchmarks/scaling_tables.py    update the page from results/benchmarks/scaling.json
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "benchmarks" / "scaling.json"
DOC = ROOT / "docs" / "scaling.md"

# Constants of the extrapolation that benchmarks/scaling.py does not measure. RUN, FIRST and STEP
# were measured on one H200 (docs/log.md): three concurrent runs of FovAvg with batches of 32, and
# the time to their first step. NEAR and FAR, the latency of an all-reduce, are assumptions.
GPUS, BESIDE, EPOCHS, IMAGES = 64, 3, 20, 50_000
RUN, FIRST = 8.4, 31.5  # s: a run if three share the GPU, and the time before its first step
STEP = 0.82  # ms: FovAvg, batch 128, captured as a CUDA graph
NEAR, FAR, PER_NODE = 0.02, 0.05, 8  # ms within a node and between nodes; GPUs of a node
LARGE = 100.0  # ms: a step of a network large enough for many GPUs


def table(head: list[str], rows: list[list[object]]) -> str:
    """Format a Markdown table, with numbers rounded to three digits."""
    lines = [
        head,
        ["---", *["---:"] * (len(head) - 1)],
        *([_cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{float(f'{value:.3g}'):,g}" if isinstance(value, float) else str(value)


def by_setting(found: dict[str, float], name: str, work: str, power: int) -> str:
    """Tabulate step times and their growth, next to the growth of the work: setting ** power."""
    first = next(iter(found))
    rows: list[list[object]] = [
        [key, ms, ms / found[first], (float(key) / float(first)) ** power]
        for key, ms in found.items()
    ]
    return table([name, "ms", "relative time", f"relative {work}"], rows)


def by_batch(found: dict[str, float]) -> str:
    rows: list[list[object]] = [[key, ms, ms / float(key)] for key, ms in found.items()]
    return table(["batch", "ms", "ms per image"], rows)


def by_images(found: dict[str, dict[str, float]]) -> str:
    rows: list[list[object]] = [
        [count, at["epoch, s"], 1e3 * at["epoch, s"] / float(count), at["before the first step, s"]]
        for count, at in found.items()
    ]
    return table(["images", "epoch, s", "ms per image", "before the first step, s"], rows)


def by_processes(found: dict[str, dict[str, float]]) -> str:
    alone = found["1"]["epoch, s"]
    keys = ("sums per step", "a norm's sum, ms", "all gradients, ms")
    rows: list[list[object]] = [
        [name, at["epoch, s"], alone / at["epoch, s"], *(at.get(key, "") for key in keys)]
        for name, at in found.items()
    ]
    return table(["processes", "epoch, s", "speed-up", *keys], rows)


def pieces(found: dict[str, Any]) -> str:
    """Tabulate the costs of a run and a study other than computation."""
    run, ray = found["run"], found["ray"]
    rows: list[list[object]] = [
        ["weights of a run, kB", run["weights, kB"]],
        ["checkpoint of a run, kB", run["checkpoint, kB"]],
        ["a save that reaches the disk, ms", run["a save, ms"]],
        ["an image in CPU memory (17 patches), kB", run["patches of an image, kB"]],
        ["an image in GPU memory (the windows of the patches), kB", run["windows of an image, kB"]],
        *[[f"time to write the tables of {n} runs, s", s] for n, s in found["table"].items()],
        ["time to start Ray on one machine, s", ray["start, s"]],
        ["results per second through Ray", ray["results per s"]],
    ]
    return table(["quantity", "measured"], rows)


def many_runs(found: dict[str, Any]) -> str:
    """Extrapolate a sweep of the paper's runs to 64 GPUs, with three runs per GPU."""
    run = found["run"]
    each = BESIDE * RUN + FIRST
    rate = GPUS * BESIDE / each
    saves, held = rate * (EPOCHS + 1), IMAGES * run["windows of an image, kB"] / 1e6
    rows: list[list[object]] = [
        ["concurrent runs", GPUS * BESIDE],
        ["time of a run including its start, s", each],
        ["share of that time before the first step, %", 100 * FIRST / each],
        ["runs per hour", 3600 * rate],
        ["results per second; capacity of the driver", f"{rate:.1f}; {ray_rate(found):.0f}"],
        ["saves per second to shared storage", saves],
        ["checkpoints to shared storage, MB per second", saves * run["checkpoint, kB"] / 1e3],
        ["weights to the driver instead, MB per second", rate * run["weights, kB"] / 1e3],
        ["images on a GPU, three runs, GB", BESIDE * held],
    ]
    return table(["on 64 GPUs", "extrapolated"], rows)


def ray_rate(found: dict[str, Any]) -> float:
    return float(found["ray"]["results per s"])


def one_run(found: dict[str, Any]) -> str:
    """Extrapolate one run to 64 GPUs: the work is divided, the latency of reductions is added."""
    sums = found["processes"]["2, shared norms"]["sums per step"] + 1  # + 1 for the gradients
    rows: list[list[object]] = []
    for count in (1, 2, 4, 8, 16, 64):
        wait = 0 if count == 1 else sums * (NEAR if count <= PER_NODE else FAR)
        steps = [work / count + wait for work in (STEP, LARGE)]
        rows.append([count, steps[0], STEP / steps[0], steps[1], LARGE / steps[1]])
    return table(["GPUs", "FovAvg, ms", "speed-up", f"{LARGE:g} ms step, ms", "speed-up"], rows)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Return all tables of the page by name."""
    return {
        "channels": by_setting(found["channels"], "channels", "number of channels", 1),
        "patch": by_setting(found["patch"], "patch", "area", 2),
        "batch": by_batch(found["batch"]),
        "images": by_images(found["images"]),
        "processes": by_processes(found["processes"]),
        "pieces": pieces(found),
        "many": many_runs(found),
        "one": one_run(found),
    }


def refresh(page: str, found: dict[str, Any]) -> str:
    """Insert each table between <!-- scaling:begin NAME --> and <!-- scaling:end -->."""
    for name, text in tables(found).items():
        begin, end = f"<!-- scaling:begin {name} -->", "<!-- scaling:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        assert found_begin and found_end, f"{DOC.name} has no marks for the table {name}"
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    DOC.write_text(refresh(DOC.read_text(), json.loads(RESULTS.read_text())[0]["printed"]))
