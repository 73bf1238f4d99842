"""Data: the sources, the MNIST Large Scale generator, and the files it writes."""
