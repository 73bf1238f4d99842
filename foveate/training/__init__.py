"""Training: configuration, training loop, checkpoints, data loading and several processes."""
