"""What a node of a graph does on the compute stream."""

from __future__ import annotations

import operator
from enum import Enum
from typing import Any

from torch import fx

from msc.cost.node_work import node_work
from msc.cost.roofline import NOTHING, Work, streamed_work
from msc.ir import actions
from msc.ir.errors import VerifyError
from msc.ir.values import operand_nodes, tensors_of


class Kind(Enum):
    FREE = "runs no kernel"
    STREAMED = "reads its operands from memory and writes its results"


COSTS: dict[Any, Kind] = {
    actions.coordinate: Kind.FREE,
    actions.arrived: Kind.FREE,
    actions.micro_batch_index: Kind.FREE,
    actions.micro_batch: Kind.FREE,
    actions.unflatten: Kind.FREE,
    actions.accumulate: Kind.STREAMED,
    actions.flatten: Kind.STREAMED,
    actions.flatten_shards: Kind.STREAMED,
    actions.unflatten_shards: Kind.STREAMED,
    actions.squared_norm: Kind.STREAMED,
    actions.learning_rate: Kind.FREE,
    actions.lamb_sums: Kind.STREAMED,
    **dict.fromkeys(actions.UPDATES, Kind.STREAMED),
}
"""What the actions cost that stay on one rank; an optimizer is one kernel over all parameters."""


def work_of(node: fx.Node) -> Work:
    """The work of a node that neither communicates nor calls a graph.

    Raises `VerifyError` for an action that the simulator does not know.
    """
    if node.op != "call_function" or node.target is operator.getitem:
        return NOTHING
    if node.target not in actions.ACTIONS:
        return node_work(node)
    kind = COSTS.get(node.target)
    if kind is None:
        name = getattr(node.target, "__name__", str(node.target))
        raise VerifyError(
            f"%{node.name} is an action '{name}' that the simulator has no cost for. Add it to the "
            "table in runtime/simulate/durations.py."
        )
    if kind is Kind.FREE or _starts_a_sum(node):
        return NOTHING
    operands = [tensor for operand in operand_nodes(node) for tensor in tensors_of(operand)]
    return streamed_work(operands, tensors_of(node))


def _starts_a_sum(node: fx.Node) -> bool:
    """Whether an accumulation is its first parts themselves, in their own dtype."""
    return node.target is actions.accumulate and node.args[0] is None and len(node.args) < 3
