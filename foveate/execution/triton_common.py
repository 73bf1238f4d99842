"""What the modules with Triton kernels share; importing it does not import Triton."""

from importlib.util import find_spec

KERNEL_DEVICES: tuple[str, ...] = ("cuda",) if find_spec("triton") else ()
MOST_VALUES = 2**31 - 2**20  # the kernels compute 32-bit offsets, also of the rest of a last block


def power(number: int) -> int:
    """Return the smallest power of two that is at least 16 and not below a number."""
    return max(16, 1 << (number - 1).bit_length())
