"""Verify covariance and invariance of scale channels numerically, against derived error bounds."""

from foveate.evaluation.theory.blobs import Blobs
from foveate.evaluation.theory.bounds import Finding
from foveate.evaluation.theory.statements import STATEMENTS, verify

__all__ = ["STATEMENTS", "Blobs", "Finding", "verify"]
