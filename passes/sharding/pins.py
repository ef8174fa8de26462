"""Pins: placements of parameters that the user sets and the search must keep.

    pins={"layers.*.attn.q_proj.weight": {"tp": Shard(0)}}

A pin names parameters by a pattern and limits the states of their placeholders. `Replicate()`
leaves open whether gradients are partial, `Shard(0)` how the dim is segmented: which of these fits
the model is the search's to find.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import fx

from msc.ir.errors import PlanError
from msc.ir.mesh import Mesh
from msc.ir.placement import Partial, Placement, Replicate, Shard, State, from_torch
from msc.passes.sharding.placing import Placing
from msc.passes.sharding.search import Placed

_LISTED = 12
_FORCED = {
    "pp": "the balance of the stages decides which of them hold a parameter",
    "dp": "parameters are whole on every dp rank, which splits the batch",
    "mb": "it is the micro-batches' axis in time, which holds no parameters",
}


@dataclass(frozen=True)
class Pin:
    """One entry of `pins`: a pattern of parameter names, and a placement on tp."""

    pattern: str
    placement: Replicate | Shard

    def __str__(self) -> str:
        shard = self.placement
        text = "Replicate()" if isinstance(shard, Replicate) else _shard_text(shard)
        return f'"{self.pattern}": {{"tp": {text}}}'

    def allows(self, state: State, dims: int) -> bool:
        """Whether a parameter of so many dims may have `state`."""
        if isinstance(self.placement, Replicate):
            return isinstance(state.value, Replicate)
        have, want = state.value, self.placement
        dim = want.dim + dims if want.dim < 0 else want.dim
        if not isinstance(have, Shard) or have.dim != dim:
            return False
        split = want.segments == 1 or have.segments == want.segments
        return split and want.unit in (0, have.unit)


def parse_pins(pins: Any, mesh: Mesh) -> tuple[Pin, ...]:
    """Read the option `pins`; `PlanError` with every entry that cannot be used."""
    if pins is None:
        return ()
    if not isinstance(pins, Mapping):
        raise PlanError(f"pins is a {type(pins).__name__}; {_FORM}")
    found: list[Pin] = []
    faults: list[str] = []
    for pattern, axes in pins.items():
        if not isinstance(pattern, str) or not isinstance(axes, Mapping):
            raise PlanError(f"pins has the entry {pattern!r}: {axes!r}; {_FORM}")
        for axis, placement in axes.items():
            fault = _axis_fault(axis, mesh)
            try:
                wanted = from_torch(placement)
            except TypeError:
                fault = fault or f"{placement!r} is no placement; use msc.Shard or msc.Replicate"
            else:
                fault = fault or _placement_fault(wanted)
                if not fault and not isinstance(wanted, Partial):
                    found.append(Pin(pattern, wanted))
            if fault:
                faults.append(f'pin "{pattern}": {fault}')
    if faults:
        raise _refusal(faults)
    return tuple(found)


def _refusal(faults: Iterable[str]) -> PlanError:
    listed = list(faults)
    if len(listed) > _LISTED:
        listed[_LISTED:] = [f"and {len(listed) - _LISTED} more"]
    return PlanError("Pins cannot be kept:\n  " + "\n  ".join(listed))


_FORM = (
    'pins maps patterns of parameter names to placements: {"*.q_proj.weight": {"tp": Shard(0)}}.'
)


def _axis_fault(axis: Any, mesh: Mesh) -> str:
    if axis in _FORCED:
        return f"axis '{axis}' places no parameters by choice: {_FORCED[axis]}; only 'tp' does"
    if axis not in dict(mesh.axes):
        return f"the mesh {mesh} has no axis {axis!r}"
    return ""


def _placement_fault(wanted: Placement) -> str:
    if isinstance(wanted, Partial):
        return "a parameter is no partial sum; use msc.Shard or msc.Replicate"
    return ""


Pinned = Mapping[str, tuple[Pin, ...]]
"""Pins by the parameters that they match."""


def match_pins(pins: Sequence[Pin], names: Mapping[str, Iterable[str]]) -> Pinned:
    """The pins of each parameter; `names` are all the names of each, tied aliases too.

    `PlanError` with every pattern that matches nothing.
    """
    found: dict[str, tuple[Pin, ...]] = {}
    faults: list[str] = []
    for pin in pins:
        matched = [n for n, all_ in names.items() if any(fnmatchcase(a, pin.pattern) for a in all_)]
        for name in matched:
            found[name] = (*found.get(name, ()), pin)
        if not matched:
            faults.append(f'pin "{pin.pattern}" matches no parameter{_nearest(pin.pattern, names)}')
    if faults:
        raise _refusal(faults)
    return found


def _nearest(pattern: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(pattern, list(names), 3, 0.5)
    return f"; there are {', '.join(close)}" if close else ""


def pinned_states(placing: Placing, pinned: Pinned) -> dict[fx.Node, frozenset[State]]:
    """The states that pins leave to each placeholder; `PlanError` with every one that has none.

    Placeholders of equal layers are one: a pin on any of the layers counts for all of them.
    """
    by_node: dict[fx.Node, dict[Pin, str]] = {}
    for name, nodes in placing.parameters().items():
        for node in nodes:
            for pin in pinned.get(name, ()):
                by_node.setdefault(node, {}).setdefault(pin, name)
    allowed: dict[fx.Node, frozenset[State]] = {}
    faults: dict[str, None] = {}
    for node, pins in by_node.items():
        dims = node.meta["val"].dim()
        states = placing.candidates.states(node)
        for pin, name in pins.items():
            if not any(pin.allows(state, dims) for state in states):
                faults[_impossible(pin, name, node, states, placing)] = None
        left = [s for s in states if all(pin.allows(s, dims) for pin in pins)]
        if not left and not faults:
            faults[_contradiction(pins)] = None
        allowed[node] = frozenset(left)
    if faults:
        raise _refusal(faults)
    return allowed


def _impossible(pin: Pin, name: str, node: fx.Node, states: list[State], placing: Placing) -> str:
    possible = dict.fromkeys(placement_text(state.value) for state in states)
    axis = placing.axis
    return (
        f"pin {pin}: {name} {tuple(node.meta['val'].shape)} cannot be "
        f"{placement_text(pin.placement)} on {axis.name}={axis.size}; it can be "
        f"{', '.join(possible)}"
    )


def _contradiction(pins: Mapping[Pin, str]) -> str:
    listed = " and ".join(f"{pin} for {name}" for pin, name in pins.items())
    names = list(dict.fromkeys(pins.values()))
    why = (
        ""
        if len(names) == 1
        else f": equal layers share one placement, so {' and '.join(names)} do"
    )
    return f"pins {listed} contradict each other{why}"


def solve_pinned(placing: Placing, pinned: Pinned) -> Placed:
    """The cheapest placement that keeps the pins; `PlanError` names those that leave none."""
    kept = placing.restricted(pinned_states(placing, pinned))
    try:
        return kept.solve()
    except PlanError as error:
        placing.solve()  # where nothing is found without pins either, that is what to say
        pins = list(dict.fromkeys(pin for each in pinned.values() for pin in each))
        guilty = [pin for pin in pins if _solves_without(placing, pinned, pin)] or pins
        listed = "\n  ".join(f"pin {pin}" for pin in guilty)
        raise PlanError(
            f"No placement over '{placing.axis.name}' keeps the pins:\n  {listed}\nWhat reads "
            "these parameters cannot work on them as the pins ask, or they take too much memory. "
            "Leave one of the pins out."
        ) from error


def pin_notes(placing: Placing, pinned: Pinned) -> list[str]:
    """What pins do beyond the parameters that they name, and where they do nothing."""
    read = placing.parameters()
    names_of: dict[fx.Node, list[str]] = {}
    for name, nodes in read.items():
        for node in nodes:
            names_of.setdefault(node, []).append(name)
    notes: dict[str, None] = {}
    for name, pins in pinned.items():
        for pin in pins:
            if name not in read:
                notes[f"pin {pin} says nothing of {name}: the loss does not depend on it"] = None
            others = [
                other
                for node in read.get(name, ())
                for other in names_of[node]
                if pin not in pinned.get(other, ())
            ]
            if others:
                listed = ", ".join(dict.fromkeys(others))
                notes[f"pin {pin} holds for {listed} too: equal layers share one placement"] = None
    return list(notes)


def _solves_without(free: Placing, pinned: Pinned, left_out: Pin) -> bool:
    rest = {n: tuple(p for p in pins if p != left_out) for n, pins in pinned.items()}
    try:
        free.restricted(pinned_states(free, rest)).solve()
    except PlanError:
        return False
    return True


def placement_text(placement: Placement) -> str:
    """A placement as the user writes it."""
    if isinstance(placement, Shard):
        return _shard_text(placement)
    return f"{type(placement).__name__}()"


def _shard_text(shard: Shard) -> str:
    segments = f", {shard.segments}" if shard.segments != 1 or shard.unit else ""
    return f"Shard({shard.dim}{segments}" + (f", unit={shard.unit})" if shard.unit else ")")
