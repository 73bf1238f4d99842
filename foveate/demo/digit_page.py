"""The page about digits: one at any zoom, and scenes of several."""

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from PIL import Image
from torch import Tensor

from foveate.data.sources import Split
from foveate.demo import panels, scenes
from foveate.demo.fields import integer, number
from foveate.demo.networks import Contender, predict_digit
from foveate.demo.uploads import BYTES, pack, read_upload, unpack
from foveate.errors import ConfigError, DataError
from foveate.models.channels import ScaleChannels

START = (4, 2.0)  # class of the first digit shown, and its zoom
SEEDS = 2**31 - 1  # the largest seed of a scene
UNSEEN = (
    "The digits to pick from, here and in the scenes, are test digits these networks never saw."
)
MAYBE_SEEN = (
    "The digits to pick from, here and in the scenes, belong to MNIST's training set, on which "
    "these networks were trained: the page shows how they work, not how accurate they are."
)


class DigitPage:
    """Compare networks on digits. Requests keep no state and validate all their fields.

    Args:
        contenders: Networks with frames of one size.
        digits: Digits to pick from and to compose scenes of.
    """

    files = ("page.css", "page.js", "digit.js", "scene.js")

    def __init__(self, contenders: Sequence[Contender], digits: Split) -> None:
        self.contenders, self.digits = contenders, digits
        self.explorers = [c for c in contenders if isinstance(c.model.net, ScaleChannels)]

    def requests(self) -> tuple[Callable[..., dict[str, Any]], ...]:
        """The methods that handle requests."""
        return self.predict, self.upload, self.samples, self.scene

    def predict(self, digit: str, zoom: float, label: int | None = None) -> dict[str, Any]:
        """Show a digit at a zoom: the panels as HTML."""
        known = None if label is None else integer("label", label, 0, 9)
        return self._panels(unpack(digit), zoom, known)

    def upload(self, data: str, name: str, zoom: float) -> dict[str, Any]:
        """Show a drawing or a file (base64); the reply has the digit made from it too."""
        if not isinstance(data, str) or not isinstance(name, str):
            raise DataError("data and name must be strings")
        digit, note = read_upload(data, name[:80])
        return {**self._panels(digit, zoom, None), "digit": pack(digit), "note": note}

    def samples(self, turn: int) -> dict[str, Any]:
        """Ten digits to pick from, one of each class, others for every turn."""
        turn = integer("turn", turn, 0, SEEDS)
        return {"html": "".join(_button(self._sample(k, turn), k) for k in range(10))}

    def scene(self, count: int, network: int, seed: int) -> dict[str, Any]:
        """Compose a scene of several digits, and show one network's prediction at every place."""
        if not self.explorers:
            raise ConfigError("none of these networks has scale channels; add one by --model")
        contender = self.explorers[integer("network", network, 0, len(self.explorers) - 1)]
        count = integer("count", count, scenes.FEWEST, scenes.MOST)
        scene, placed = scenes.compose(self.digits, count, integer("seed", seed, 0, SEEDS))
        return {"html": scenes.draw(contender, scene, placed)}

    def html(self) -> str:
        """The page as it opens."""
        label, zoom = START
        digit = self._sample(label, 0)
        networks = "".join(
            f'<label><input type="radio" name="network" value="{k}"{"" if k else " checked"}>'
            f"{escape(contender.title)}</label>"
            for k, contender in enumerate(self.explorers)
        )
        own = all(contender.model.source == "mnist-5k" for contender in self.contenders)
        page = Path(__file__).with_name("page.html").read_text("utf-8")
        return Template(page).substitute(
            self._panels(digit, zoom, label), digit=pack(digit), label=label, octave=1,
            zoom=f"× {zoom:.2f}", samples=self.samples(0)["html"], bytes=BYTES, seeds=SEEDS,
            fewest=scenes.FEWEST, most=scenes.MOST, origin=UNSEEN if own else MAYBE_SEEN,
            networks=networks or "none has scale channels",
        )  # fmt: skip

    def _panels(self, digit: Tensor, zoom: float, label: int | None) -> dict[str, Any]:
        zoom = number("zoom", zoom, panels.LOW, panels.HIGH)
        view = predict_digit(self.contenders, digit, zoom)
        return {
            "frame": panels.frame(view),
            "cards": panels.cards(view, label),
            "channels": panels.channels(view),
            "accuracy": panels.accuracy(zoom, self.contenders),
        }

    def _sample(self, label: int, turn: int) -> Tensor:
        places = (self.digits.labels == label).nonzero()[:, 0]
        return self.digits.images[places[turn % len(places)]][None]


def _button(digit: Tensor, label: int) -> str:
    shown = panels.image(Image.fromarray(digit[0, 0].numpy()), f"a handwritten {label}")
    return (
        f'<button type="button" data-digit="{pack(digit)}" data-label="{label}" '
        f'title="{label}">{shown}</button>'
    )
