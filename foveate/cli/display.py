"""How a run is shown while it trains: a live line for people, a line per epoch for files."""

import time
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn

from foveate.cli.console import ERRORS, OUTPUT

if TYPE_CHECKING:
    from foveate.training.checkpoint import Progress as RunProgress
    from foveate.training.config import TrainConfig

REFRESH = 0.1  # seconds; a step on a GPU takes far less


class Display:
    """Shows epoch, loss, validation accuracy, images per second and time left."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting  # said when the first step is done, not when a run is refused
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        watched = ERRORS.is_terminal
        self.bar = Progress(*columns, console=ERRORS, disable=not watched, transient=True)
        self.task = self.bar.add_task("preparing", total=None, now="")
        self.start: tuple[float, int] | None = None
        self.told = 0  # epochs that have their line
        self.drawn = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, config: "TrainConfig", progress: "RunProgress", steps: int) -> None:
        """Show how far the run is."""
        now, done = time.monotonic(), progress.epoch * steps + progress.step
        total = config.epochs * steps
        if self.start is None:
            ended = progress.step == 0  # a run that was stopped in validation begins with a line
            self.start, self.told = (now, done), len(progress.metrics) - ended
            OUTPUT.print(self.greeting, markup=False)
        left = self._left(now, done, total, config.batch) if done < total else ""
        if len(progress.metrics) > self.told:
            self.told = len(progress.metrics)
            words = _join(f"loss {progress.metrics[-1]['loss']:.4f}", _validation(progress), left)
            OUTPUT.print(f"epoch {progress.epoch}/{config.epochs}  {words}")
        if now - self.drawn > REFRESH and ERRORS.is_terminal:
            self.drawn = now
            loss = f"loss {progress.loss / progress.step:.4f}" if progress.loss else ""
            self.bar.update(
                self.task,
                description=f"epoch {min(progress.epoch + 1, config.epochs)}/{config.epochs}",
                total=total,
                completed=done,
                now=_join(loss, _validation(progress), left),
            )

    def _left(self, now: float, done: int, total: int, batch: int) -> str:
        """Images per second and the time left, both as in this call, not before it."""
        assert self.start is not None
        begun, first = self.start
        if done == first or now == begun:
            return ""
        pace = (done - first) / (now - begun)
        left = round((total - done) / pace)
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        return f"{pace * batch:,.0f} images/s  {hours}:{minutes:02}:{seconds:02} left"


def _join(*words: str) -> str:
    return "  ".join(filter(None, words))


def _validation(progress: "RunProgress") -> str:
    """The accuracy on the validation images when it was last measured, if ever."""
    measured = [entry["validation"] for entry in progress.metrics if "validation" in entry]
    return f"validation {100 * measured[-1]:.2f} %" if measured else ""
