"""Audit a classifier: accuracy, agreement and confidence when its images are rescaled."""

from foveate.evaluation.audit.measure import audit as audit
