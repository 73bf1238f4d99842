"""Draw results/benchmarks/README.md from the JSON files beside it, without measuring anything."""

import json
from pathlib import Path
from statistics import median
from typing import Any

WRAPPED = ("tf_efficientnet_lite0", "resnet18", "vit_tiny_patch16_224")
BATCHES = (1, 4, 16)
RUNS = ("fovavg", "fovmax", "cnn", "swmax")
ROWS = (
    "fovavg-evaluation",
    "resampling-bilinear-forward",
    "resampling-bilinear-backward",
    "resampling-antialiased-forward",
    "resampling-antialiased-backward",
    *(f"{name}-evaluation-{batch}" for name in WRAPPED for batch in BATCHES),
    "fovavg-step",
    *(f"{name}-step" for name in WRAPPED),
    "reading",
    *(f"run-{name}" for name in RUNS),
)  # fmt: skip
"""All rows in the order in which they are measured: evaluation before training, which changes how
memory is allocated."""
DEVICES = {"cpu": "CPU", "cuda": "GPU"}
GPU_ONLY = tuple(f"run-{name}" for name in RUNS)
COLUMNS = (
    "measurement",
    "foveate",
    "loop over channels",
    "loop, compiled",
    "alternative",
    "limit: bytes",
    "limit: operations",
    "loop / foveate",
    "foveate / limit",
)
Row = dict[str, Any]
INTRODUCTION = """\
# Benchmarks

`python benchmarks/run.py --device cpu` and `--device cuda` measure the tables below. Do not edit
this file: the command writes it from the JSON files in this folder, which also contain the times of
each round.

Times are in milliseconds: the median over the rounds, and in brackets the shortest and the longest.
Each round runs all implementations in a row in turn. All have the same precision: float32 on a CPU,
and bf16 (autocast) on a GPU, except for resampling, which is in float32. Weights and images are
random. Wrapped backbones receive images of 448 × 448 pixels.

- **foveate** is called as a user would call it; the notes below each table describe the call.
- **Loop over channels** is the plain implementation: for each channel, resize with `F.interpolate`,
  crop, run the backbone; then pool.
- **Loop, compiled** is `torch.compile` of that loop, with static shapes and, on a GPU,
  `mode="reduce-overhead"`. For the wrapped backbones, the backbone within the loop is compiled.
  `--compiling` limits the time of compilation.
- **Alternative** is what one would use without scale channels, at about the same number of pixels.
- **Limits** are the fewest bytes divided by the measured bandwidth of a copy, and the fewest
  operations divided by the measured rate of a matrix product. Evaluation must read images and
  weights and write logits; a training step must also write each layer's output and read it once,
  and update the weights and Adam's moments. `benchmarks/limits.py` counts both. A CPU can be faster
  than the limit by bytes if the data stay in its cache.
- **foveate / limit** uses the larger limit. The ratios are medians over the rounds.
"""


def page(folder: Path) -> str:
    """Return the text of the page from all result files in a folder."""
    parts = [INTRODUCTION]
    for device, title in DEVICES.items():
        path = folder / f"{device}.json"
        parts.append(
            section(title, device, json.loads(path.read_text()) if path.exists() else None)
        )
    lazy = folder / "lazy.json"
    parts.append(lazy_section(json.loads(lazy.read_text()) if lazy.exists() else []))
    return "\n".join(parts)


def section(title: str, device: str, found: dict[str, Any] | None) -> str:
    """Return the table of a device."""
    if found is None:
        return f"## {title}\n\nNot measured yet.\n"
    about = found["about"]
    names = [name for name in ROWS if device == "cuda" or name not in GPU_ONLY]
    rows = [cells(name, found["rows"].get(name), about) for name in names]
    lines = [f"## {title}", "", heading(about, found["rows"]), ""]
    lines += [markdown(COLUMNS), "|---|" + "---:|" * (len(COLUMNS) - 1), *map(markdown, rows), ""]
    if "growth" in found:
        lines += [f"![Time of an evaluation of FovAvg against channels, pixels, batch and images]"
                  f"(growth-{device}.png)", ""]  # fmt: skip
    return "\n".join(
        [*lines, notes([found["rows"][name] for name in names if name in found["rows"]])]
    )


def heading(about: dict[str, Any], rows: dict[str, Row]) -> str:
    """Describe the machine and the time of the measurement."""
    said = {key: ", ".join(sorted({r[key] for r in rows.values()})) for key in ("date", "commit")}
    loads = [about["load"], *(row["load"] for row in rows.values() if "load" in row)]
    products = ", ".join(
        f"{rate / 1e9:,.0f} GFLOP/s ({p})" for p, rate in about["products"].items()
    )
    quick = "**Quick check with small batches; not a result.** " if about["quick"] else ""
    return (
        f"{quick}{about['machine']}, torch {about['torch']}, {said['date']}, commit "
        f"{said['commit']}. Copy {about['copy'] / 1e9:,.1f} GB/s, matrix product {products}. "
        f"Load average {min(loads)} to {max(loads)} where recorded; more than the number of "
        "threads means that other programs disturbed the measurement."
    )


def cells(name: str, row: Row | None, about: dict[str, Any]) -> list[str]:
    """Return the cells of a row; a row that was not measured has no numbers."""
    if row is None:
        return [name, *["not measured"] * (len(COLUMNS) - 1)]
    if "missing" in row:
        return [row["title"], row["missing"], *["–"] * (len(COLUMNS) - 2)]
    columns = row["columns"]
    shown = [cell(columns.get(key)) for key in ("ours", "loop", "compiled", "alternative")]
    limits = limits_of(row, about)
    ours = times(columns.get("ours"))
    return [
        row["title"],
        *shown,
        *(number(limit) if limit else "–" for limit in limits or (None, None)),
        ratio(times(columns.get("loop")), ours),
        ratio(ours, [max(limits)] * len(ours)) if limits else "–",
    ]


def limits_of(row: Row, about: dict[str, Any]) -> tuple[float, float] | None:
    """Return the limits by bytes and by operations in milliseconds."""
    if not row.get("bytes"):
        return None
    rate = about["products"][row["precision"]]
    return 1e3 * row["bytes"] / about["copy"], 1e3 * row["operations"] / rate


def times(found: dict[str, Any] | None) -> list[float]:
    return found.get("ms", []) if found else []


def ratio(over: list[float], under: list[float]) -> str:
    """Return the median ratio of two lists of times."""
    if not over or not under:
        return "–"
    return f"{median(a / b for a, b in zip(over, under, strict=False)):.2f}"


def cell(found: dict[str, Any] | None) -> str:
    """Return the median and the range of a candidate, or why there is none."""
    if found is None:
        return "–"
    if "missing" in found:
        return str(found["missing"]).replace("|", "/")
    low, high = min(found["ms"]), max(found["ms"])
    middle = number(median(found["ms"]))
    return middle if low == high else f"{middle} ({number(low)}–{number(high)})"


def number(value: float) -> str:
    """Return three significant digits, without an exponent."""
    digits = max(0, 2 - len(f"{int(abs(value))}") + 1) if abs(value) >= 1 else 3
    return f"{value:,.{digits}f}"


def markdown(row: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(row) + " |"


def notes(rows: list[Row]) -> str:
    """List how foveate was called and the alternatives, each with its rows."""
    lines = []
    for key, title in (("ours", "foveate"), ("alternative", "Alternative")):
        used: dict[str, list[str]] = {}
        for row in rows:
            if row.get(key):
                used.setdefault(row[key], []).append(subject(row["title"]))
        for text, titles in used.items():
            lines.append(f"- {title}, {', '.join(dict.fromkeys(titles))}: {text}.")
    return "\n".join([*lines, ""])


def subject(title: str) -> str:
    """Return the title of a row without its sizes: the network, and what is measured."""
    parts = title.split(", ")
    kinds = [part for part in parts if part in ("evaluation", "training step")]
    return " ".join([parts[0].partition(" (")[0], *kinds])


def lazy_section(measured: list[dict[str, Any]]) -> str:
    """Return the table of lazy evaluation, which benchmarks/lazy.py measures."""
    lines = [
        "## Lazy evaluation", "",
        "`python benchmarks/lazy.py` compares `net.lazy = tolerance` with the evaluation of all "
        "channels, in CPU time of one thread.", "",
        "| network | images | channels | evaluated, mean | all / lazy, CPU time | class differs |",
        "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for row in (row for one in measured for row in one["networks"]):
        lines.append(
            f"| {row['network']} | {row['test images']:,} | {row['channels']} | "
            f"{row['mean channels evaluated']:.2f} | "
            f"{row['ratio of CPU time']:.2f} | {100 * row['disagreement']:.3f} % |"
        )
    about = [f"{one['hardware']}, {one['date']}." for one in measured] or ["Not measured yet."]
    return "\n".join([*lines, "", *dict.fromkeys(about), ""])
