"""A classifier that others wrote, trained for seconds, and the pictures to audit it on."""

import warnings
from functools import lru_cache

import torch
import torch.nn.functional as F
from monai.networks.nets import DenseNet
from PIL import Image

from foveate.data.sources import load_source

NAMES = tuple(f"digit-{k}" for k in range(10))
SIZE = 40


def framed(images):
    """Digits of 28 pixels in a black frame of 40, from 0 to 1."""
    return F.pad(images.float() / 255, (6,) * 4)


def untrained():
    """MONAI's DenseNet, small: from (B, 1, H, W) to 10 logits."""
    torch.manual_seed(0)
    return DenseNet(2, 1, 10, init_features=12, growth_rate=6, block_config=(2, 2))


@lru_cache(maxsize=1)
def trained_weights():
    train = load_source("mnist-5k").train
    net = untrained().train()
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(2):
        for chosen in torch.randperm(960).split(32):
            optimiser.zero_grad()
            F.cross_entropy(net(framed(train.images[chosen])), train.labels[chosen]).backward()
            optimiser.step()
    return net.state_dict()


def net():
    """The trained network: what package.module:factory names."""
    made = untrained()
    made.load_state_dict(trained_weights())
    return made


instance = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIZE**2, 10))


def function(images):
    """A plain function from images to logits."""
    return instance(images)


def with_two(one, other):
    """Needs more than an audit can give."""


def number():
    """Gives no model."""
    return 3


def failing():
    """Fails."""
    raise RuntimeError("no weights\nhere")


def coloured():
    """A network for three channels."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIZE**2, 10))


def few():
    """A network that knows three classes."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(SIZE**2, 3))


def not_a_number():
    """A network that divides by zero."""
    return lambda images: function(images) / 0


def write_pictures(folder, count=40, splits=False):
    """Test digits as PNG files, a subfolder per class; with splits, training digits too."""
    source = load_source("mnist-5k")
    for split in ("train", "test") if splits else ("test",):
        data = getattr(source, split)
        for index in range(count):
            name = NAMES[int(data.labels[index])]
            place = folder / split / name if splits else folder / name
            place.mkdir(parents=True, exist_ok=True)
            pixels = F.pad(data.images[index, 0], (6,) * 4).numpy()
            Image.fromarray(pixels).save(place / f"{index:03}.png")
    return folder


def export(model, path, batch=None):
    """Write a network as TorchScript (.ts), torch.export (.pt2) or ONNX, for any batch or one."""
    example = torch.zeros(batch or 2, 1, SIZE, SIZE)
    shapes = None if batch else ({0: torch.export.Dim("batch", max=4096)},)
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # TorchScript is deprecated; exporters warn of their insides
        match path.suffix:
            case ".ts":
                torch.jit.trace(model, example).save(str(path))
            case ".pt2":
                program = torch.export.export(model, (example,), dynamic_shapes=shapes)
                torch.export.save(program, path)
            case ".onnx":
                torch.onnx.export(
                    model,
                    (example,),
                    path,
                    dynamic_shapes=shapes,
                    verbose=False,
                    external_data=False,
                )
    return path
