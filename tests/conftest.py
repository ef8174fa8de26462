"""Settings of all tests."""

from __future__ import annotations

import os

from hypothesis import settings

# Triton decides once per process whether it interprets kernels or compiles them, when it is first
# imported, which torch may do. Tests interpret; what compiles runs in a process of its own.
os.environ["TRITON_INTERPRET"] = "1"

# Machines are slow at times, which no test may notice; every run of CI draws the same examples.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")
# `make test-long` draws new ones, thousands of them.
settings.register_profile("long", deadline=None)
