"""Networks by other authors that aim to generalise over scale, for comparison.

A module has one or more factories ``network(*, channels, classes, size)``. They return a network
with random weights, from frames ``(N, channels, size, size)`` to logits ``(N, classes)``, or raise
a `ConfigError` if frames of `size` pixels are too small for it.
"""
