"""Demo page for photographs: one image at any size and position, for several networks."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from foveate.data.shards import Shards
from foveate.demo import panels
from foveate.demo.networks import PageNetwork, predict_photo, recipe_of
from foveate.demo.uploads import check_integer, check_number, decode
from foveate.errors import DataError, FoveateError
from foveate.models.channels import ScaleChannels
from foveate.training.data import open_pictures

LOW, HIGH = 0.25, 4.0  # range of the size slider
EXAMPLES_SHOWN = 8  # examples shown at a time
SIDE = 512  # longest side of an example in the browser; the networks get the full image
TURNS = 2**31 - 1


class PhotoPage:
    """Page that compares networks on photographs. Requests are stateless and validated."""

    files = ("page.css", "page.js", "photo.css", "photo.js")

    def __init__(self, networks: Sequence[PageNetwork]) -> None:
        self.networks = networks
        self.frame = max(network.windows[-1] for network in networks)
        self.pictures, self.labels = _open_samples(networks)
        self.count = len(self.labels)
        self._sample = lru_cache(1)(self._read)  # an image is requested at many sizes in a row

    def requests(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """Return the methods that handle requests."""
        return self.predict, self.samples

    def predict(self, picture: str | int, size: float, y: float, x: float) -> dict[str, Any]:
        """Classify an image, a base64 file or the index of an example, and return the panels.

        `y` and `x` are its offset from the centre, as fractions of the frame side.
        """
        scale = check_number("size", size, LOW, HIGH)
        shift = (check_number("y", y, -1, 1) * self.frame, check_number("x", x, -1, 1) * self.frame)
        pixels, truth, note = self._pixels(picture)
        views = predict_photo(self.networks, pixels, scale, shift)
        return {
            "windows": panels.windows(views, self.frame),
            "cards": panels.cards(views, truth, panels.photo_detail),
            "channels": panels.photo_channels(views),
            "note": note,
        }

    def samples(self, turn: int) -> dict[str, Any]:
        """Return example images of the run's source; each `turn` returns different ones."""
        first = EXAMPLES_SHOWN * check_integer("turn", turn, 0, TURNS)
        shown = range(first, first + EXAMPLES_SHOWN) if self.count else ()
        chosen = dict.fromkeys(k % self.count for k in shown)
        return {"html": "".join(map(self._button, chosen))}

    def html(self) -> str:
        """Return the initial page."""
        page = Path(__file__).with_name("photo.html").read_text("utf-8")
        return Template(page).substitute(
            samples=self.samples(0)["html"], hidden="" if self.count else "hidden",
            base=recipe_of(self.networks[0]).base, frame=f"{self.frame:g}",
            shown=f"{self.frame:.0f}", padding=_padding(self.networks[0]),
        )  # fmt: skip

    def _pixels(self, picture: object) -> tuple[Tensor, str | None, str]:
        """Return pixels (C, H, W), the class name of an example, and a note about the file."""
        if isinstance(picture, str) and picture:
            pixels, note = decode(picture, "the uploaded file", "black")
            return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), None, note
        if type(picture) is int and self.count:
            return *self._sample(check_integer("picture", picture, 0, self.count - 1)), ""
        raise DataError("the request contains no image; upload or pick one")

    def _read(self, index: int) -> tuple[Tensor, str]:
        assert self.pictures is not None
        pixels = np.array(self.pictures.read("test", index))  # writable
        return torch.from_numpy(pixels), self.labels[index]

    def _button(self, index: int) -> str:
        try:
            pixels, name = self._read(index)
        except DataError:  # unreadable images are skipped here; 'foveate evaluate' reports them
            return ""
        drawn = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
        drawn.thumbnail((SIDE, SIDE))
        return (
            f'<button type="button" data-index="{index}" title="{escape(name)}">'
            f"{panels.image(drawn, name, 'jpeg')}</button>"
        )


def _padding(network: PageNetwork) -> str:
    """Return how a network fills the area around an image: the padding, or its colour."""
    net, recipe = network.model.net, recipe_of(network)
    assert isinstance(net, ScaleChannels)
    if isinstance(net.padding, str):
        return net.padding
    shades = [net.padding * s + m for m, s in zip(recipe.mean, recipe.std, strict=True)]
    return f"rgb({' '.join(f'{100 * shade:.1f}%' for shade in shades)})"


def _open_samples(networks: Sequence[PageNetwork]) -> tuple[Shards | None, list[str]]:
    """Open the test images of the first run whose source exists, with their class names."""
    for model in (network.model for network in networks):
        with suppress(FoveateError):  # the folder may have been moved
            pictures = open_pictures(model.source)
            if pictures.num_classes == len(model.classes):
                labels = pictures.labels("test").tolist()
                return pictures, [model.classes[label] for label in labels]
    return None, []
