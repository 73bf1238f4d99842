"""The trunk of a `ConvNet` in C."""
