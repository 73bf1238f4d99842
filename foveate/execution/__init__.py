"""Faster forms of the networks in `models`: the same numbers, one rule for when they apply."""
