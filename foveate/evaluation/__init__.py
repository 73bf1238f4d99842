"""Evaluate networks over scale: load them, measure accuracy, audit, predict, verify the theory."""
