"""The schedules, each described by a few numbers.

Forwards go before backwards and those before weight gradients, as far as limits on what is held
allow; the limits are what makes a schedule:

    gpipe        none: all forwards, then all backwards (Huang et al., NeurIPS 2019)
    1f1b         a chunk has no more micro-batches in flight than chunks follow it, itself included
                 (PipeDream-Flush, Narayanan et al., ICML 2021)
    interleaved  several chunks per stage, in groups of as many micro-batches as there are stages,
                 or of a few more where these do not divide them; a stage holds what it needs to
                 warm up, and one more (Narayanan et al., SC 2021, section 2.2)
    zb-h1        1f1b with a split backward; weight gradients fill what would be idle, and a stage
                 holds no more than the first one of 1f1b (Qi et al., 2023, section 2.2)
    zb-v         zb-h1 on chunks that run to the last stage and back (Qi et al., 2024, ZB-V)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from msc.ir.errors import PlanError
from msc.passes.schedules.stages import Stages

UNLIMITED = 2**31


@dataclass(frozen=True)
class Rules:
    """What tells one schedule from another; `list_schedule` makes orders of it.

    split: input and weight gradients are steps of their own.
    groups: micro-batches are in so many groups of even size; a stage runs a group on its first
        chunk, then on its next.
    in_order: forwards keep to that, and backwards to its mirror image, even if another could go
        first; without it that is only whom to prefer.
    in_flight: of each chunk, how many micro-batches may have run forward and not backward.
    held: of each stage, how many pairs of micro-batch and chunk it may hold activations of: from
        the forward on, to the last step that reads them.
    """

    stages: Stages
    micro_batches: int
    split: bool
    groups: int
    in_order: bool
    in_flight: tuple[int, ...]
    held: tuple[int, ...]

    @property
    def group_size(self) -> int:
        """Micro-batches of the largest group."""
        return -(-self.micro_batches // self.groups)

    def group(self, micro_batch: int) -> int:
        """The group of a micro-batch."""
        return micro_batch * self.groups // self.micro_batches


@dataclass(frozen=True)
class _Description:
    """A named schedule.

    held: of (stages, virtual stages, stage, group size), None without a limit; groups: of (stages,
    micro-batches).
    """

    shape: Literal["loop", "v"] = "loop"
    virtual: int | None = 1  # None: any number
    usual: int = 1
    split: bool = False
    groups: Callable[[int, int], int] = lambda stages, micro_batches: micro_batches
    in_order: bool = False
    follows: bool = True  # in flight: what follows, itself included
    held: Callable[[int, int, int, int], int] | None = None


_DESCRIPTIONS = {
    "gpipe": _Description(virtual=None, groups=lambda stages, count: 1, follows=False),
    "1f1b": _Description(),
    "interleaved": _Description(
        virtual=None,
        usual=2,
        groups=lambda stages, count: max(1, count // stages),
        in_order=True,
        held=lambda p, v, stage, size: 2 * (p - stage - 1) + (v - 1) * max(p, size) + 1,
    ),
    "zb-h1": _Description(split=True, held=lambda p, v, stage, size: p),
    "zb-v": _Description(
        shape="v",
        virtual=2,
        usual=2,
        split=True,
        held=lambda p, v, stage, size: 2 * p,
    ),
}

AUTO = "auto"
SCHEDULES = (*_DESCRIPTIONS, AUTO)
"""The names that a user may give."""


def check_schedule(name: str, virtual: int | None) -> None:
    """Raise `PlanError` for an unknown schedule, or a number of virtual stages it cannot have."""
    if name not in SCHEDULES:
        raise PlanError(f"Schedule '{name}' is unknown. The schedules are {', '.join(SCHEDULES)}.")
    if virtual is None:
        return
    if not isinstance(virtual, int) or isinstance(virtual, bool) or virtual < 1:
        raise PlanError(f"virtual_stages is {virtual!r}; it is a whole number of at least 1.")
    only = None if name == AUTO else _DESCRIPTIONS[name].virtual
    if only is not None and virtual != only:
        other = " Schedule 'interleaved' takes any number." if only == 1 else ""
        raise PlanError(
            f"Schedule '{name}' has {only} virtual stage{'s' if only > 1 else ''} per rank of pp, "
            f"not {virtual}.{other} Leave virtual_stages out."
        )


def may_have(name: str, virtual: int) -> bool:
    """Whether a named schedule can have so many virtual stages."""
    return _DESCRIPTIONS[name].virtual in (None, virtual)


def virtual_stages(name: str, virtual: int | None) -> int | None:
    """Chunks per stage of a schedule; None where "auto" is free to choose."""
    if virtual is not None or name == AUTO:
        return virtual
    return _DESCRIPTIONS[name].usual


def rules_of(name: str, num_stages: int, virtual: int | None, micro_batches: int) -> Rules:
    """The rules of a named schedule; `virtual` None takes its usual number of virtual stages."""
    own = _DESCRIPTIONS[name]
    stages = Stages(num_stages, virtual or own.usual, own.shape)
    groups = own.groups(num_stages, micro_batches)
    size = -(-micro_batches // groups)
    least = size if own.in_order and stages.virtual > 1 else 1  # a group passes chunk by chunk
    chunks = stages.num_chunks
    return Rules(
        stages,
        micro_batches,
        own.split,
        groups,
        own.in_order,
        tuple(max(chunks - c, least) if own.follows else UNLIMITED for c in range(chunks)),
        tuple(
            UNLIMITED if own.held is None else own.held(num_stages, stages.virtual, stage, size)
            for stage in range(num_stages)
        ),
    )
