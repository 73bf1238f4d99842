"""Networks by other authors that aim to generalise over scale, for comparison."""
