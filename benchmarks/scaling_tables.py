"""The tables of docs/scaling.md, made of what benchmarks/scaling.py measured.

python benchmarks/scaling_tables.py    refreshes the page from results/benchmarks/scaling.json
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "benchmarks" / "scaling.json"
DOC = ROOT / "docs" / "scaling.md"

# What the extrapolation takes from elsewhere. On one H200 in docs/log.md: three runs of FovAvg with
# batches of 32 side by side, and the time to their first step. Assumed, not measured: how long GPUs
# wait for a sum.
GPUS, BESIDE, EPOCHS, IMAGES = 64, 3, 20, 50_000
RUN, FIRST = 8.4, 31.5  # seconds: of a run where three share the GPU, and before its first step
STEP = 0.82  # ms: FovAvg, batch 128, captured
NEAR, FAR, PER_NODE = 0.02, 0.05, 8  # ms of a small sum within a node and across; GPUs of a node
LARGE = 100.0  # ms: the step of a network that is worth many GPUs


def table(head: list[str], rows: list[list[object]]) -> str:
    """A Markdown table; numbers to three digits."""
    lines = [
        head,
        ["---", *["---:"] * (len(head) - 1)],
        *([_cell(value) for value in row] for row in rows),
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: object) -> str:
    return f"{float(f'{value:.3g}'):,g}" if isinstance(value, float) else str(value)


def by_setting(found: dict[str, float], name: str, work: str, power: int) -> str:
    """Milliseconds of a step, and how they grow beside the work, a power of the setting."""
    first = next(iter(found))
    rows: list[list[object]] = [
        [key, ms, ms / found[first], (float(key) / float(first)) ** power]
        for key, ms in found.items()
    ]
    return table([name, "ms", "times the first", f"times the {work}"], rows)


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
    return table(["processes", "epoch, s", "speed", *keys], rows)


def pieces(found: dict[str, Any]) -> str:
    """What a run and a study need besides computing."""
    run, ray = found["run"], found["ray"]
    rows: list[list[object]] = [
        ["weights of a run, kB", run["weights, kB"]],
        ["checkpoint of a run, kB", run["checkpoint, kB"]],
        ["a save that reaches the disk, ms", run["a save, ms"]],
        ["an image as the CPU holds it, 17 patches, kB", run["patches of an image, kB"]],
        ["an image as a GPU holds it, their windows, kB", run["windows of an image, kB"]],
        *[[f"writing the tables of {n} runs, s", s] for n, s in found["table"].items()],
        ["start of Ray on one machine, s", ray["start, s"]],
        ["results per second through Ray", ray["results per s"]],
    ]
    return table(["what", "measured"], rows)


def many_runs(found: dict[str, Any]) -> str:
    """A sweep of the paper's runs on 64 GPUs, three to a GPU."""
    run = found["run"]
    each = BESIDE * RUN + FIRST
    rate = GPUS * BESIDE / each
    saves, held = rate * (EPOCHS + 1), IMAGES * run["windows of an image, kB"] / 1e6
    rows: list[list[object]] = [
        ["runs at once", GPUS * BESIDE],
        ["seconds of a run, its start included", each],
        ["of these to the first step, %", 100 * FIRST / each],
        ["runs per hour", 3600 * rate],
        ["results per second; the driver can take", f"{rate:.1f}; {ray_rate(found):.0f}"],
        ["saves per second to shared storage", saves],
        ["MB per second of checkpoints", saves * run["checkpoint, kB"] / 1e3],
        ["MB per second of weights to the driver instead", rate * run["weights, kB"] / 1e3],
        ["GB of images on a GPU, three runs", BESIDE * held],
    ]
    return table(["on 64 GPUs", "extrapolated"], rows)


def ray_rate(found: dict[str, Any]) -> float:
    return float(found["ray"]["results per s"])


def one_run(found: dict[str, Any]) -> str:
    """One run on up to 64 GPUs: the work is divided, the sums are waited for."""
    sums = found["processes"]["2, shared norms"]["sums per step"] + 1  # and the gradients'
    rows: list[list[object]] = []
    for count in (1, 2, 4, 8, 16, 64):
        wait = 0 if count == 1 else sums * (NEAR if count <= PER_NODE else FAR)
        steps = [work / count + wait for work in (STEP, LARGE)]
        rows.append([count, steps[0], STEP / steps[0], steps[1], LARGE / steps[1]])
    return table(["GPUs", "FovAvg, ms", "speed", f"a step of {LARGE:g} ms", "speed"], rows)


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Every block of the page, by its name."""
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
    """Put the tables between their marks, <!-- scaling:begin NAME --> and <!-- scaling:end -->."""
    for name, text in tables(found).items():
        begin, end = f"<!-- scaling:begin {name} -->", "<!-- scaling:end -->"
        before, found_begin, rest = page.partition(begin)
        _, found_end, after = rest.partition(end)
        assert found_begin and found_end, f"the page has no place for {name}"
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


if __name__ == "__main__":
    DOC.write_text(refresh(DOC.read_text(), json.loads(RESULTS.read_text())[0]["printed"]))
