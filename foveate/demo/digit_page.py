"""Demo page for digits: a single digit at any zoom, and scenes of several digits."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image
from torch import Tensor

from foveate.data.sources import Split
from foveate.demo import panels, scenes
from foveate.demo.networks import PageNetwork, predict_digit
from foveate.demo.uploads import (
    MAX_FILE_BYTES,
    check_integer,
    check_number,
    decode_digit,
    encode_digit,
    read_upload,
)
from foveate.errors import ConfigError, DataError
from foveate.models.channels import ScaleChannels

START = (4, 2.0)  # class and zoom of the initial digit
SEEDS = 2**31 - 1  # largest seed of a scene
UNSEEN = (
    "The example digits, here and in the scenes, come from a test set that these networks were not "
    "trained on."
)
MAYBE_SEEN = (
    "The example digits, here and in the scenes, are part of the MNIST training set, on which "
    "these networks were trained: the page shows how the networks work, not how accurate they are."
)


class DigitPage:
    """Page that compares networks on digits. Requests are stateless and validated."""

    files = ("page.css", "page.js", "digit.js", "scene.js")

    def __init__(self, networks: Sequence[PageNetwork], digits: Split) -> None:
        self.networks, self.digits = networks, digits
        self.channel_networks = [n for n in networks if isinstance(n.model.net, ScaleChannels)]

    def requests(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """Return the methods that handle requests."""
        return self.predict, self.upload, self.samples, self.scene

    def predict(self, digit: str, zoom: float, label: int | None = None) -> dict[str, Any]:
        """Classify a digit at a zoom, and return the panels as HTML."""
        known = None if label is None else check_integer("label", label, 0, 9)
        return self._panels(decode_digit(digit), zoom, known)

    def upload(self, data: str, name: str, zoom: float) -> dict[str, Any]:
        """Classify a drawing or an image file (base64), and return the panels and the digit."""
        if not isinstance(data, str) or not isinstance(name, str):
            raise DataError("data and name must be strings")
        digit, note = read_upload(data, name[:80])
        return {**self._panels(digit, zoom, None), "digit": encode_digit(digit), "note": note}

    def samples(self, turn: int) -> dict[str, Any]:
        """Return ten example digits, one per class; each `turn` returns different ones."""
        turn = check_integer("turn", turn, 0, SEEDS)
        return {"html": "".join(_button(self._sample(k, turn), k) for k in range(10))}

    def scene(self, count: int, network: int, seed: int) -> dict[str, Any]:
        """Compose a scene of several digits, and return the dense prediction of one network."""
        if not self.channel_networks:
            raise ConfigError("none of these networks has scale channels; add one with --model")
        last = len(self.channel_networks) - 1
        chosen = self.channel_networks[check_integer("network", network, 0, last)]
        count = check_integer("count", count, scenes.MIN_DIGITS, scenes.MAX_DIGITS)
        scene, placed = scenes.compose(self.digits, count, check_integer("seed", seed, 0, SEEDS))
        return {"html": scenes.draw(chosen, scene, placed)}

    def html(self) -> str:
        """Return the initial page."""
        label, zoom = START
        digit = self._sample(label, 0)
        networks = "".join(
            f'<label><input type="radio" name="network" value="{k}"{"" if k else " checked"}>'
            f"{escape(network.title)}</label>"
            for k, network in enumerate(self.channel_networks)
        )
        own = all(network.model.source == "mnist-5k" for network in self.networks)
        page = Path(__file__).with_name("page.html").read_text("utf-8")
        return Template(page).substitute(
            self._panels(digit, zoom, label), digit=encode_digit(digit), label=label, octave=1,
            zoom=f"× {zoom:.2f}", samples=self.samples(0)["html"], bytes=MAX_FILE_BYTES,
            seeds=SEEDS, fewest=scenes.MIN_DIGITS, most=scenes.MAX_DIGITS,
            origin=UNSEEN if own else MAYBE_SEEN,
            networks=networks or "no network has scale channels",
        )  # fmt: skip

    def _panels(self, digit: Tensor, zoom: float, label: int | None) -> dict[str, Any]:
        zoom = check_number("zoom", zoom, panels.MIN_ZOOM, panels.MAX_ZOOM)
        frame, views = predict_digit(self.networks, digit, zoom)
        truth = None if label is None else str(label)
        return {
            "frame": panels.frame(frame[0, 0], views, zoom),
            "cards": panels.cards(views, truth, panels.digit_detail),
            "channels": panels.digit_channels(views),
            "accuracy": panels.accuracy(zoom, self.networks),
        }

    def _sample(self, label: int, turn: int) -> Tensor:
        places = (self.digits.labels == label).nonzero()[:, 0]
        return self.digits.images[places[turn % len(places)]][None]


def _button(digit: Tensor, label: int) -> str:
    shown = panels.image(Image.fromarray(digit[0, 0].numpy()), f"handwritten {label}")
    return (
        f'<button type="button" data-digit="{encode_digit(digit)}" data-label="{label}" '
        f'title="{label}">{shown}</button>'
    )
