"""How a classifier behaves when the objects in its images change size."""

from foveate.evaluation.audit.measure import audit as audit
