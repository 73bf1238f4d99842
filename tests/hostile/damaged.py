"""Commands that read files, each of which is damaged in one way or another."""

import random
from typing import NamedTuple

from hostile.cases import COMMANDS, SEED, SLOW, Case, good_case
from hostile.files import TRAIN, WORSE

EVALUATE = "evaluate run --scales 1 --device cpu --out new"
PREDICT = "predict digit.png --model run --device cpu"
AUDIT = "audit run --source idx:idx --scales 1:2:1 --samples 2 --device cpu --out new"
EXPORT = "export run --out new.onnx"
AGAIN = " ".join(["train fovmax", *TRAIN, "--out"])
NET = " ".join(TRAIN[TRAIN.index("--epochs") :])  # all options of `AGAIN` but what is read
SHOW = "show idx:idx --scales 1 --size 16 --samples 2 --out new.png"
GENERATE = "generate mnist-large-scale --source idx:idx --size 16 --out new"
GENERATE += " --train-scales none --test-scales 1"
MADE = NET.replace("--set size=16 ", "")
TRUST = " --trust" if any(option.name == "trust" for option in COMMANDS["audit"]) else ""
SOURCES = ("idx", "run", "digit.png")


class Group(NamedTuple):
    """A file, the commands that read it, and which damage they must not take.

    `bad` are ways that no command may accept, `may` those that can leave a usable file.
    """

    needs: tuple[str, ...]
    files: tuple[str, ...]
    commands: tuple[str, ...]
    bad: tuple[str, ...]
    may: tuple[str, ...] = ()
    beside: tuple[tuple[str, str, int], ...] = ()


def _without(*names):
    return tuple(how for how in WORSE if how not in names)


IDX = tuple(
    f"idx/{part}" for part in
    ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte")
)  # fmt: skip
NETWORK = "weights/fovmax-mnist-tr2.safetensors"
OUTCOME = "swept/fovmax_model.size=8_model.features=2x2_model.scales=1_2_1_model.hidden=4"
OUTCOME += "_model.dropout=0.1-s0/outcome.json"
SWEEP = "sweep study.toml --dry-run --device cpu --out swept"
TABLES = (SWEEP, "reproduce table1 --dry-run --device cpu --precision bf16 --out paper")
RUN = (EVALUATE, PREDICT, AUDIT, f"{AGAIN} run", EXPORT, "demo --model run --port 0")
GROUPS = {
    "config": Group(SOURCES, ("run/config.json",), RUN, (*WORSE, "truncated", "mistyped")),
    "config mutated": Group(SOURCES, ("run/config.json",), RUN[:4], (), ("mutated", "flipped")),
    "metrics": Group(
        ("idx", "run", "stopped", "digit.png"),
        ("run/metrics.jsonl", "stopped/metrics.jsonl"),
        (
            f"{AGAIN} run",
            f"{AGAIN} stopped",
            "evaluate stopped",
            "predict digit.png --model stopped",
        ),
        (),
        (*WORSE, "truncated", "flipped", "mutated"),
    ),
    "weights": Group(
        SOURCES,
        ("run/weights.safetensors",),
        (EVALUATE, PREDICT, AUDIT, EXPORT),
        (*WORSE, "truncated", "claims", "rotted"),
    ),
    "weights changed": Group(
        SOURCES,
        ("run/weights.safetensors",),
        (EVALUATE, PREDICT, AUDIT, f"{AGAIN} run"),
        (),
        ("flipped", "noted"),
    ),
    "resume": Group(
        ("idx", "stopped"),
        ("stopped/resume.safetensors",),
        (f"{AGAIN} stopped",),
        (*_without("missing", "dangling", "loop"), "truncated", "claims"),
        ("flipped", "noted"),
    ),
    "study": Group(
        ("idx", "study.toml"),
        ("study.toml",),
        ("sweep study.toml --dry-run --device cpu --out new",),
        WORSE,
        ("truncated", "flipped", "mutated"),
    ),
    "outcome": Group(
        ("idx", "study.toml", "swept"),
        (OUTCOME,),
        (SWEEP,),
        (*_without("missing", "dangling", "loop"), "truncated"),
        ("flipped", "mutated"),
        (("swept/results.csv", "missing", 0),),
    ),
    "tables": Group(
        ("idx", "study.toml", "swept", "paper"),
        ("swept/results.csv", "swept/winners.csv", "paper/results.csv", "paper/winners.csv"),
        TABLES,
        (),
        (*WORSE, "truncated", "flipped", "mutated"),
    ),
    "results": Group(
        ("results",),
        ("results/results.json",),
        ("read_results results",),
        (*WORSE, "truncated"),
        ("flipped", "mutated"),
    ),
    "idx": Group(
        ("idx", "run"),
        IDX,
        (SHOW, GENERATE, f"{AGAIN} new", EVALUATE),
        (*WORSE, "truncated", "claims"),
        ("flipped",),
    ),
    "pictures": Group(
        ("pictures",),
        ("pictures/a/3.png", "pictures/b/1.png"),  # of the training split, which all commands read
        tuple(
            command.replace("idx:idx", "folder:pictures")
            for command in (SHOW, f"{AGAIN} new", f"{AGAIN} new --stream")
        ),
        (*_without("missing", "folder"), "claims"),
        ("flipped", "truncated", "missing", "folder"),
    ),
    "picture": Group(
        ("run", "idx", "digit.png"),
        ("digit.png",),
        (PREDICT, f"{PREDICT} --json"),
        (*WORSE, "claims"),
        ("flipped", "truncated"),
    ),
    "audited pictures": Group(
        ("pictures", "net.onnx"),
        ("pictures/a/3.png", "pictures/b/0.png"),
        ("audit net.onnx --source folder:pictures --scales 1:2:1 --device cpu --out new",),
        (),
        (*WORSE, "claims", "flipped", "truncated"),
    ),
    "data set": Group(
        ("data.h5", "h5shards"),
        ("data.h5", "h5shards/data.h5"),
        (
            "show data.h5 --samples 2 --out new.png",
            f"train fovmax --source data.h5 {MADE} --out new",
            f"train fovmax --source shards:h5shards {MADE} --out new",
        ),
        (*WORSE, "truncated", "labelled"),
        ("flipped", "reshaped"),
    ),
    "shards": Group(
        ("shards",),
        ("shards/train-000.tar", "shards/val-000.tar"),
        (f"train fovmax --source shards:shards --scales 1 {NET} --out new",),
        (*WORSE, "tarred"),
        ("truncated", "flipped"),
    ),
    "onnx": Group(
        ("net.onnx", "pictures"),
        ("net.onnx",),
        ("audit net.onnx --source folder:pictures --scales 1:2:1 --device cpu --out new",),
        (*WORSE, "truncated"),
        ("flipped",),
    ),
    "script": Group(
        ("net.ts", "pictures"),
        ("net.ts",),
        (f"audit net.ts --source folder:pictures --scales 1:2:1 --device cpu --out new{TRUST}",),
        (*WORSE, "truncated"),
        ("flipped",),
    ),
    "pretrained": Group(
        ("weights",),
        ("weights/index.json", NETWORK),
        ("from_pretrained fovmax-mnist-tr2",),
        (*WORSE, "truncated"),
        ("mutated",),
    ),
}


def file_case(name, number):
    """Case `number` of a group: every way of damage in turn, the rest by chance."""
    group = GROUPS[name]
    rng = random.Random(f"{SEED} {name} {number}")
    ways = (*group.bad, *group.may)
    how = ways[number % len(ways)]
    command = group.commands[(number // len(ways)) % len(group.commands)]
    words = set(command.replace(":", " ").replace("=", " ").split())
    read = [path for path in group.files if path.split("/")[0] in words]
    path = rng.choice(read or group.files)
    if how == "mutated" and path.endswith(".safetensors"):
        path = group.files[0]
    return Case(
        kind=f"{name} {how}",
        argv=tuple(command.split()),
        bad=how in group.bad,
        needs=group.needs,
        damage=((path, how, rng.randrange(2**30)), *group.beside),
    )


def good_cases():
    """All commands with nothing damaged, which must succeed: else a refusal says nothing."""
    read = [
        Case(
            kind="good", argv=tuple(line.split()), bad=False, needs=group.needs, damage=group.beside
        )
        for group in GROUPS.values()
        for line in group.commands
    ]
    found = [case for case in (*map(good_case, COMMANDS), *read) if case.argv[0] not in SLOW]
    return [
        case for case in dict.fromkeys(found) if "stopped" not in case.argv[:2] + case.argv[-1:]
    ]
