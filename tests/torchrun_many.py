"""Train a tiny network on two Gloo processes, many times, and count how the runs end.

    python tests/torchrun_many.py --runs 200 --at-once 4 --end finish

Prints one line for each combination of exit code and unexpected lines on stderr. Exits with 1 if
a process aborted, or if a run that should finish did not.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tiny_runs import AS_TINY, python, weights

ENDS = {
    "finish": "both processes train, validate and save",
    "refuse": "every process raises an error: there are too few images",
    "kill": "one process gets SIGKILL while it trains",
    "term": "torchrun gets SIGTERM",
    "interrupt": "torchrun and both processes get SIGINT, as from Ctrl-C",
}
ABORTED = ("terminate called", "Fatal Python error", "(exitcode: -6)", "Signal 6")
OURS = ("error:", "interrupted:")


def end(process, how):
    """Wait for the first epoch, then send the signals."""
    for line in process.stdout:
        if line.startswith("epoch"):
            break
    if how == "term":
        process.terminate()
    elif how == "interrupt":
        os.killpg(process.pid, signal.SIGINT)
    else:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)


def run(how, folder):
    """Give the exit code of torchrun and the lines on stderr that matter."""
    epochs = "1" if how == "finish" else "999"
    samples = "9999" if how == "refuse" else "32"
    command = [*AS_TINY, "--samples", samples, "--epochs", epochs, "--out", folder]
    options = ["--nproc-per-node=2", "--standalone"]
    process = python(
        "-m", "torch.distributed.run", *options, "-m", "foveate", *command, start_new_session=True
    )
    if how in ("kill", "term", "interrupt"):
        end(process, how)
    _, err = process.communicate()
    if how == "finish" and process.returncode == 0:
        assert weights(folder)
    lines = [line.replace(str(folder), "RUN") for line in err.splitlines()]
    aborted = tuple(line for line in lines if any(words in line for words in ABORTED))
    return process.returncode, aborted, tuple(line for line in lines if line.startswith(OURS))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--end", choices=ENDS, default="finish")
    options = parser.parse_args()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(options.at_once) as pool:
        folders = [Path(top) / str(number) for number in range(options.runs)]
        counts = Counter()
        for number, result in enumerate(pool.map(lambda at: run(options.end, at), folders), 1):
            counts[result] += 1
            if number % 20 == 0:
                print(f"{number} of {options.runs} runs ended", flush=True)
    for (code, aborted, said), count in counts.most_common():
        print(f"{count} runs: exit code {code}, aborted: {list(aborted)}, said: {list(said)}")
    print(f"{options.runs} runs, {options.at_once} at a time: {time.perf_counter() - start:.0f} s")
    wrong = any(aborted or (options.end == "finish" and code) for code, aborted, _ in counts)
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
