"""The options that several commands share, each defined once, and the names that shells complete.

`shared` defines an option. Each command calls the result, with a description of its own default.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

# Panels of the help. Commands with few options show them in one panel, see `foveate.cli.app`.
DATA, MODEL, TRAINING = "Data", "Model", "Training"
EVALUATION, OUTPUT, EXECUTION = "Evaluation", "Output", "Execution"

# Names to complete. The registries import torch; tests compare these tuples with them.
SOURCES = (
    "mnist", "fashion-mnist", "cifar10", "mnist-5k", "idx:", "cifar10:", "folder:", "shards:"
)  # fmt: skip
NETWORKS = ("cnn", "fovmax", "fovavg", "fovconc", "swmax")
COUNTS = (10000, 5000, 2000, 1000, 500, 200, 100)
ROWS = (
    *(f"{name}-{scale}" for name in NETWORKS for scale in ("tr1", "tr2", "tr4")),
    *(f"{name}-tr14" for name in NETWORKS if name != "fovconc"),
    *("fovconc5-tr2", "fovconc5-tr14"),
    *(f"{name}-tr2-{count}ch" for name in ("fovmax", "fovavg") for count in (17, 9, 5)),
    *(f"{name}-few{n}" for name in NETWORKS for n in COUNTS),
)
PRESETS = (
    *(*NETWORKS, "finetune", "fovplus-tr1", "fovplus-tr2", "fovplus-tr4"),
    *(f"fovplus-few{n}" for n in COUNTS),
    *ROWS,
)
TABLES = ("table1", "table2", "table3", "all")
METHODS = (
    *("cnn", "cnn-all-scales", "cnn-zooms", "cnn-averaged", "pyramid", "pyramid-wide"),
    *("sesn", "sesn-wide", "disco", "disco-wide", "gaussian-max", "gaussian-avg"),
    *("gaussian-max-wide", "gaussian-avg-wide", "riesz", "fovmax", "fovavg", "swmax"),
    *("fovconc", "fovplus", "cnn-expert", "fovmax-expert"),
)
DATA_SETS = ("mnist", "fashion-mnist", "cifar10", "photographs", "mnist-few")
POOLS = ("max", "avg", "logsumexp", "probabilities")

SCALE_GRAMMAR = "a list 0.5,1,2, a range 1-4, a grid 0.5:8:4 (4 per octave), or all (0.5:8:4)"
SOURCE_HELP = (
    "Image source: mnist, fashion-mnist, cifar10, mnist-5k (included), idx:DIR, cifar10:DIR, "
    "folder:DIR, shards:DIR or FILE.h5."
)
MODEL_HELP = (
    "Network name (fovmax), trained network (fovmax-mnist-tr2), run folder, model file, timm:NAME "
    "or package.module:factory."
)


def trained_networks() -> tuple[str, ...]:
    """Return the names of the trained networks that come with the package."""
    weights = Path(__file__).parents[1] / "models" / "weights"
    return tuple(sorted(path.stem for path in weights.glob("*.safetensors")))


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return a function that completes one of `names`, for shell completion."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def complete_model(incomplete: str) -> list[str]:
    """Complete the name of a network, trained or not."""
    return completing(*NETWORKS, *trained_networks(), "timm:")(incomplete)


def shared(
    metavar: str, help: str, panel: str, *names: str, values: Iterable[str] = (), **how: Any
) -> Callable[..., Any]:
    """Define an option that several commands can share.

    Args:
        metavar: Placeholder of the value; empty for a flag.
        help: Help text.
        panel: Panel of the help.
        *names: Names of the option; by default that of the parameter. State it if it equals the
            placeholder: some versions of typer then take the spelling of the placeholder.
        values: Values that a shell completes.
        **how: Further arguments of `typer.Option`.

    Returns:
        A function that makes the option for one command. `default` describes a default that the
        command computes, `panel` replaces the panel, `min` and `max` limit a number.
    """
    how = {"metavar": metavar, "help": help, **how}
    if values:
        how["autocompletion"] = completing(*values)

    def option(default: str | None = None, panel: str = panel, **limits: Any) -> Any:
        shown: dict[str, Any] = {"show_default": default or True, "rich_help_panel": panel}
        make: Any = typer.Option  # its overloads do not admit keyword dictionaries
        return make(*names, **how, **shown, **limits)

    return option


MODEL_REF = shared("MODEL", MODEL_HELP, MODEL, "--model", autocompletion=complete_model)
SOURCE = shared("SOURCE", SOURCE_HELP, DATA, "--source", values=SOURCES)
SPLIT = shared(
    "SPLIT",
    "Split to evaluate: test or val; audit also accepts train and all.",
    DATA,
    "--split",
    values=("test", "val", "train", "all"),
)
SAMPLES = shared("N", "Use only the first N images.", DATA)
SCALES = shared("SCALES", f"Scale factors: {SCALE_GRAMMAR}.", DATA, "--scales")
RECIPE = shared(
    "RECIPE",
    "Preprocessing: photo, mirrored or mnist-large-scale; audit also accepts frame, which rescales "
    "the image itself.",
    DATA,
    "--recipe",
    values=("photo", "mirrored", "mnist-large-scale", "frame"),
)
SIZE = shared("PIXELS", "Width and height of the images in pixels.", DATA)
WORKERS = shared("N", "Parallel workers that prepare images; results do not depend on it.", DATA)
WINDOWS = shared(
    "LOW-HIGH",
    "Windows of the channels in pixels: 56-448, two per octave, or 56:448:4, four.",
    MODEL,
)
POOL = shared(
    "POOL",
    "Pooling over scale channels: max, avg, logsumexp or probabilities; audit also accepts none.",
    MODEL,
    "--pool",
    values=(*POOLS, "none"),
)
LAZY = shared(
    "TOLERANCE", "Evaluate only the scale channels that decide the class; lead in logits that "
    "decides. evaluate also accepts auto.", EVALUATION, "--lazy",
)  # fmt: skip
BATCH = shared("N", "Images per batch.", TRAINING)
PRECISION = shared(
    "DTYPE", "Precision: float32, or bf16 for mixed precision.", TRAINING,
    values=("float32", "bf16"),
)  # fmt: skip
SEED = shared("N", "Random seed.", TRAINING)
OUT_FOLDER = shared("DIR", "Output folder.", OUTPUT)
OUT_FILE = shared("FILE", "Output file.", OUTPUT)

ModelArgument = Annotated[
    str, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=complete_model)
]
DeviceOption = Annotated[
    str,
    shared(
        "DEVICE", "Device: cpu, cuda, cuda:N, or auto (a GPU if there is one).", EXECUTION,
        "--device", values=("auto", "cpu", "cuda"),
    )(),
]  # fmt: skip
ChangedDataOption = Annotated[
    bool,
    shared("", "Accept images that changed since the run started.", DATA, "--changed-data")(),
]
BadOption = Annotated[
    str,
    shared(
        "ACTION", "Photographs that cannot be read: stop, or skip them and list them.", DATA,
        values=("stop", "skip"),
    )(),
]  # fmt: skip
PretrainedOption = Annotated[
    bool,
    shared("", "Download the pretrained weights of a timm or torchvision model.", MODEL,
           "--pretrained")(),
]  # fmt: skip
TrustOption = Annotated[
    bool,
    shared("", "Allow model files, runs and studies to execute code.", MODEL, "--trust")(),
]
JsonOption = Annotated[bool, shared("", "Print the results as JSON.", OUTPUT, "--json")()]
DryRunOption = Annotated[
    bool, shared("", "Print the planned runs and exit.", EXECUTION, "--dry-run")()
]
EngineOption = Annotated[
    str,
    shared(
        "ENGINE",
        "Where runs train: local, or ray for a Ray cluster.",
        EXECUTION,
        "--engine",
        values=("local", "ray"),
    )(),
]
AddressOption = Annotated[
    str | None,
    shared("HOST:PORT", "Address of the Ray cluster.", EXECUTION)(
        "the cluster that Ray finds, or a new local one"
    ),
]
