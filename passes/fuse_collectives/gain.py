"""What it is worth to fuse a collective with its GEMMs: the time of its block, on a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import fx

from msc.cost.fused import fused_call
from msc.cost.measurements import FusedSeconds
from msc.cost.topology import group_spans
from msc.ir.groups import Group
from msc.passes.block_time import block_time
from msc.passes.call_cost import call_cost
from msc.passes.compilation import Settings
from msc.passes.fuse_collectives.places import Gather, Place, Reduce, places
from msc.passes.fuse_collectives.rewrite import fuse
from msc.passes.overlap import overlapped

LEAST_GAIN = 0.03
"""Of what the GEMMs and the collective take one after the other; a model is no more exact."""
_NO_CLUSTER = (
    "without a cluster file nothing is known of what would be hidden (fuse_collectives=True fuses "
    "it anyway)"
)


@dataclass(frozen=True)
class _Trial:
    """A form that a place can be fused in, and costs in seconds.

    alone: of the op; pair: of the collective and the same GEMMs one after the other; gain: by how
    much the block gets shorter.
    """

    form: int
    alone: float
    pair: float
    gain: float

    @property
    def pays(self) -> bool:
        return self.gain >= LEAST_GAIN * self.pair


def best_form(gm: fx.GraphModule, place: Place, settings: Settings) -> tuple[Place | None, str]:
    """The form in which a place is best fused, and what it saves; or None, and why it is not.

    A gather's weight gradients are in the op, or stay outside to hide another collective. What
    `msc tune` has measured goes before what is modelled, and before the floors of other systems;
    without a cluster it decides alone.
    """
    measured = _measured(gm, place, settings)
    if settings.cost.cluster is None:
        if not measured or settings.measured is None:
            return None, _NO_CLUSTER
        return _by_measurement(place, measured, settings.measured.device)
    if not measured and (against := _against(gm, place, settings)):
        return None, against
    before = _time(gm, settings)
    found = [_try(gm, place, form, before, settings) for form in range(len(_forms(place)))]
    best = max(found, key=lambda trial: (trial.pays, trial.gain))
    if best.pays:
        return _forms(place)[best.form], f", {_us(best.gain)} of {_us(best.pair)} saved"
    return None, _why_not(best)


def _measured(gm: fx.GraphModule, place: Place, settings: Settings) -> dict[int, FusedSeconds]:
    """What was measured of a place, by form."""
    if settings.measured is None:
        return {}
    nodes = (fuse(_forms(_same(_copy(gm), place))[form]) for form in range(len(_forms(place))))
    found = enumerate(map(settings.measured.fused, nodes))
    return {form: seconds for form, seconds in found if seconds is not None}


def _by_measurement(
    place: Place, found: dict[int, FusedSeconds], device: str
) -> tuple[Place | None, str]:
    form = max(found, key=lambda each: found[each].apart - found[each].fused)
    gain, pair = found[form].apart - found[form].fused, found[form].apart
    if gain >= LEAST_GAIN * pair:
        return _forms(place)[form], f", {_us(gain)} of {_us(pair)} saved as measured on {device}"
    fused = _us(found[form].fused)
    return None, f"measured on {device}, it takes {fused}; one after the other takes {_us(pair)}"


def _why_not(trial: _Trial) -> str:
    alone, pair, gain = _us(trial.alone), _us(trial.pair), _us(abs(trial.gain))
    if trial.gain > 0:
        return f"it would save {gain} of {pair}, less than the {LEAST_GAIN:.0%} that it must"
    if trial.alone >= trial.pair:
        return (
            f"in parts it would take {alone}, one after the other it takes {pair}: too little to "
            "multiply for what there is to hide"
        )
    return (
        f"fused it would take {alone} instead of {pair}, but other work hides the transfer as "
        f"well: the block would take {gain} more"
    )


def _forms(place: Place) -> Sequence[Place]:
    if isinstance(place, Gather) and place.products and place.over_rows:
        return [place, replace(place, over_rows=(), keep=True)]
    return [place]


def _against(gm: fx.GraphModule, place: Place, settings: Settings) -> str:
    """What speaks against fusing a place before anything is modelled, or ""."""
    cluster = settings.cost.cluster
    assert cluster is not None
    stages = range(settings.mesh.axis_size("pp"))
    group = Group.parse(place.group)
    spans = group_spans(settings.mesh, group, stages, cluster.devices_per_node)
    call = fused_call(fuse(_same(_copy(gm), place)))
    return call.against(cluster, max(span.nodes for span in spans))


def _same(gm: fx.GraphModule, place: Place) -> Place:
    """A place in a copy of its graph."""
    (found,) = (each for each in places(gm) if each.start.name == place.start.name)
    return found


def _try(gm: fx.GraphModule, place: Place, form: int, before: float, settings: Settings) -> _Trial:
    trial = _copy(gm)
    chosen = _forms(_same(trial, place))[form]
    pair = _pair_cost(chosen, settings)
    alone = call_cost(fuse(chosen), settings)
    return _Trial(form, alone, pair, before - _time(trial, settings))


def _pair_cost(place: Place, settings: Settings) -> float:
    """The cost of a collective, its layout and its GEMMs, one after the other."""
    nodes = {place.start, *place.chain}
    if isinstance(place, Gather):
        nodes |= set(place.readers)
    elif isinstance(place, Reduce):
        nodes |= set(place.before)
    return sum(call_cost(node, settings) for node in nodes)


def _time(gm: fx.GraphModule, settings: Settings) -> float:
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    return block_time(overlapped(calls, settings), settings)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:.1f} us"


def _copy(gm: fx.GraphModule) -> fx.GraphModule:
    new = fx.GraphModule({}, fx.Graph())
    new.graph.output(new.graph.graph_copy(gm.graph, {}))
    for old, fresh in zip(gm.graph.nodes, new.graph.nodes, strict=True):
        fresh.meta, fresh.name = dict(old.meta), old.name
    return new
