"""Place the model over tp: choose every call's strategy, at the least modelled cost.

    %q = msc.linear(%x, %w_q)   # layers.0.attn      w_q  tp: S0 (columns)    x  tp: R~ (gathered)
    %o = msc.linear(%a, %w_o)   # layers.0.attn      w_o  tp: S1 (rows)       o  tp: P

Pins limit the choice, a plan makes it. Nothing is rewritten: `shard` carries the choice out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from msc.cost.flops import nbytes
from msc.ir.passes import BIT_EXACT, UnitPass
from msc.ir.placement import Replicate, Shard, State
from msc.passes.compilation import Compilation, Settings
from msc.passes.sharding.axes import Axis, parts
from msc.passes.sharding.calls import Value
from msc.passes.sharding.candidates import find_candidates
from msc.passes.sharding.pins import pin_notes, pinned_states, solve_pinned
from msc.passes.sharding.placing import Placing
from msc.passes.sharding.plan_of import apply_plan, check_plan
from msc.passes.sharding.search import Placed, Step


@dataclass(frozen=True)
class Place(UnitPass):
    """Search placements over tp for all distinct blocks at once."""

    name: ClassVar[str] = "place"
    numerics: ClassVar[str] = BIT_EXACT
    essential: ClassVar[bool] = True

    def run(self, unit: Compilation) -> int:
        before = unit.texts()
        settings = unit.settings
        if settings.plan is not None:
            check_plan(settings.plan, unit.structure, settings.mesh, settings.micro_batches)
        if settings.mesh.axis_size("tp") == 1:
            return 0
        unit.placing = _placing(unit)
        unit.placed = _place(unit.placing, settings)
        unit.notes += pin_notes(unit.placing, settings.pinned)
        _annotate(unit.placed)
        return unit.lines_changed(before)


def _placing(unit: Compilation) -> Placing:
    """What there is to choose from, given what dp and mb do."""
    settings = unit.settings
    batch_axes = settings.batch_axes
    count = len(batch_axes)
    strategies = {
        name: {node: (strategy,) * count for node, strategy in unit.batch[name].strategies.items()}
        for name in unit.structure.blocks
    }
    states: dict[str, dict[Value, tuple[State, ...]]] = {
        name: {value: (state,) * count for value, state in unit.batch[name].states.items()}
        for name in unit.structure.blocks
    }
    axis = Axis("tp", settings.mesh.axis_size("tp"))
    num_parts = parts(batch_axes)
    sharded = {
        value
        for name in unit.structure.blocks
        for value, state in unit.batch[name].states.items()
        if isinstance(state.value, Shard)
    }
    return Placing(
        unit.structure,
        find_candidates(unit.structure, axis, batch_axes, strategies, states),
        axis,
        settings.cost,
        Step(
            share=lambda value: 1 / num_parts if value in sharded else 1.0,
            micro_batches=settings.micro_batches,
            stages=settings.mesh.axis_size("pp"),
            memory=math.inf if settings.memory is None else settings.memory,
            held=lambda node, name: _held(settings, node, name),
        ),
    )


def _held(settings: Settings, node: fx.Node, name: str) -> float:
    """Bytes that a parameter which tp does not shard takes: with gradient and states, if it trains.

    With master weights all of these are in their dtype, beside the copy to compute with. What ZeRO
    splits counts by its part (Rajbhandari et al., SC 2020, section 5); a copy to compute with is
    gathered for the whole step, or with zero=3 a few blocks at a time, which count as nothing.
    """
    value: torch.Tensor = node.meta["val"]
    part = 1 / settings.data_parts
    copies, computing = 1.0, 0.0
    trains = bool(node.meta.get("differentiable"))
    if part < 1 and (trains or settings.zero == 3):
        copies = part
        computing = 0.0 if settings.zero == 3 else 1.0
    if trains:
        copies += 1 if settings.zero < 2 else part
        if settings.optimizer is not None:
            copies += part * len(settings.optimizer_of(name).state_names)
    if settings.master is None or not value.is_floating_point():
        return (copies + computing) * nbytes(value)
    lowered = max(computing, 1 if part == 1 else part)
    return lowered * nbytes(value) + copies * value.numel() * settings.master.itemsize


def _place(placing: Placing, settings: Settings) -> Placed:
    if settings.plan is not None:
        return apply_plan(settings.plan, placing, pinned_states(placing, settings.pinned))
    if settings.pinned:
        return solve_pinned(placing, settings.pinned)
    return placing.solve()


def _annotate(placed: Placed) -> None:
    """Show the placements in the text."""
    results = {node: strategy.results[0] for node, strategy in placed.strategies.items()}
    for node, state in (placed.placeholders | results).items():
        if isinstance(node.meta["val"], torch.Tensor) and state.value != Replicate():
            node.meta["placement"] = {**node.meta.get("placement", {}), "tp": state.value}
