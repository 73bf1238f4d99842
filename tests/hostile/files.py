"""One good file of every kind that the program reads, and the ways in which files are damaged."""

import io
import json
import os
import random
import shutil
import struct
import tarfile
import zlib
from pathlib import Path

NET = ["model.size=8", "model.features=[2,2]", "model.scales=1:2:1", "model.hidden=4", "size=16"]
SETS = [word for text in NET for word in ("--set", text)]
TRAIN = ["--source", "idx:idx", "--scales", "1", "--epochs", "2", "--batch", "4", *SETS]
TRAIN += ["--device", "cpu"]
STUDY = """
name = "first"
seeds = 1
test_scales = [1, 2]
[resources]
cpus = 1
[defaults]
source = "idx:idx"
epochs = 1
batch = 4
size = 16
scales = "1"
[[runs]]
preset = "fovmax"
model.size = 8
model.features = [2, 2]
model.scales = "1:2:1"
model.hidden = 4
[grid]
model.dropout = [0.1, 0.2]
"""


def make_materials(folder):
    """Make the files, all of them small."""
    from foveate.cli.app import run

    folder.mkdir()
    os.chdir(folder)
    Path("afile").write_text("a text\n")
    Path("empty").touch()
    Path("garbage").write_bytes(random.Random(0).randbytes(999))
    Path("afolder").mkdir()
    os.mkfifo("fifo")
    Path("loop").symlink_to("loop")
    Path("dangling").symlink_to("nowhere")
    Path("study.toml").write_text(STUDY)
    _pictures()
    _idx()
    _shards()
    _models()
    _paper()
    generate = (
        "generate mnist-large-scale --source idx:idx --train-scales 1 --test-scales none --size 16"
    )
    for line in (f"{generate} --out made", f"{generate} --out h5shards"):
        assert run(line.split()) == 0
    shutil.copy(next(Path("made").iterdir()), "data.h5")
    next(Path("h5shards").iterdir()).rename("h5shards/data.h5")
    assert run(["train", "fovmax", *TRAIN, "--out", "run"]) == 0
    assert run(["train", "cnn", *TRAIN, "--set", "model.size=16", "--out", "plain"]) == 0
    assert run(["sweep", "study.toml", "--out", "swept", "--device", "cpu"]) == 0
    assert run(["evaluate", "run", "--scales", "1", "--out", "results"]) == 0
    return _stopped()


def _stopped():
    """A run that was interrupted after its first epoch."""
    import foveate.training.session as session
    from foveate.cli.app import run

    def stop(self, *_):
        close(self)
        raise KeyboardInterrupt

    close = session.Session._save
    session.Session._save = stop
    code = run(["train", "fovmax", *TRAIN, "--out", "stopped"])
    session.Session._save = close
    return 0 if code == 130 and Path("stopped/resume.safetensors").exists() else 1


def _pictures():
    from PIL import Image

    rng = random.Random(1)
    for name in "ab":
        for index in range(10):
            path = Path("pictures", name, f"{index}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.frombytes("L", (12, 12), rng.randbytes(144)).save(path)
    shutil.copy("pictures/a/0.png", "digit.png")


def _idx():
    rng = random.Random(2)
    for name, count in (("train", 12), ("t10k", 4)):
        images = b"\0\0\x08\x03" + struct.pack(">3I", count, 12, 12) + rng.randbytes(144 * count)
        labels = b"\0\0\x08\x01" + struct.pack(">I", count) + bytes(i % 3 for i in range(count))
        Path("idx").mkdir(exist_ok=True)
        Path(f"idx/{name}-images-idx3-ubyte").write_bytes(images)
        Path(f"idx/{name}-labels-idx1-ubyte").write_bytes(labels)


def _shards():
    Path("shards").mkdir()
    for split in ("train", "val", "test"):
        with tarfile.open(f"shards/{split}-000.tar", "w") as tar:
            for index in range(6):
                picture = Path(f"pictures/{'ab'[index % 2]}/{index}.png").read_bytes()
                for kind, content in (("png", picture), ("cls", b"%d" % (index % 2))):
                    member = tarfile.TarInfo(f"{index:03}.{kind}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))


def _models():
    """A linear classifier of two classes as ONNX and as TorchScript; the pretrained networks."""
    import warnings

    import onnx
    import torch
    from onnx import TensorProto, helper, numpy_helper

    from foveate.models.pretrained import WEIGHTS

    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 2))
    weight, bias = (p.detach().numpy() for p in net.parameters())
    nodes = [
        helper.make_node("Flatten", ["x"], ["flat"]),
        helper.make_node("Gemm", ["flat", "w", "b"], ["y"], transB=1),
    ]
    taken = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 1, 12, 12])
    given = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 2])
    tensors = [numpy_helper.from_array(weight, "w"), numpy_helper.from_array(bias, "b")]
    graph = helper.make_graph(nodes, "net", [taken], [given], tensors)
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), "net.onnx")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        torch.jit.trace(net, torch.zeros(2, 1, 12, 12)).save("net.ts")
    shutil.copytree(WEIGHTS, "weights")


def _paper():
    """The first rows of the published results."""
    from foveate.paper.tables import published_folder

    Path("paper").mkdir()
    for name in ("results.csv", "winners.csv"):
        lines = (published_folder() / name).read_text().splitlines(keepends=True)
        Path("paper", name).write_text("".join(lines[:60]))


def _pretrained(name):
    from foveate.models.pretrained import from_pretrained

    from_pretrained(name, Path("weights"))


def _results(path):
    from foveate.evaluation.results import read_results

    read_results(Path(path))


def _told(function):
    """Call a function of the library as the command line calls its commands."""

    def call(*arguments):
        import foveate.cli.app as cli

        def command(*_, **__):
            function(*arguments)

        cli.app = command
        return cli.run([])

    return call


CALLS = {"from_pretrained": _told(_pretrained), "read_results": _told(_results)}

WRONG = (
    None,
    [],
    {},
    "x",
    True,
    False,
    -1,
    0,
    1e308,
    float("nan"),
    2**70,
    0.5,
    [[1]],
    "1",
    "9" * 99,
)
WORSE = ("empty", "garbage", "folder", "fifo", "loop", "dangling", "nested", "missing", "swapped")


def damage(path, how, number, materials):
    """Damage a file; `number` seeds what is left open."""
    rng = random.Random(number)
    if how in CHANGES:
        path.write_bytes(CHANGES[how](path.read_bytes(), rng))
        return
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    match how:
        case "empty":
            path.touch()
        case "garbage":
            path.write_bytes(rng.randbytes(rng.randrange(1, 999)))
        case "folder":
            path.mkdir()
        case "fifo":
            os.mkfifo(path)
        case "loop":
            path.symlink_to(path.name)
        case "dangling":
            path.symlink_to("nowhere")
        case "nested":
            path.write_text(rng.choice(('{"a":', "[")) * 60_000)
        case "swapped":
            others = [p for p in (materials / o for o in SWAPS) if p.suffix != path.suffix]
            shutil.copy(rng.choice(others), path)


SWAPS = ("digit.png", "data.h5", "net.onnx", "study.toml", "run/config.json", "shards/val-000.tar")
SWAPS += ("run/weights.safetensors", "paper/results.csv", "idx/train-labels-idx1-ubyte")


def _flipped(data, rng):
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _truncated(data, rng):
    return data[: int(len(data) * rng.uniform(0, 0.9))]


def _mutated(data, rng):
    """Replace a value somewhere in JSON, in a line of JSON, or in a cell of a table."""
    text = data.decode()
    try:
        return json.dumps(mutated(json.loads(text), rng)[0]).encode()
    except json.JSONDecodeError:
        pass
    lines = text.splitlines()
    at = rng.randrange(len(lines))
    try:
        lines[at] = json.dumps(mutated(json.loads(lines[at]), rng)[0])
    except json.JSONDecodeError:
        mark = "," if lines[at].count(",") else "="
        cells = lines[at].split(mark)
        cells[rng.randrange(len(cells))] = json.dumps(rng.choice(WRONG))
        lines[at] = mark.join(cells)
    return ("\n".join(lines) + "\n").encode()


def mutated(value, rng):
    """Give a copy of nested JSON with one value replaced, and where: keys and indices."""
    inner = value
    path = []
    while isinstance(inner, dict | list) and inner and (not path or rng.random() < 0.85):
        keys = list(inner) if isinstance(inner, dict) else range(len(inner))
        path.append(rng.choice(keys))
        inner = inner[path[-1]]
    copy = json.loads(json.dumps(value))
    if not path:
        return rng.choice(WRONG), path
    around = copy
    for key in path[:-1]:
        around = around[key]
    if rng.random() < 0.15:
        del around[path[-1]]
    else:
        around[path[-1]] = rng.choice(WRONG)
    return copy, path


def _noted(data, rng):
    """Change the notes in a safetensors file: JSON inside the JSON of its header."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    notes = header.get("__metadata__", {"model": "{}"})
    key = rng.choice(list(notes))
    text = notes[key]
    if rng.random() < 0.5 and text[:1] in "[{":
        notes[key] = json.dumps(mutated(json.loads(text), rng)[0])
    else:
        notes[key] = rng.choice(("", "x", "[]", "{}", "null", "[" * 60_000, text[: len(text) // 2]))
    new = json.dumps({**header, "__metadata__": notes}).encode()
    return len(new).to_bytes(8, "little") + new + data[8 + length :]


def _claims(data, rng):
    """Let a header claim more than there is: sizes of IDX, PNG and safetensors."""
    huge = rng.choice((2**31 - 1, 2**32 - 1, 2**24))
    if data.startswith(b"\x89PNG"):
        size = struct.pack(">2I", huge & 0x7FFFFFFF, rng.choice((1, 30_000, 2**31 - 1)))
        head = b"IHDR" + size + data[24:29]
        return data[:12] + head + struct.pack(">I", zlib.crc32(head)) + data[33:]
    if data.startswith(b"\0\0\x08"):
        return data[:4] + struct.pack(">I", huge) + data[8:]
    return rng.choice((2**40, 2**63, 2**20)).to_bytes(8, "little") + data[8:]


def _tarred(data, rng):
    """Write other labels into a tar."""
    label = rng.choice((b"", b"-1", b"1.5", b"x", b"9" * 19, b"9" * 30, b"\xff", b"2000000000"))
    old, new = io.BytesIO(data), io.BytesIO()
    with tarfile.open(fileobj=old) as tar, tarfile.open(fileobj=new, mode="w") as made:
        for member in tar:
            content = tar.extractfile(member).read()
            if member.name.endswith("2.cls"):
                content, member.size = label, len(label)
            made.addfile(member, io.BytesIO(content))
    return new.getvalue()


def _labelled(data, rng):
    """Put labels into an HDF5 file that no class has."""
    import h5py
    import numpy as np

    content = io.BytesIO(data)
    wrong = rng.choice((0.5, -1.0, np.nan, np.inf, 2.0**40, 1j))
    with h5py.File(content, "r+") as file:
        for name in ("y_train", "y_val", "y_test"):
            values = file[name][()].astype(np.complex64 if wrong == 1j else np.float64)
            values.flat[0] = wrong
            del file[name]
            file[name] = values
    return content.getvalue()


def _rotted(data, rng):
    """Flip a bit in the tensors of a safetensors file."""
    start = 8 + int.from_bytes(data[:8], "little")
    return data[:start] + _flipped(data[start:], random.Random(rng.random()))


def _reshaped(data, rng):
    """Put other labels, pixels or notes into an HDF5 file."""
    import h5py
    import numpy as np

    content = io.BytesIO(data)
    with h5py.File(content, "r+") as file:
        split, kind = rng.choice(("train", "val", "test")), rng.choice("xyn")
        if kind == "n":
            notes = json.loads(file.attrs["foveate"])
            new = json.dumps(mutated(notes, rng)[0])
            file.attrs["foveate"] = rng.choice((new, new, "", "x", "[]", "null", 7, [1, 2]))
            return content.getvalue()
        values, name = file[f"{kind}_{split}"][()], f"{kind}_{split}"
        del file[name]
        first = rng.choice((0.5, -1.0, np.nan, np.inf, 2.0**40, 1j))
        match rng.randrange(4):
            case 0:
                values = values.astype(np.complex64 if isinstance(first, complex) else np.float64)
                values.flat[0] = first
                file[name] = values
            case 1:
                file[name] = rng.choice((values[0], values[..., None], values.reshape(-1)[:0]))
            case 2:
                file[name] = rng.choice((b"text", 1.0, np.array([b"a", b"b"])))
            case 3:
                file.create_group(name)
    return content.getvalue()


def _mistyped(data, rng):
    """Give a setting of a run's config.json a value of another type."""
    content = json.loads(data)
    tables = [content["config"], content["config"]["model"], content["config"]["model"]["scales"]]
    table = rng.choice(tables)
    key = rng.choice(list(table))
    others = [value for value in WRONG if not _alike(key, table[key], value)]
    table[key] = rng.choice(others)
    return json.dumps(content).encode()


def _alike(key, old, new):
    numbers = (int, float) if isinstance(old, float) or key in GRID else (int,)
    if key == "padding":
        numbers, old = (int, float, str), 0
    return type(new) is type(old) or (type(old) in numbers and type(new) in numbers)


GRID = ("low", "high", "per_octave")
CHANGES = {"flipped": _flipped, "truncated": _truncated, "mutated": _mutated, "noted": _noted}
CHANGES |= {"claims": _claims, "tarred": _tarred, "reshaped": _reshaped, "mistyped": _mistyped}
CHANGES |= {"labelled": _labelled, "rotted": _rotted}
