"""Settings that hold for every test."""

from hypothesis import settings

settings.register_profile("tests", deadline=None)  # how long an example takes says how busy the machine is
settings.load_profile("tests")
