"""What was found about a statement: the numbers that decide it, their bounds, and the verdict."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from foveate.paper.summary import IncompleteError

Verdict = Literal["holds", "fails", "not yet"]
Relation = Literal["<", "≤", "≥", ">"]
DIGITS = 6  # of a measured number that count: a mean of shares is not exact in binary


class Measured(NamedTuple):
    """A number, and where in the results it was found."""

    value: float
    where: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One number that decides a statement; None while results are missing.

    `where` says where it was found, or why there is none.
    """

    words: str
    value: float | None
    relation: Relation
    bound: float
    unit: str = "points"
    where: str = ""

    @property
    def verdict(self) -> Verdict:
        """Whether the number is on the right side of its bound; never so for NaN."""
        if self.value is None:
            return "not yet"
        value = round(self.value, DIGITS)
        right = {
            "<": value < self.bound,
            "≤": value <= self.bound,
            "≥": value >= self.bound,
            ">": value > self.bound,
        }
        return "holds" if right[self.relation] else "fails"

    @property
    def measured(self) -> str:
        """In words: smallest difference −0.12 points (FovAvg 17 tr1 at 4)."""
        if self.value is None:
            return f"{self.words}: {self.where or 'not all runs yet'}"
        where = f" ({self.where})" if self.where else ""
        return f"{self.words}: {number(self.value)} {self.unit}{where}"

    @property
    def threshold(self) -> str:
        """In words: ≥ −0.15 points."""
        return f"{self.relation} {number(self.bound)} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A statement with what decides it; it holds if every check does."""

    name: str
    statement: str
    checks: tuple[Check, ...]

    @property
    def verdict(self) -> Verdict:
        """Not yet, while a check lacks results; otherwise whether all hold."""
        verdicts = {check.verdict for check in self.checks}
        if "not yet" in verdicts:
            return "not yet"
        return "fails" if "fails" in verdicts else "holds"


def check(
    words: str,
    relation: Relation,
    bound: float,
    measure: Callable[..., Measured | float],
    *arguments: Any,
    unit: str = "points",
) -> Check:
    """Measure, unless results are missing."""
    try:
        found = measure(*arguments)
        value, where = found if isinstance(found, Measured) else (found, "")
    except IncompleteError as error:
        value, where = None, str(error)
    return Check(words=words, value=value, relation=relation, bound=bound, unit=unit, where=where)


def smallest(found: Iterable[Measured]) -> Measured:
    """The smallest of some numbers; all are asked for, so none may be missing."""
    return min(list(found), key=lambda one: one.value)


def largest(found: Iterable[Measured]) -> Measured:
    """The largest of some numbers; all are asked for, so none may be missing."""
    return max(list(found), key=lambda one: one.value)


def number(value: float) -> str:
    """Two decimals, none for whole numbers of 10 or more; a true minus."""
    text = f"{value:.0f}" if value == round(value) else f"{value:.2f}"
    return text.replace("-", "−")
