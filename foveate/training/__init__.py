"""Training: what a run is, how it goes, how it is made fast, and how it survives."""
