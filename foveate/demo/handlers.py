"""What the page asks for and what it gets: plain functions without state, errors as words."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from foveate.data.sources import Split
from foveate.demo import panels
from foveate.demo.networks import Contender, ask
from foveate.demo.uploads import pack, read_upload, unpack
from foveate.errors import DataError, FoveateError

Reply: TypeAlias = dict[str, Any]
Result = TypeVar("Result")
START = (4, 2.0)  # class of the first digit shown, and its zoom


class Handlers:
    """Answers for all visitors: the networks, loaded once, and the digits that can be picked.

    One thread does all computing: requests queue up, and do not fight over the cores.
    """

    def __init__(self, contenders: Sequence[Contender], digits: Split) -> None:
        self.contenders, self.digits = contenders, digits
        self.curves = panels.curves(contenders)
        # For one digit a second core gains nothing: 4 ms for three networks with or without.
        self._worker = ThreadPoolExecutor(1, "foveate-demo", lambda: torch.set_num_threads(1))

    def look(self, digit: str, zoom: float, label: int | None = None) -> Reply:
        """Show the digit at a zoom: the panels as HTML, or {"error": words}."""
        return self.in_turn(lambda: self._panels(unpack(digit), _zoom(zoom), _label(label)))

    def take(self, data: str, name: str, zoom: float) -> Reply:
        """Take a drawing or a file (base64), and show it; the reply has the digit too."""

        def work() -> Reply:
            digit, note = read_upload(data, str(name)[:80])
            return {**self._panels(digit, _zoom(zoom), None), "digit": pack(digit), "note": note}

        return self.in_turn(work)

    def offer(self, turn: int) -> str:
        """Ten digits to pick from, one of each class, others for every turn."""
        chosen = [self._pick(label, turn) for label in range(10)]
        return "".join(_button(digit, label) for label, digit in enumerate(chosen))

    def start(self) -> Reply:
        """The panels when the page opens, with the digit they show."""
        label, zoom = START
        digit = self._pick(label, 0)
        return {**self._panels(digit, zoom, label), "digit": pack(digit), "label": label}

    def in_turn(self, work: Callable[[], Reply]) -> Reply:
        """Do some work when it is its turn; what a person can mend is told in words."""
        try:
            return self._worker.submit(work).result()
        except FoveateError as error:
            return {"error": str(error)}

    def _panels(self, digit: Tensor, zoom: float, label: int | None) -> Reply:
        seen = ask(self.contenders, digit, zoom)
        return {
            "frame": panels.frame(seen, self.contenders),
            "cards": panels.cards(seen, self.contenders, label),
            "channels": panels.channels(seen, self.contenders),
            "accuracy": panels.accuracy(zoom, self.contenders, self.curves),
        }

    def _pick(self, label: int, turn: int) -> Tensor:
        places = (self.digits.labels == label).nonzero()[:, 0]
        return self.digits.images[places[turn % len(places)]][None]


def _zoom(zoom: float) -> float:
    if isinstance(zoom, bool) or not isinstance(zoom, int | float):
        raise DataError(f"the zoom must be a number, got {zoom!r}")
    if not panels.LOW <= zoom <= panels.HIGH:
        raise DataError(f"the zoom goes from {panels.LOW:g} to {panels.HIGH:g}, got {zoom:g}")
    return float(zoom)


def _label(label: int | None) -> int | None:
    return label if isinstance(label, int) else None


def _button(digit: Tensor, label: int) -> str:
    from PIL import Image

    shown = panels.image(Image.fromarray(digit[0, 0].numpy()), f"a handwritten {label}")
    return (
        f'<button type="button" data-digit="{pack(digit)}" data-label="{label}" '
        f'title="{label}">{shown}</button>'
    )
