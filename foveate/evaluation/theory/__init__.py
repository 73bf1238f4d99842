"""Verify covariance and invariance of scale channels numerically, against derived error bounds."""

from collections.abc import Callable

from foveate.data.store import cpu_threads
from foveate.evaluation.theory import covariance, scale_invariance
from foveate.evaluation.theory.blobs import Blobs as Blobs
from foveate.evaluation.theory.bounds import Finding as Finding

STATEMENTS: tuple[Callable[[int], list[Finding]], ...] = (
    covariance.scale_covariance,
    covariance.translation_covariance,
    covariance.shifted_maps,
    covariance.translation_per_channel,
    scale_invariance.pooled_invariance,
    scale_invariance.local_invariance,
    scale_invariance.invariance_ends,
)


def verify(seed: int = 0, advance: Callable[[int], None] | None = None) -> list[Finding]:
    """Verify covariance and invariance of scale channels on random images and networks.

    Each statement is an equality of two responses. Its error is compared with a bound derived from
    the interpolation error of the images; where the theory predicts that the equality fails, the
    error must exceed the bound.

    Args:
        seed: Seed of the images and weights.
        advance: Called with 1 after each group of statements, for progress bars.

    Returns:
        One finding per statement.

    Examples:
        >>> findings = verify(seed=0)
        >>> findings[0].statement
        'scale covariance: patches'
        >>> all(finding.holds for finding in findings)
        True
    """
    found = []
    with cpu_threads(1):  # two threads are slower for many small matrix products
        for statement in STATEMENTS:
            found += statement(seed)
            if advance is not None:
                advance(1)
    return found
