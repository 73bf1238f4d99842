"""The requests of the page: functions without state that validate all they are given."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeAlias

import torch
from torch import Tensor

from foveate.data.sources import Split
from foveate.demo import panels
from foveate.demo.maps import scene_panels
from foveate.demo.networks import Contender, ask
from foveate.demo.scenes import FEWEST, MOST, compose, explore, suitable
from foveate.demo.uploads import pack, read_upload, unpack
from foveate.errors import ConfigError, DataError, FoveateError

Reply: TypeAlias = dict[str, Any]
P = ParamSpec("P")
START = (4, 2.0)  # class of the first digit shown, and its zoom
SEEDS = 2**31 - 1  # the largest seed of a scene


def in_turn(work: Callable[Concatenate["Handlers", P], Reply]) -> Callable[..., Reply]:
    """Run a method in the one computing thread; errors that a user can mend become a reply."""

    @wraps(work)
    def turn(self: "Handlers", *args: P.args, **kwargs: P.kwargs) -> Reply:
        def run() -> Reply:
            if self.closing:
                raise ConfigError("the server is shutting down")
            return work(self, *args, **kwargs)

        try:
            return self.worker.submit(run).result()
        except FoveateError as error:
            return {"error": str(error)}

    return turn


class Handlers:
    """Answers for all visitors: the networks, loaded once, and the digits that can be picked.

    One thread does all computing: requests queue up, and do not fight over the cores.
    """

    def __init__(self, contenders: Sequence[Contender], digits: Split) -> None:
        self.contenders, self.digits = contenders, digits
        self.explorers = suitable(contenders)
        self.closing = False  # requests that still wait are refused, so that the server can end
        self.curves = panels.curves(contenders)
        # For one digit a second core gains nothing: 4 ms for three networks with or without.
        self.worker = ThreadPoolExecutor(1, "foveate-demo", lambda: torch.set_num_threads(1))

    @in_turn
    def look(self, digit: str, zoom: float, label: int | None = None) -> Reply:
        """Show the digit at a zoom: the panels as HTML, or {"error": message}."""
        return self._panels(unpack(digit), _zoom(zoom), _label(label))

    @in_turn
    def take(self, data: str, name: str, zoom: float) -> Reply:
        """Take a drawing or a file (base64), and show it; the reply has the digit too."""
        if not isinstance(data, str) or not isinstance(name, str):
            raise DataError("data and name must be strings")
        digit, note = read_upload(data, name[:80])
        return {**self._panels(digit, _zoom(zoom), None), "digit": pack(digit), "note": note}

    @in_turn
    def offer(self, turn: int) -> Reply:
        """Ten digits to pick from, one of each class, others for every turn."""
        chosen = [self._pick(label, _whole("turn", turn, 0, SEEDS)) for label in range(10)]
        return {"html": "".join(_button(digit, k) for k, digit in enumerate(chosen))}

    @in_turn
    def scene(self, count: int, network: int, seed: int) -> Reply:
        """Compose a scene of several digits, and show what one network says at every place."""
        if not self.explorers:
            raise ConfigError("none of these networks has scale channels; add one by --model")
        contender = self.explorers[_whole("network", network, 0, len(self.explorers) - 1)]
        whole = _whole("count", count, FEWEST, MOST), _whole("seed", seed, 0, SEEDS)
        scene, placed = compose(self.digits, *whole)
        return {"html": scene_panels(contender, scene, placed, explore(contender, scene))}

    def start(self) -> Reply:
        """The panels when the page opens, with the digit they show."""
        label, zoom = START
        digit = self._pick(label, 0)
        return {**self._panels(digit, zoom, label), "digit": pack(digit), "label": label}

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


def _zoom(zoom: object) -> float:
    if isinstance(zoom, bool) or not isinstance(zoom, int | float):
        raise DataError(f"zoom must be a number, got {_shown(zoom)}")
    if not panels.LOW <= zoom <= panels.HIGH:
        raise DataError(f"zoom must be from {panels.LOW:g} to {panels.HIGH:g}, got {_shown(zoom)}")
    return float(zoom)


def _label(label: object) -> int | None:
    return None if label is None else _whole("label", label, 0, 9)


def _whole(name: str, value: object, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise DataError(f"{name} must be an integer from {low} to {high}, got {_shown(value)}")
    return value


def _shown(value: object) -> str:
    """A value from a request in a few characters: its repr may be long, or nested too deeply."""
    return f"{value!r:.40}" if isinstance(value, str | int | float | None) else "a JSON structure"


def _button(digit: Tensor, label: int) -> str:
    from PIL import Image

    shown = panels.image(Image.fromarray(digit[0, 0].numpy()), f"a handwritten {label}")
    return (
        f'<button type="button" data-digit="{pack(digit)}" data-label="{label}" '
        f'title="{label}">{shown}</button>'
    )
