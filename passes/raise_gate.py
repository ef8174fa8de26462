"""Raise an activation that gates another value to `msc.gated`.

    %s = aten.silu(%gate)
    %y = aten.mul(%s, %up)      ->    %y = msc.gated(%gate, %up, 'silu')

So the backward reads the two operands, in place of the activation's result as well, and kernels
do it in one pass, or in that of the products before it (`fuse-epilogue`). Left alone is an
activation that something else reads, and a product that broadcasts.
Numerics: kept bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from msc.ir.ops.activations import activation_of
from msc.ir.ops.gate import GATED
from msc.ir.passes import BIT_EXACT, GraphPass
from msc.ir.values import tensor_of
from msc.ir.walks import num_reads
from msc.passes.normalize.rewrite import Emitter, replace, shape_of

_MUL = torch.ops.aten.mul.Tensor


@dataclass(frozen=True)
class RaiseGate(GraphPass):
    """Raise every product of an activation and a value of its shape."""

    name: ClassVar[str] = "raise-gate"
    numerics: ClassVar[str] = BIT_EXACT

    def run(self, gm: fx.GraphModule, unit: Any) -> int:
        changes = 0
        for node in list(gm.graph.nodes):
            if node.op != "call_function" or node.target is not _MUL:
                continue
            for active, up in (node.args, node.args[::-1]):
                if _gates(active, up, node):
                    emit = Emitter(gm, node)
                    name = activation_of(active)
                    replace(node, emit(GATED, active.args[0], up, name, shape=shape_of(node)))
                    gm.graph.erase_node(active)
                    changes += 1
                    break
        return changes


def _gates(active: Any, up: Any, node: fx.Node) -> bool:
    if not activation_of(active) or not isinstance(up, fx.Node) or num_reads(active) != 1:
        return False
    one, two, result = tensor_of(active.args[0]), tensor_of(up), tensor_of(node)
    alike = one.shape == two.shape and one.dtype == two.dtype == result.dtype
    return alike and up is not active
