"""Progress of a training run: a live bar on a terminal, and one line per epoch."""

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from rich.progress import BarColumn, Progress, TextColumn

from foveate.cli.console import ERRORS, OUTPUT

if TYPE_CHECKING:
    from foveate.training.checkpoint import Progress as RunProgress
    from foveate.training.config import TrainConfig

REFRESH = 0.1  # seconds between updates; a training step on a GPU takes far less


class Display:
    """Shows epoch, loss, validation accuracy, images per second and remaining time."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting  # printed after the first step: a refused run prints its error
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[now]}"))
        watched = ERRORS.is_terminal
        self.bar = Progress(*columns, console=ERRORS, disable=not watched, transient=True)
        self.task = self.bar.add_task("preparing", total=None, now="")
        self.start: tuple[float, int] | None = None
        self.printed_epochs = 0  # epochs whose line is printed
        self.drawn = 0.0

    def __enter__(self) -> Self:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def __call__(self, config: "TrainConfig", progress: "RunProgress", steps: int) -> None:
        """Show the progress of the run."""
        now, done = time.monotonic(), progress.epoch * steps + progress.step
        total = config.epochs * steps
        if self.start is None:
            ended = progress.step == 0  # stopped in validation: that epoch still needs its line
            self.start, self.printed_epochs = (now, done), len(progress.metrics) - ended
            OUTPUT.print(self.greeting)
        left = self._left(now, done, total, config.batch) if done < total else ""
        if len(progress.metrics) > self.printed_epochs:
            self.printed_epochs = len(progress.metrics)
            OUTPUT.print(_join(epoch_line(config, progress), left))
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
        """Return images per second and the remaining time, measured since this process started."""
        assert self.start is not None
        begun, first = self.start
        if done == first or now == begun:
            return ""
        pace = (done - first) / (now - begun)
        left = timedelta(seconds=round((total - done) / pace))
        speed = pace * batch
        digits = 0 if speed >= 10 else 1
        return f"{speed:,.{digits}f} images/s  {left} remaining"


def epoch_line(config: "TrainConfig", progress: "RunProgress") -> str:
    """Return number, loss and validation accuracy of the last epoch as one line."""
    loss = f"loss {progress.metrics[-1]['loss']:.4f}"
    return _join(f"epoch {progress.epoch}/{config.epochs}", loss, _validation(progress))


def _join(*texts: str) -> str:
    return "  ".join(filter(None, texts))


def _validation(progress: "RunProgress") -> str:
    """Return the most recent validation accuracy, or an empty text before the first one."""
    measured = [entry["validation"] for entry in progress.metrics if "validation" in entry]
    return f"validation {100 * measured[-1]:.2f} %" if measured else ""
