"""C code for CPUs, compiled on first use: the patches of the op, and the trunk of a `ConvNet`."""
