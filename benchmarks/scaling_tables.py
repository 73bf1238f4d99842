"""Write the tables of docs/scaling.md from the measurements of benchmarks/scaling.py.

python benchmarks/scaling_tables.py    updates the page from results/benchmarks/scaling.json
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "benchmarks" / "scaling.json"
DOC = ROOT / "docs" / "scaling.md"

# Further inputs of the extrapolation. Measured on one H200 (results/benchmarks/training.json):
# three runs of FovAvg with batches of 16 in parallel, the time to their first step, and one step.
# Assumed, not measured: the duration of an all-reduce over GPUs.
GPUS, RUNS_PER_GPU, EPOCHS, IMAGES = 64, 3, 20, 50_000
RUN, FIRST = 5.8, 11.9  # seconds: one run when three share a GPU, and the time to its first step
STEP = 0.431  # ms: FovAvg, batch 128, captured
LATENCY_IN_NODE, LATENCY_BETWEEN_NODES = 0.02, 0.05  # ms of an all-reduce
PER_NODE = 8  # GPUs
LARGE = 100.0  # ms: the step of a network that is large enough for many GPUs


def table(head: list[str], rows: list[list[object]]) -> str:
    """Return a Markdown table with numbers rounded to three significant digits."""
    lines = [
        head,
        ["---", *["---:"] * (len(head) - 1)],
        *([_cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{float(f'{value:.3g}'):,g}" if isinstance(value, float) else str(value)


def by_setting(found: dict[str, float], name: str, work: str, power: int) -> str:
    """Compare the growth of the step time with that of the work, a power of the setting."""
    first = next(iter(found))
    rows: list[list[object]] = [
        [key, ms, ms / found[first], (float(key) / float(first)) ** power]
        for key, ms in found.items()
    ]
    return table([name, "ms per step", "relative time", f"relative {work}"], rows)


def by_batch(found: dict[str, float]) -> str:
    rows: list[list[object]] = [[key, ms, ms / float(key)] for key, ms in found.items()]
    return table(["batch size", "ms per step", "ms per image"], rows)


def by_images(found: dict[str, dict[str, float]]) -> str:
    rows: list[list[object]] = [
        [count, at["epoch, s"], 1e3 * at["epoch, s"] / float(count), at["before the first step, s"]]
        for count, at in found.items()
    ]
    return table(["images", "epoch, s", "ms per image", "preparation, s"], rows)


def by_processes(found: dict[str, dict[str, float]]) -> str:
    alone = found["1"]["epoch, s"]
    keys = {  # keys of the measurement, and the column titles
        "sums per step": "all-reduces per step",
        "a norm's sum, ms": "all-reduce of a norm, ms",
        "all gradients, ms": "all-reduce of the gradients, ms",
    }
    rows: list[list[object]] = [
        [name, at["epoch, s"], alone / at["epoch, s"], *(at.get(key, "") for key in keys)]
        for name, at in found.items()
    ]
    return table(["processes", "epoch, s", "speed-up", *keys.values()], rows)


def pieces(found: dict[str, Any]) -> str:
    """Storage, memory and overheads of a run and of a study."""
    run, ray = found["run"], found["ray"]
    rows: list[list[object]] = [
        ["weights of a run, kB", run["weights, kB"]],
        ["checkpoint of a run, kB", run["checkpoint, kB"]],
        ["saving a checkpoint, flushed to disk, ms", run["a save, ms"]],
        ["memory of an image on a CPU, 17 patches, kB", run["patches of an image, kB"]],
        ["memory of an image on a GPU, windows of 17 patches, kB", run["windows of an image, kB"]],
        *[[f"writing the tables of {n} runs, s", s] for n, s in found["table"].items()],
        ["starting Ray on one machine, s", ray["start, s"]],
        ["results per second through Ray", ray["results per s"]],
    ]
    return table(["quantity", "measured"], rows)


def many_runs(found: dict[str, Any]) -> str:
    """Extrapolate a sweep of the paper's runs to 64 GPUs with three runs per GPU."""
    run = found["run"]
    each = RUNS_PER_GPU * RUN + FIRST
    rate = GPUS * RUNS_PER_GPU / each
    saves, held = rate * (EPOCHS + 1), IMAGES * run["windows of an image, kB"] / 1e6
    rows: list[list[object]] = [
        ["parallel runs", GPUS * RUNS_PER_GPU],
        ["duration of a run including its start, s", each],
        ["share of that time before the first step, %", 100 * FIRST / each],
        ["runs per hour", 3600 * rate],
        ["results per second; limit of the driver", f"{rate:.1f}; {ray_rate(found):.0f}"],
        ["checkpoints per second on shared storage", saves],
        ["checkpoints, MB per second", saves * run["checkpoint, kB"] / 1e3],
        ["weights sent to the driver instead, MB per second", rate * run["weights, kB"] / 1e3],
        ["images of three runs on a GPU, GB", RUNS_PER_GPU * held],
    ]
    return table(["on 64 GPUs", "extrapolated"], rows)


def ray_rate(found: dict[str, Any]) -> float:
    return float(found["ray"]["results per s"])


def one_run(found: dict[str, Any]) -> str:
    """Extrapolate one run to up to 64 GPUs: divided work plus the time of the all-reduces."""
    sums = found["processes"]["2, shared norms"]["sums per step"] + 1  # plus one for the gradients
    rows: list[list[object]] = []
    for count in (1, 2, 4, 8, 16, 64):
        latency = LATENCY_IN_NODE if count <= PER_NODE else LATENCY_BETWEEN_NODES
        wait = 0 if count == 1 else sums * latency
        steps = [work / count + wait for work in (STEP, LARGE)]
        rows.append([count, steps[0], STEP / steps[0], steps[1], LARGE / steps[1]])
    return table(["GPUs", "FovAvg, ms", "speed-up", f"step of {LARGE:g} ms, ms", "speed-up"], rows)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Return every table of the page by name."""
    return {
        "channels": by_setting(found["channels"], "channels", "channels", 1),
        "patch": by_setting(found["patch"], "patch", "area", 2),
        "batch": by_batch(found["batch"]),
        "images": by_images(found["images"]),
        "processes": by_processes(found["processes"]),
        "pieces": pieces(found),
        "many": many_runs(found),
        "one": one_run(found),
    }


def refresh(page: str, found: dict[str, Any]) -> str:
    """Replace the tables between <!-- scaling:begin NAME --> and <!-- scaling:end -->."""
    for name, text in tables(found).items():
        begin, end = f"<!-- scaling:begin {name} -->", "<!-- scaling:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        assert found_begin and found_end, f"the page has no markers for {name}"
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    DOC.write_text(refresh(DOC.read_text(), json.loads(RESULTS.read_text())[0]["printed"]))
