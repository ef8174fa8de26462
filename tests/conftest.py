"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Machines are slow at times, which no test may notice; every run of CI draws the same examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
# `make test-long` draws new ones, thousands of them.
settings.register_profile("long", deadline=None)
