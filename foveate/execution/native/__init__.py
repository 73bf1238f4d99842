"""The trunk of a `ConvNet`, implemented in C."""
