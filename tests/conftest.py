"""Settings for all tests."""

from hypothesis import settings

settings.register_profile("steady", deadline=None)  # timings here are noisy
settings.load_profile("steady")
