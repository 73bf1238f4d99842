"""Settings for all tests."""

from hypothesis import settings
from torchvision_ops import declare_missing

settings.register_profile("steady", deadline=None)  # timings here are noisy
settings.load_profile("steady")
declare_missing()
