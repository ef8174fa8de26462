"""What an explanation consists of, as plain values; `str` shows them as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msc.ir.errors import UserError


@dataclass(frozen=True)
class Value:
    """A parameter of a module, or a result of one of its calls.

    name: inside the module; the whole name of a parameter that belongs to another (a tied one).
    kind: "parameter", "result" (read by other modules) or "inner" (read inside the module alone).
    op: what computes it; "" for a parameter. type: dtype and global shape.
    placements: axis -> placement, where it is not whole; partial_gradient: the axes over which its
    gradient is a sum, for a parameter.
    """

    name: str
    kind: str
    op: str
    type: str
    placements: Mapping[str, str]
    partial_gradient: tuple[str, ...] = ()

    @property
    def placement(self) -> str:
        """`tp S0/3`, with axes of equal placement together, or `whole`."""
        by_text: dict[str, list[str]] = {}
        for axis, text in self.placements.items():
            by_text.setdefault(text, []).append(axis)
        return "  ".join(f"{','.join(axes)} {text}" for text, axes in by_text.items()) or "whole"


@dataclass(frozen=True)
class Communication:
    """A collective of a layer.

    nbytes: of the whole value, of one micro-batch; cost: modelled, of one call; calls: per step, in
    each of the equal `layers`. why: which two ops disagree about the value's state.
    """

    kind: str
    axis: str
    phase: str
    nbytes: int
    cost: float
    calls: int
    layers: int
    why: str

    @property
    def times(self) -> str:
        """How often it runs: `2x per step and layer`."""
        return f"{self.calls}x per step" + (" and layer" if self.layers > 1 else "")


@dataclass(frozen=True)
class Module:
    """One module of a layer: its parameters and calls, and the collectives beside them."""

    path: str
    depth: int
    kind: str
    values: tuple[Value, ...]
    communications: tuple[Communication, ...]


@dataclass(frozen=True)
class Part:
    """A distinct block with all the places where it stands."""

    title: str
    count: int
    modules: tuple[Module, ...]


@dataclass(frozen=True)
class Total:
    """What one rank of a stage (or of each of `stage1 to stage6`) sends in a step.

    cost: None where nothing is known of it.
    """

    stage: str
    axis: str
    kind: str
    calls: int
    nbytes: int
    cost: float | None


@dataclass(frozen=True)
class Alternative:
    """A state or strategy, and the modelled cost of the best plan that has it (None: no plan)."""

    text: str
    cost: float | None
    chosen: bool


@dataclass(frozen=True)
class Choice:
    """A parameter or call, and all that it could be."""

    title: str
    alternatives: tuple[Alternative, ...]


@dataclass(frozen=True)
class Reasons:
    """Why the values of a module lie as they do.

    cost: of the whole plan; planned: the plan was given, not found; unpriced: calls left out.
    """

    path: str
    part: str
    cost: float
    planned: bool
    choices: tuple[Choice, ...]
    communications: tuple[Communication, ...]
    fallbacks: tuple[str, ...]
    unpriced: int


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where a program's values lie and what it sends; printing it shows it as text.

    cluster: its name; without one costs are in units of the cost model.
    fused: what became one op with what is shown beside it, as a head with its loss; values inside
    of it are not in memory. kernels: which ops run in Triton kernels, and why. reasons: of one
    module, where one was asked for. missing: what cannot be said, with the reason.
    """

    mesh: str
    cluster: str
    micro_batches: int
    parts: tuple[Part, ...] = ()
    totals: tuple[Total, ...] = ()
    fallbacks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    fused: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    reasons: Reasons | None = None
    missing: str = ""

    def __str__(self) -> str:
        from msc.explanation.text import to_text

        return to_text(self)

    __repr__ = __str__

    def save_html(self, path: str | Path) -> None:
        """Write the explanation as one page that needs nothing else."""
        from msc.explanation.page import to_html

        try:
            Path(path).write_text(to_html(self), encoding="utf-8")
        except OSError as error:
            raise UserError(f"The page '{path}' cannot be written: {error}") from error


LEGEND = (
    "S0: split along dim 0; S0/3: each of 3 runs of it split; R, whole: every rank holds all of "
    "it; R~: whole, with a gradient that is summed over the axis; P: a partial sum (Pmax: maximum)"
)


def cost_unit(explanation: Explanation) -> str:
    """The unit of all costs: microseconds on a cluster."""
    return "us" if explanation.cluster else "units"


def cost_text(cost: float | None, cluster: str) -> str:
    """A cost as text, without its unit: microseconds on a cluster."""
    if cost is None:
        return "-"
    if not cluster:
        return f"{cost:,.0f}"
    microseconds = cost * 1e6
    return f"{microseconds:,.1f}" if microseconds >= 1 else f"{microseconds:.3g}"
