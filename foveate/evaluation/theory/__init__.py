"""The mathematics of scale channels as code that measures itself: statements, errors, bounds."""

from foveate.evaluation.theory.finding import Finding
from foveate.evaluation.theory.images import Blobs
from foveate.evaluation.theory.run import verify

__all__ = ["Blobs", "Finding", "verify"]
