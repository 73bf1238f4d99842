"""The page for photographs: one at any size and place, seen by networks side by side."""

import time
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
from foveate.demo import photo_panels
from foveate.demo.fields import integer, number
from foveate.demo.panels import image
from foveate.demo.photo_networks import PhotoNetwork, predict_photo
from foveate.demo.uploads import decode
from foveate.errors import DataError, FoveateError
from foveate.training.data import open_pictures

LOW, HIGH = 0.25, 4.0  # of the size
SHOWN = 8  # samples at a time
SIDE = 512  # pixels of a sample that the browser draws; networks see the whole picture
TURNS = 2**31 - 1


class PhotoPage:
    """Compare networks on photographs. Requests keep no state and validate all their fields.

    Args:
        networks: Networks whose recipes have one base size.
    """

    files = ("page.css", "page.js", "photo.css", "photo.js")

    def __init__(self, networks: Sequence[PhotoNetwork]) -> None:
        self.networks = networks
        self.frame = max(network.windows[-1] for network in networks)
        self.pictures, self.labels = _open_samples(networks)
        self.count = len(self.labels)
        self._sample = lru_cache(1)(self._read)  # asked for at many sizes in a row

    def requests(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """The methods that handle requests."""
        return self.predict, self.samples

    def predict(self, picture: str | int, size: float, y: float, x: float) -> dict[str, Any]:
        """Show a picture, a file in base64 or the number of a sample, at a size and place.

        A size of 1 is the base size of the recipe; y and x, the distance of the picture from the
        middle, are in units of the frame's side.
        """
        scale = number("size", size, LOW, HIGH)
        shift = tuple(self.frame * number(n, at, -1, 1) for n, at in (("y", y), ("x", x)))
        pixels, truth, note = self._pixels(picture)
        begun = time.perf_counter()
        predictions = predict_photo(self.networks, pixels, scale, (shift[0], shift[1]))
        return {
            "took": f"{1000 * (time.perf_counter() - begun):.0f} ms",
            "windows": photo_panels.windows(predictions, self.frame),
            "cards": photo_panels.cards(predictions, truth),
            "channels": photo_panels.channels(predictions),
            "note": note,
        }

    def samples(self, turn: int) -> dict[str, Any]:
        """Pictures of the run's source to pick from, others for every turn."""
        first = SHOWN * integer("turn", turn, 0, TURNS)
        chosen = dict.fromkeys((first + k) % self.count for k in range(SHOWN)) if self.count else {}
        return {"html": "".join(map(self._button, chosen))}

    def html(self) -> str:
        """The page as it opens."""
        page = Path(__file__).with_name("photo.html").read_text("utf-8")
        return Template(page).substitute(
            samples=self.samples(0)["html"], hidden="" if self.count else "hidden",
            base=self.networks[0].recipe.base, frame=f"{self.frame:g}",
            shown=f"{self.frame:.0f}",
        )  # fmt: skip

    def _pixels(self, picture: object) -> tuple[Tensor, str | None, str]:
        """Pixels (C, H, W), the label of a sample, and what was done to a file."""
        if isinstance(picture, str) and picture:
            pixels, note = decode(picture, "the picture", "black")
            return torch.from_numpy(pixels.transpose(2, 0, 1).copy()), None, note
        if type(picture) is int and self.count:
            return *self._sample(integer("picture", picture, 0, self.count - 1)), ""
        raise DataError("the page sent no picture; upload or pick one")

    def _read(self, index: int) -> tuple[Tensor, str]:
        assert self.pictures is not None
        pixels = np.array(self.pictures.read("test", index))  # writable
        return torch.from_numpy(pixels), self.labels[index]

    def _button(self, index: int) -> str:
        try:
            pixels, name = self._read(index)
        except DataError:  # a picture that cannot be read; evaluate names it
            return ""
        drawn = Image.fromarray(pixels.expand(3, -1, -1).permute(1, 2, 0).numpy())
        drawn.thumbnail((SIDE, SIDE))
        return (
            f'<button type="button" data-index="{index}" title="{escape(name)}">'
            f"{image(drawn, name, 'jpeg')}</button>"
        )


def _open_samples(networks: Sequence[PhotoNetwork]) -> tuple[Shards | None, list[str]]:
    """The test pictures of the first run whose source is still there, and their class names."""
    for network in networks:
        with suppress(FoveateError):  # for one, the folder was moved
            pictures = open_pictures(network.source)
            if pictures.num_classes == len(network.classes):
                labels = pictures.labels("test").tolist()
                return pictures, [network.classes[label] for label in labels]
    return None, []
