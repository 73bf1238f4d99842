"""How a classifier behaves over scale."""
