"""The statements about covariance and invariance, measured one after the other."""

from collections.abc import Callable

from foveate.data.store import one_thread
from foveate.evaluation.theory import covariance, scale_invariance
from foveate.evaluation.theory.bounds import Finding

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
    """Measure every statement on random images and networks.

    Args:
        seed: Seed of the images and weights.
        advance: Called with 1 after each of STATEMENTS.
    """
    found = []
    with one_thread():  # for many small products two threads take longer
        for statement in STATEMENTS:
            found += statement(seed)
            if advance is not None:
                advance(1)
    return found
