"""Parameter groups: other hyperparameters for the parameters that a pattern names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from msc.ir.errors import PlanError


@dataclass(frozen=True, init=False)
class ParameterGroup:
    """Hyperparameters that differ from the optimizer's, for some of the parameters.

    ParameterGroup("*.embed.weight", lr=1e-4)
    ParameterGroup("*", max_dims=1, weight_decay=0.0)      no decay on norms and biases

    patterns: shell patterns of parameter names, of which tied weights have several; max_dims: take
    only parameters of at most so many dims; options: the hyperparameters that differ.
    """

    patterns: tuple[str, ...]
    max_dims: int | None
    options: tuple[tuple[str, Any], ...]

    def __init__(
        self, patterns: str | Sequence[str], *, max_dims: int | None = None, **options: Any
    ) -> None:
        given = (patterns,) if isinstance(patterns, str) else patterns
        listed = isinstance(given, (tuple, list)) and len(given) > 0
        if not listed or not all(isinstance(pattern, str) for pattern in given):
            raise PlanError(
                f"ParameterGroup: patterns is {patterns!r}; it is a text, or a list of them."
            )
        if max_dims is not None and (type(max_dims) is not int or max_dims < 0):
            raise PlanError(f"ParameterGroup: max_dims is {max_dims!r}; it is at least 0, or None.")
        object.__setattr__(self, "patterns", tuple(given))
        object.__setattr__(self, "max_dims", max_dims)
        object.__setattr__(self, "options", tuple(sorted(options.items())))

    def __str__(self) -> str:
        names = self.patterns[0] if len(self.patterns) == 1 else self.patterns
        shown = [repr(names), *(f"{name}={value!r}" for name, value in self.options)]
        if self.max_dims is not None:
            shown.insert(1, f"max_dims={self.max_dims}")
        return f"ParameterGroup({', '.join(shown)})"

    def matches(self, pattern: str, names: Iterable[str], dims: int) -> bool:
        """Whether one of its patterns takes a parameter with these names and so many dims."""
        small = self.max_dims is None or dims <= self.max_dims
        return small and any(fnmatchcase(name, pattern) for name in names)
