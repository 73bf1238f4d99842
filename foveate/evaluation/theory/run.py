"""All statements of the theory, measured one after the other."""

from __future__ import annotations

from collections.abc import Callable

from foveate.data.store import one_thread
from foveate.evaluation.theory.covariance import (
    scale_covariance,
    shifted_maps,
    translation_covariance,
    translation_per_channel,
)
from foveate.evaluation.theory.derivatives import (
    channel_derivatives,
    kernel_scaling,
    scale_selection,
)
from foveate.evaluation.theory.duality import duality
from foveate.evaluation.theory.finding import Finding
from foveate.evaluation.theory.invariance import (
    invariance_ends,
    local_invariance,
    pooled_invariance,
)
from foveate.evaluation.theory.rates import density_order, resolution_order

STATEMENTS: tuple[Callable[[int], list[Finding]], ...] = (
    scale_covariance,
    translation_covariance,
    shifted_maps,
    translation_per_channel,
    pooled_invariance,
    local_invariance,
    invariance_ends,
    duality,
    kernel_scaling,
    channel_derivatives,
    scale_selection,
    resolution_order,
    density_order,
)


def verify(seed: int = 0, advance: Callable[[int], None] | None = None) -> list[Finding]:
    """Measure every statement on images and networks drawn from `seed`.

    `advance` is told of each of STATEMENTS when it is done.
    """
    found = []
    with one_thread():  # for many small products two took longer, 31 s against 20 s
        for statement in STATEMENTS:
            found += statement(seed)
            if advance is not None:
                advance(1)
    return found
