"""The end of a rank's step: the global norm of the gradients, and AdamW.

    %n = squared_norm(gradients, copies)
    %r = all_reduce(%n, 'sum', 'pp,tp')            one number, after all gradients are reduced
    %norm = sqrt(%r)
    %scale = clamp(max_norm / (%norm + 1e-6), max=1)
    %p = adamw(.., %scale)

Numerics: equal to `torch.nn.utils.clip_grad_norm_` and `torch.optim.AdamW`; the norm is in float64.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from msc.ir import actions
from msc.ir.optimizer import AdamW
from msc.ir.placement import Shard
from msc.passes.compilation import Compilation

c10d = torch.ops._c10d_functional
aten = torch.ops.aten

_TINY = 1e-6  # what clip_grad_norm_ adds to the norm before it divides by it

Act = Callable[..., fx.Node]
"""`act(function, *args, val=...)` appends a call to the graph."""


def num_copies(unit: Compilation, name: str) -> int:
    """On how many ranks that differ in pp and tp the gradient of a parameter stands."""
    stages = len(unit.stages_of[name])
    state = unit.parameter_states[name].get("tp")
    sharded = state is not None and isinstance(state.value, Shard)
    return stages if sharded else stages * unit.settings.mesh.axis_size("tp")


def clip(
    act: Act,
    gradients: Sequence[fx.Node],
    copies: Sequence[int],
    max_norm: float,
    unit: Compilation,
) -> tuple[fx.Node, fx.Node]:
    """Nodes of the global norm and of what scales the gradients to `max_norm`; 0-dim float64.

    The gradients are already those of the whole batch, so that dp ranks agree; `copies` says on how
    many ranks of the axes pp and tp the same one stands. Every rank must have these nodes.
    """
    with unit.fake_mode:
        val = torch.empty((), dtype=torch.float64)
    if gradients:
        total = act(actions.squared_norm, list(gradients), list(copies), val=val)
    else:  # a stage that trains nothing still takes part in the sum
        total = act(aten.full.default, [], 0.0, val=val)
        total.kwargs = {"dtype": torch.float64}
    axes = [axis for axis in ("pp", "tp") if unit.settings.mesh.axis_size(axis) > 1]
    if axes:
        start = act(c10d.all_reduce.default, total, "sum", ",".join(axes), val=val)
        total = act(c10d.wait_tensor.default, start, val=val)
    norm = act(aten.sqrt.default, total, val=val)
    divisor = act(aten.add.Tensor, norm, _TINY, val=val)
    quotient = act(
        aten.mul.Tensor, act(aten.reciprocal.default, divisor, val=val), max_norm, val=val
    )
    return norm, act(aten.clamp.default, quotient, None, 1.0, val=val)


def adamw_step(
    act: Act,
    spec: AdamW,
    parameters: list[fx.Node],
    gradients: list[fx.Node],
    moments: Sequence[list[fx.Node]],
    step: fx.Node,
    scale: fx.Node | None,
) -> dict[str, Any]:
    """The outputs `parameters`, `first_moments` and `second_moments` after one step."""
    vals = tuple(node.meta["val"] for node in parameters)
    decays = [spec.weight_decay] * len(parameters)
    hyper = (spec.lr, spec.betas, spec.eps, decays)
    scaled = () if scale is None else (scale,)
    call = act(
        actions.adamw,
        parameters,
        gradients,
        *moments,
        step,
        *hyper,
        *scaled,
        val=(vals, vals, vals),
    )
    results = {}
    for index, key in enumerate(("parameters", "first_moments", "second_moments")):
        results[key] = act(operator.getitem, call, index, val=vals)
    return results
