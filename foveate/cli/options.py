"""The options of all commands, each defined once, and the names that shells complete.

`shared` defines an option. Each command calls the result, with a description of its own default.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

# Panels of the help.
DATA, MODEL, TRAINING = "Data", "Model", "Training"
EVALUATION, OUTPUT, EXECUTION = "Evaluation", "Output", "Execution"

# Names to complete. The registries import torch; tests compare these tuples with them.
SOURCES = (
    "mnist", "fashion-mnist", "cifar10", "mnist-5k", "idx:", "cifar10:", "folder:", "shards:"
)  # fmt: skip
NETWORKS = ("cnn", "fovmax", "fovavg", "fovconc", "swmax")
WEIGHTS = Path(__file__).parents[1] / "models" / "weights"
TRAINED = tuple(sorted(path.stem for path in WEIGHTS.glob("*.safetensors")))
TABLES = ("table1", "table2", "table3", "all")
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


def completing(*names: str) -> Callable[[str], list[str]]:
    """Return a function that completes one of `names`, for shell completion."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def shared(
    metavar: str, help: str, panel: str, *names: str, values: Iterable[str] = (), **how: Any
) -> Callable[..., Any]:
    """Return a function that makes an option for one of several commands.

    `metavar` is empty for a flag. State the name if it equals the placeholder, whose spelling some
    versions of typer take. Shells complete the `values`. A command can pass another panel, other
    values, the description of a computed default, and limits `min` and `max`.
    """
    how = {"metavar": metavar, "help": help, **how}

    def option(
        default: str | None = None,
        panel: str = panel,
        values: Iterable[str] = values,
        **limits: Any,
    ) -> Any:
        shown: dict[str, Any] = {"show_default": default or True, "rich_help_panel": panel}
        if values:
            shown["autocompletion"] = completing(*values)
        make: Any = typer.Option  # its overloads do not admit keyword dictionaries
        return make(*names, **how, **shown, **limits)

    return option


def argument(metavar: str, help: str, *values: str, default: str | None = None) -> Any:
    """Define an argument; shells complete `values`, and `default` describes a computed default."""
    complete = completing(*values) if values else None
    make: Any = typer.Argument
    return make(metavar=metavar, help=help, show_default=default or True, autocompletion=complete)


MODEL_REF = shared(
    "MODEL", "Trained network (fovmax-mnist-tr2), run folder, weights of a run (.safetensors) or "
    "timm:NAME; predict also accepts other model files and package.module:factory.", MODEL,
    "--model", values=(*TRAINED, "timm:"),
)  # fmt: skip
SOURCE = shared("SOURCE", SOURCE_HELP, DATA, "--source", values=SOURCES)
SPLIT = shared(
    "SPLIT",
    "Split to evaluate: test or val; audit also accepts train and all.",
    DATA,
    "--split",
    values=("test", "val"),
)
SAMPLES = shared("N", "Use only the first N images.", DATA)
USUAL_SCALES = "0.25:2:2 for photographs, 0.5:2:4 for cifar10, all for digits"
VIEWED_SCALES = f"{USUAL_SCALES}, 0.125:1:2 with --view resolution"
SCALES = shared("SCALES", f"Scale factors: {SCALE_GRAMMAR}.", DATA, "--scales")
RECIPE = shared(
    "RECIPE",
    "Preprocessing: photo, mirrored or mnist-large-scale.",
    DATA,
    "--recipe",
    values=("photo", "mirrored", "mnist-large-scale"),
)
SIZE = shared("PIXELS", "Width and height of the images in pixels.", DATA)
WORKERS = shared("N", "Number of workers that prepare images; it does not change results.", DATA)
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
    values=POOLS,
)
LAZY = shared(
    "TOLERANCE", "Evaluate further scale channels only until the best class leads by this many "
    "logits (pool max or logsumexp). evaluate also accepts auto.", EVALUATION, "--lazy",
)  # fmt: skip
BATCH = shared("N", "Images per batch.", TRAINING)
PRECISION = shared(
    "DTYPE", "Precision: float32, or bf16 for mixed precision.", TRAINING,
    values=("float32", "bf16"),
)  # fmt: skip
SEED = shared("N", "Random seed.", TRAINING)
OUT_FOLDER = shared("DIR", "Output folder.", OUTPUT)
OUT_FILE = shared("FILE", "Output file.", OUTPUT)

# Options of one command or of two.
CLASSES = shared(
    "NAMES", "Classes in the order of the logits: a,b,c, or a file with one per line.", DATA
)
VIEW = shared(
    "VIEW", "Meaning of scale s. zoom: objects are s times as large. resolution: the same scene "
    "with s times the pixels along each axis, s at most 1.", EVALUATION, "--view",
    values=("zoom", "resolution"),
)  # fmt: skip
FIT = shared(
    "FIT", "At scale 1 the image fills the input and is cropped (fill), or is shown as a whole "
    "(inside).", EVALUATION, "--fit", values=("fill", "inside"),
)  # fmt: skip
BORDER = shared(
    "BORDER", "Fill outside the image: replicate, reflect, a value (0.5) or a colour "
    "(0.5,0.4,0.4). In audits on MNIST Large Scale, fill outside the frame when smoothing: "
    "replicate, reflect, zero or whole.", EVALUATION, "--border", values=("replicate", "reflect"),
)  # fmt: skip
MEAN = shared("VALUES", "Mean used for normalisation, one value or one per channel.", EVALUATION)
STD = shared(
    "VALUES", "Standard deviation used for normalisation, one value or one per channel.", EVALUATION
)
PATCH = shared("PIXELS", "Patch size of the scale channels in pixels.", EVALUATION)
METHOD = shared(
    "NAMES", "Methods to compare, such as fovmax,cnn; can be repeated.", MODEL, "--methods"
)
SETS = shared("NAMES", "Datasets, such as mnist,cifar10; can be repeated.", DATA, "--data")
REPLACED = shared(
    "NAME=SOURCE", "Source of a dataset, such as mnist=idx:DIR; can be repeated.", DATA,
    "--source",
)  # fmt: skip
TRAIN_SCALES = shared("SCALES", f"Training scales, one per file: {SCALE_GRAMMAR}; or none.", DATA)
TEST_SCALES = shared("SCALES", f"Test scales, one per file: {SCALE_GRAMMAR}; or none.", DATA)
BorderOption = Annotated[
    str,
    shared(
        "BORDER", "Fill outside the frame when smoothing: replicate, reflect, zero or whole.", DATA,
        "--border", values=("replicate", "reflect", "zero", "whole"),
    )(),
]  # fmt: skip
INVERT = shared("", "Always or never invert the intensities.", DATA, "--invert/--no-invert")
SCALE = shared(
    "SCALE", "Magnification of the image in the input frame; for a run on photographs, a factor of "
    "its base size.", DATA, "--scale",
)  # fmt: skip
SEARCH = shared("", "Search each image for an off-centre object.", EVALUATION, "--search")
STEP = shared(
    "PIXELS",
    "Distance between the centres of --search, in pixels of the resized image.",
    EVALUATION,
)
PICTURE = shared("PNG", "Draw the winning window and the class into a copy of the image.", OUTPUT)
ROWS_OPTION = shared(
    "ROW",
    "Only this row of the tables, such as fovavg or cnn-tr4; can be repeated.",
    DATA,
    "--rows",
)
SEEDS = shared("N", "Runs per row, with the seeds 0 to N - 1; at most 1,000.", TRAINING)
TOGETHER = shared(
    "N", "Runs trained in parallel; 0 means 3 or 6 on a GPU, 1 on a CPU.", EXECUTION, min=0, max=64
)
EPOCHS = shared("N", "Number of training epochs.", TRAINING)
SETTING = shared("KEY=VALUE", "Any other setting, such as model.dropout=0.", TRAINING, "--set")
BACKBONE = shared(
    "NAME", "Network in each scale channel: timm:NAME, torchvision:NAME or package.module:factory.",
    MODEL, values=("timm:", "torchvision:"),
)  # fmt: skip
FREEZE_NORMS = shared(
    "", "Use the stored statistics of batch norms and do not update them.", TRAINING,
    "--freeze-norms",
)  # fmt: skip
STREAM = shared("", "Read images from disk batch by batch, not all at once.", DATA, "--stream")
RECOMPUTE = shared("N", "Scale channels trained at a time, to save memory; 0 for all.", EXECUTION)
NORMS = shared(
    "MODE", "Batch-norm statistics under torchrun: shared by all processes, or local to each.",
    EXECUTION, values=("shared", "local"),
)  # fmt: skip
DETERMINISTIC = shared(
    "", "Allow non-deterministic GPU kernels, which are faster for some backbones.",
    EXECUTION, "--no-deterministic",
)  # fmt: skip

HOST = shared("HOST", "Address to listen on; 0.0.0.0 admits other machines.", EXECUTION, "--host")
PORT = shared("PORT", "Port to listen on; 0 for any free port.", EXECUTION, "--port")
FORMAT = shared(
    "FORMAT", "Format: onnx or torch (torch.export).", OUTPUT, "--format", values=("onnx", "torch")
)

IMAGES = argument("IMAGE", "Image files.")
NETWORK = argument(
    "NETWORK",
    "cnn, fovmax, fovavg, fovconc, swmax, or a preset such as fovavg-tr2 or finetune.",
    *NETWORKS,
    "finetune",
)
RUNS = argument("RUN", "Folders of finished training runs, or pretrained networks (fovplus-tr2).")
RESULTS = argument(
    "RESULTS", "Output folder of 'foveate reproduce'.", default="the published results"
)
STUDY = argument("STUDY", "TOML file that lists the runs.")
SHOWN_SOURCE = argument("SOURCE", SOURCE_HELP, *SOURCES)
TABLE = argument("TABLE", "table1, table2 or table3.", *TABLES, default="all")
ModelArgument = Annotated[str, argument("MODEL", MODEL_HELP, *NETWORKS, *TRAINED, "timm:")]
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
WeightsOption = Annotated[
    str | None,
    shared("FILE", "Weights of the backbone or the timm model, a .safetensors file.", MODEL,
           "--weights")("random"),
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
