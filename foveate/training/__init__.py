"""Training: run configuration, training loop, checkpoints, data loading and processes."""
