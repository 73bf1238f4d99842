"""Bad command lines, drawn by a seed from the commands and options that there are."""

import inspect
import random
import typing
from dataclasses import dataclass, fields, replace
from pathlib import Path

import typer.models

from foveate.cli.app import app
from foveate.models.zoo import ModelConfig
from foveate.scales import MAX_SCALE, MIN_SCALE
from foveate.training.config import TrainConfig
from hostile.files import TRAIN

words = str.split
SEED = 15


@dataclass(frozen=True, kw_only=True)
class Case:
    """A command line in a folder of its own.

    `bad` says that it must not succeed. `needs` are the materials that are copied into the folder,
    `damage` what is done to them: (path, how, number). `room` limits what a file may hold, as a
    full disk does.
    """

    kind: str
    argv: tuple[str, ...]
    bad: bool
    needs: tuple[str, ...] = ()
    damage: tuple[tuple[str, str, int], ...] = ()
    room: int | None = None


class Option(typing.NamedTuple):
    """An option or argument of a command, as its signature says."""

    name: str
    flags: tuple[str, ...]
    type: type


def _options(command):
    hints = typing.get_type_hints(command, include_extras=True)
    for name in inspect.signature(command).parameters:
        base, *rest = typing.get_args(hints[name])
        info = next(i for i in rest if isinstance(i, typer.models.ParameterInfo))
        parts = [t for t in typing.get_args(base) or (base,) if t is not type(None)]
        kind = (typing.get_args(parts[0]) or parts)[0]
        option = isinstance(info, typer.models.OptionInfo)
        flags = tuple(info.param_decls or ()) or (f"--{name.replace('_', '-')}",)
        yield Option(name, flags if option else (), kind)


COMMANDS = {
    c.callback.__name__: [o for o in _options(c.callback) if o.name != "host"]
    for c in app.registered_commands
}  # without --host, which has cases of its own
GOOD = {
    "quickstart": "",
    "demo": "--model run",
    "generate": "mnist-large-scale --source idx:idx --train-scales none --test-scales 1 --size 16",
    "show": "idx:idx --scales 1 --size 16 --samples 1",
    "train": " ".join(["fovmax", *TRAIN]),
    "evaluate": "run --scales 1 --device cpu",
    "audit": "net.onnx --source folder:pictures --scales 1:2:1 --samples 4 --device cpu",
    "predict": "digit.png --model run --device cpu",
    "export": "run",
    "reproduce": "table1 --dry-run --rows cnn-tr1 --seeds 1 --device cpu",
    "sweep": "study.toml --dry-run --device cpu",
    "compare": "--methods cnn --data mnist --source mnist=idx:idx --dry-run --device cpu",
    "report": "paper",
    "verify": "",
}
OUT = {"show": "new.png", "export": "new.onnx"}
NO_OUT = ("demo", "predict", "verify")
WRITES = ("generate", "show", "train", "evaluate", "quickstart")
SLOW = ("quickstart", "demo", "export", "report", "verify")  # cases must be bad: success takes long
NEEDS = ("afile", "empty", "garbage", "afolder", "fifo", "loop", "dangling", "idx")
ALSO = {
    "demo": ["run"],
    "evaluate": ["run"],
    "audit": ["net.onnx", "pictures"],
    "predict": ["digit.png", "run"],
    "export": ["run"],
    "report": ["paper"],
    "sweep": ["study.toml"],
}

ODD = "| |x|-|--|-1|é|日本語|a\nb|\t|%s%n|[red]|[/]|[/nope]|../..|null|{}|None|\x1b[31m|'\"|;|="
TEXTS = [*ODD.split("|"), "\udcff\udc80", "🦊" * 9, "A" * 5000, "nan", "inf", "1e308", "\\", "~"]
NUMBERS = words("0 -1 0.5 -0.5 1e-4 1e308 -1e308 nan inf -inf 0x10 1e3 2147483648 4294967296")
NUMBERS += [str(2**63 - 1), str(2**63), str(2**64), "1" * 400, "1" * 5000, "", " ", "x", "1,2"]
SCALES = words("0 -1 1e-4 1e6 nan 1,,2 2-1 -1- 1,2, , 1,4,1e6 0.5,80 1;2 1,nan,2 0.06 64.1 inf")
GRIDS = words("1,4,1e6 1,4,-1 1,4,0 4,1,1 0,4,1 1,4 1,3,1 1,4,1e308 1e-300,1e300,4 nan,4,1")
INPUTS = words("missing afile afolder empty garbage fifo loop dangling afile/x /dev/zero /dev/null")
INPUTS += ["", " ", "-", "\udcff", "N" * 300, "N" * 5000, "/dev/full", "~nobody/x", "."]
OUTPUTS = words("afile afile/x loop loop/x fifo fifo/x dangling /dev/full /dev/full/x /dev/null")
OUTPUTS += ["/dev/null/x", "N" * 300, "a/" * 3000, "afile/\udcff"]
SOURCES = words("x idx: idx:missing idx:afile idx:afolder idx:fifo idx:loop folder: folder:afile")
SOURCES += words("folder:fifo folder:afolder folder:loop shards: shards:missing shards:afile")
SOURCES += words("shards:afolder shards:[ shards:loop missing.h5 afolder.h5 mnist fashion-mnist")
SOURCES += ["folder:" + "N" * 300, "idx:" + "N" * 5000, "idx:\udcff", "N" * 300 + ".h5", "", "idx"]
DEVICES = words("cuda cuda:99 meta mps vulkan cpu:-1 cpu:x xla hip privateuseone cuda:-1 CPU")
SETTINGS = ["x", "=", "=1", "model=", "model=cnn", "model.=1", "nokey=1", "model.nokey=1", "--"]
SETTINGS += ["model.scales=1:4:1e6", "model.classes=10000000", "model.padding=zzz", "epochs=1e9"]
SETTINGS += ["model.features=[]", "model.features=[0]", "model.features=[1.5]", "model.features=3"]
SETTINGS += ["model.features=" + "[1" + ",1" * 5000 + "]", "model.features=[1000000000]"]
SETTINGS += ["model.form=zzz", "model.pool=zzz", "model.hidden=1000000000", "model.size=1000000"]

# The values of numbers that may be right, by the name of the option or setting.
BOUNDS = {
    "size": (1, 4096),
    "samples": (0, 8),
    "epochs": (1, 9),
    "batch": (1, 9999),
    "seed": (0, 2**32 - 1),
    "data_seed": (0, 2**32 - 1),
    "seeds": (1, 99),
    "together": (0, 99),
    "workers": (1, 99),
    "recompute": (0, 1000),
    "scale": (MIN_SCALE, MAX_SCALE),
    "hidden": (1, 999),
    "channels": (1, 1),
    "classes": (3, 99),
    "dropout": (0, 0.99),
    "learning_rate": (1e-300, 1e308),
    "smallest_rate": (1e-300, 1e308),
    "epochs_per_decay": (1e-300, 1e308),
    "padding": (-1e308, 1e308),
    "mean": (-1e308, 1e308),
    "std": (1e-300, 1e308),
    "distortions": (0, 4),
    "ema": (0, 0.99),
    "lazy": (0, float("inf")),
}
FINE = {("border", "audit"): ("-1", "1e308"), ("workers", "train"): ("0",)}
FINE["samples", "audit"] = ("2147483648",)  # more than there are: all of them


def command_case(command, number):
    """Case `number` of a command: a good command line with one or two things changed."""
    rng = random.Random(f"{SEED} {command} {number}")
    while True:
        case = _drawn(command, number, rng)
        if case.bad or command not in SLOW:
            return case


def good_case(command):
    """A command line that is right."""
    out = [] if command in NO_OUT else ["--out", OUT.get(command, "new")]
    argv = (command, *GOOD[command].split(), *out)
    return Case(kind="good", argv=argv, bad=False, needs=(*NEEDS, *ALSO.get(command, ())))


def _drawn(command, number, rng):
    options, good = COMMANDS[command], good_case(command)
    argv, bad, room = list(good.argv[1:]), False, None
    style = rng.random()
    if style < 0.12:
        argv, bad = _misshapen(argv, rng)
        kind = f"{command} misshapen"
    elif style < 0.2 and command in WRITES:
        kind, bad, room = f"{command} full disk", True, rng.choice((0, 1, 100))
    else:
        chosen = [options[number % len(options)]]
        chosen += rng.sample(options, 1) if rng.random() < 0.2 else []
        kind = f"{command} {chosen[0].name}"
        for option in dict.fromkeys(chosen):
            argv, wrong = _changed(argv, command, option, rng)
            bad = bad or wrong
    if command == "predict" and "fifo" in argv:
        kind = "predict fifo"
    return replace(good, kind=kind, argv=(command, *argv), bad=bad, room=room)


def _misshapen(argv, rng):
    """A command line of the wrong shape."""
    match rng.randrange(4):
        case 0:
            return [
                *argv,
                rng.choice(("--nope", "--nope=1", "-Z", "--=x", "---out", "-" * 40 + "x")),
            ], True
        case 1:
            return [*argv, rng.choice(("--out", "--device", "--seed", "--size"))], True
        case 2:
            at = rng.randrange(len(argv) + 1)
            return [*argv[:at], rng.choice(TEXTS), *argv[at:]], False
        case _:
            keep = rng.randrange(len(argv) + 1)
            return argv[:keep], False


def _changed(argv, command, option, rng):
    """Give an option or argument a value of its pool."""
    value, bad = _value(command, option, rng)
    if not option.flags:  # the argument comes first, and every command has at most one
        return [value, *argv[1:]] if argv else [value], bad
    if option.type is bool:
        flag = rng.choice([f for text in option.flags for f in text.split("/")])
        return [*argv, f"{flag}={value}" if bad else flag], bad
    flag = option.flags[0]
    if flag in argv and flag != "--set":
        at = argv.index(flag)
        argv = [*argv[:at], *argv[at + 2 :]]
    return [*argv, *([f"{flag}={value}"] if rng.random() < 0.5 else [flag, value])], bad


def _value(command, option, rng):
    """A value for an option, and whether it is known to be bad."""
    name = option.name
    if name == "change":
        return _setting(rng)
    if option.type is bool:
        return rng.choice(TEXTS), rng.random() < 0.7
    pool = POOLS.get(name) or {int: NUMBERS, float: NUMBERS, Path: INPUTS}.get(option.type, TEXTS)
    if name in ("model", "source", "what", "tables") and rng.random() < 0.4:
        pool = TEXTS + INPUTS if name != "source" else TEXTS
    if command == "audit" and name == "scales":
        pool = GRIDS + SCALES[:8]
    value = rng.choice(pool)
    return value, _is_bad(command, option, value)


POOLS = {
    "scales": SCALES + TEXTS,
    "train_scales": SCALES + TEXTS,
    "test_scales": SCALES + TEXTS,
    "source": SOURCES,
    "device": DEVICES + TEXTS,
    "engine": ["afile", "Local", "local ", *TEXTS],
    "out": OUTPUTS,
    "mean": NUMBERS,
    "std": NUMBERS,
    "images": INPUTS,
}


def _is_bad(command, option, value):
    name = option.name
    if value in FINE.get((name, command), ()):
        return False
    if name in BOUNDS and option.type in (int, float, str):
        return not _within(value, *BOUNDS[name], option.type is int)
    return True


def _within(text, low, high, whole):
    try:
        return low <= (int(text) if whole else float(text)) <= high
    except ValueError:
        return False


def _setting(rng):
    """A value for --set, and whether it is known to be bad."""
    if rng.random() < 0.3:
        return rng.choice(SETTINGS), True
    own = [f.name for f in fields(TrainConfig) if f.name != "model"]
    key = rng.choice([*own, *(f"model.{f.name}" for f in fields(ModelConfig))])
    value, name = rng.choice(NUMBERS + TEXTS + GRIDS), key.removeprefix("model.")
    if name == "backbone" and not value:
        return f"{key}={value}", False
    if key in ("model.size", "size"):
        return f"{key}={value}", True  # no number of the pool suits the rest
    return f"{key}={value}", name not in BOUNDS or not _within(value, *BOUNDS[name], False)
