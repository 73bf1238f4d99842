"""Measure speed against a plain loop, torch.compile, alternatives and limits; write one table.

python benchmarks/run.py                     2 CPU threads (about 20 minutes)
python benchmarks/run.py --device cuda       a GPU (about 4 minutes); whole runs need MNIST cached
python benchmarks/run.py --only fovavg-step  one row; the other rows of the file are kept
python benchmarks/run.py --quick             a check that all rows work; small batches, 2 rounds

The results are written to results/benchmarks after each row: the numbers to cpu.json or cuda.json,
and README.md and the figure growth-cpu or growth-cuda from them. With --quick they are written to a
temporary folder unless --out is given.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import growth
import torch
import torch._inductor.config as inductor
from cases import Case, Setup, fovavg_evaluation, fovavg_step, resampling
from limits import copy_rate, product_rate
from table import GPU_ONLY, ROWS, page
from timing import Compiler, SkippedError, alternate, describe

from foveate.provenance import commit
from foveate.report.plots import save_figure

OUT = Path(__file__).parents[1] / "results" / "benchmarks"
COMPILING = {"cpu": 600, "cuda": 60}  # seconds for compiling the plain loops
TOTAL = {"cpu": 3600, "cuda": 240}  # seconds after which rows are skipped and whole runs end
NAMES = (*(name for name in ROWS if name not in GPU_ONLY), "growth", *GPU_ONLY)
ROUNDS, SECONDS = 9, 12.0  # rounds of a row, fewer (at least three) if they take longer


def build(name: str, setup: Setup) -> Case:
    """Return the candidates of a row."""
    if name == "fovavg-step":
        return fovavg_step(setup)
    if name == "fovavg-evaluation":
        return fovavg_evaluation(setup)
    if name.startswith("resampling"):
        return resampling(setup, "antialiased" in name, name.endswith("backward"))
    import photo_cases

    if name == "reading":
        return photo_cases.reading(setup)
    backbone, _, rest = name.partition("-")
    if rest == "step":
        return photo_cases.wrapped_step(setup, backbone)
    return photo_cases.wrapped_evaluation(setup, backbone, int(rest.rpartition("-")[2]))


def measure(name: str, setup: Setup, left: float) -> dict[str, Any]:
    """Measure a row in the seconds that are left; a failure is its result."""
    begun = time.perf_counter()
    try:
        if left < 5:
            raise SkippedError("no time left; increase --seconds")
        if name in GPU_ONLY:
            found = whole_run(name, left)
        else:
            found = measure_case(build(name, setup), setup)
    except Exception as error:
        found = {"title": name, **describe(error)}
    found |= {"commit": commit(), "date": date.today().isoformat(), "command": command()}
    found |= {
        "seconds": round(time.perf_counter() - begun, 1),
        "load": round(os.getloadavg()[0], 1),
    }
    return found


def measure_case(case: Case, setup: Setup) -> dict[str, Any]:
    rounds = 2 if setup.quick else ROUNDS
    found: dict[str, Any] = {"title": case.title, "ours": case.ours}
    found |= {"alternative": case.alternative, "precision": case.precision}
    if case.counts:
        found |= {"bytes": case.counts.bytes, "operations": case.counts.operations}
    return {**found, "columns": alternate(case.candidates, setup.device, rounds, SECONDS)}


def whole_run(name: str, left: float) -> dict[str, Any]:
    """Train three seeds side by side in a process of their own, with benchmarks/training.py."""
    network = name.removeprefix("run-")
    script = Path(__file__).parent / "training.py"
    done = subprocess.run(
        [sys.executable, str(script), "--only", network],
        capture_output=True, text=True, timeout=left, check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["failed"])[-1])
    printed = json.loads(done.stdout.splitlines()[-1].partition(" ")[2])
    steady = printed["20 epochs per run after the first epoch's rate, s"]
    first = printed["first step, cold, s"]
    return {
        "title": f"A run of {network}, 20 epochs (first step after {first:.0f} s)",
        "ours": "`train_together`, three seeds side by side, bf16, time per run without the start",
        "columns": {"ours": {"ms": [1e3 * steady]}},
        "printed": printed,
    }


def describe_machine(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Return the machine, its measured rates and the versions."""
    gpu, quick = device.type == "cuda", options.quick
    side = 8192 if gpu else 256 if quick else 2048
    size = (1 << 30) if gpu else (1 << 22) if quick else (1 << 28)
    dtypes = {"float32": torch.float32} | ({"bf16": torch.bfloat16} if gpu else {})
    machine = torch.cuda.get_device_name() if gpu else f"{options.threads} threads of {processor()}"
    return {
        "machine": machine,
        "torch": torch.__version__,
        "load": round(os.getloadavg()[0], 1),
        "quick": quick,
        "copy": copy_rate(device, size),
        "products": {name: product_rate(device, dtype, side) for name, dtype in dtypes.items()},
    }


def command() -> str:
    return shlex.join(["python", "benchmarks/run.py", *sys.argv[1:]])


def processor() -> str:
    """Return the name of the processor and its number of cores."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else 'a CPU'} with {os.cpu_count()} cores"


def write(folder: Path, device: str, found: dict[str, Any]) -> None:
    """Write the numbers, and the page from them."""
    (folder / f"{device}.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(page(folder), encoding="utf-8")


def earlier(path: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the rows of an earlier run on the same machine, for --only."""
    found = json.loads(path.read_text()) if path.exists() else {"about": {}}
    same = all(found["about"].get(key) == about[key] for key in ("machine", "torch", "quick"))
    return found if same else {"rows": {}}


def measure_growth(setup: Setup, out: Path, found: dict[str, Any]) -> None:
    """Measure the growth and draw its figure; a failure is printed."""
    device = setup.device.type
    try:
        found["growth"] = growth.measure(setup)
        save_figure(growth.draw(found["growth"], device), out, f"growth-{device}")
    except Exception as error:
        print("growth", describe(error)["missing"], flush=True)


def ordered(device: str) -> list[str]:
    """Return all names in the order of measurement.

    On a GPU, the training step comes first and has all of the time for compiling. On a CPU, it
    comes after evaluation, because it changes how memory is allocated.
    """
    return sorted(NAMES, key=lambda name: device == "cuda" and name != "fovavg-step")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=NAMES, metavar="NAME",
                        help=f"rows: {', '.join(NAMES)}")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small batches, nothing compiled")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch (default: 2)")
    parser.add_argument("--compiling", type=float, help="seconds for torch.compile in total")
    parser.add_argument("--seconds", type=float, help="seconds in total; later rows are skipped")
    parser.add_argument("--photos", type=Path, help="folder of JPEG files (default: generated)")
    parser.add_argument("--out", type=Path, help="folder (default: results/benchmarks)")
    return parser.parse_args()


def main() -> None:
    options, begun = parse(), time.perf_counter()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    out = options.out or (Path(tempfile.mkdtemp()) if options.quick else OUT)
    out.mkdir(parents=True, exist_ok=True)
    compiler = Compiler(options.compiling or COMPILING[device.type])
    setup = Setup(device=device, quick=options.quick, compiler=compiler, photos=options.photos)
    about = describe_machine(options, device)
    found = earlier(out / f"{device.type}.json", about) if options.only else {"rows": {}}
    found["about"] = about
    if device.type == "cpu":
        inductor.compile_threads = 1  # workers would go on after an interruption
    usual = NAMES if device.type == "cuda" else tuple(n for n in NAMES if n not in GPU_ONLY)
    for name in (name for name in ordered(device.type) if name in (options.only or usual)):
        if name == "growth":
            measure_growth(setup, out, found)
        else:
            left = (options.seconds or TOTAL[device.type]) - (time.perf_counter() - begun)
            row = found["rows"][name] = measure(name, setup, left)
            print(name, json.dumps(row.get("columns", row)), flush=True)
        write(out, device.type, found)
    print(out / "README.md")


if __name__ == "__main__":
    main()
