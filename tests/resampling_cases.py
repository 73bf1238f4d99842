"""Scales and options with which the tests resample."""

from foveate.scales import ScaleGrid

PAPER = ScaleGrid(0.5, 8, per_octave=4)
PADDINGS = ["border", "reflect", 0, -0.7]
OPTIONS = [{"padding": p, "antialias": a} for p in PADDINGS for a in (False, True)]
