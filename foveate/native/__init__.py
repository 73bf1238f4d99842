"""C code for CPUs, compiled on first use: the resampling op and the trunk of a `ConvNet`."""
