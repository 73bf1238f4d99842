"""The resampling op: its definition in PyTorch, and equivalent kernels in Triton and C."""

from foveate.resampling.definition import Padding as Padding
from foveate.resampling.definition import check_images as check_images
from foveate.resampling.definition import check_window as check_window
from foveate.resampling.definition import foveate as foveate
