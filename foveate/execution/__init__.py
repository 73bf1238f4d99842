"""Faster implementations of the networks in `models`, with equal results."""
