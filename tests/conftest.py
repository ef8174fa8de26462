"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# `make test-long` draws new examples, thousands of them, where CI draws the same ones each time.
settings.register_profile("long", settings.get_profile("default"))
