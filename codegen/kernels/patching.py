"""Replaces methods of Triton's interpreter for as long as a `with` block runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, methods: dict[str, Callable[..., Any]]) -> Iterator[None]:
    """`owner`'s attributes of these names are `methods` inside the block."""
    originals = {name: getattr(owner, name) for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(owner, name, original)
