"""Data: image sources, preprocessing recipes, and the MNIST Large Scale generator."""
