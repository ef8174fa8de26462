"""The work of a computing node of a graph."""

from __future__ import annotations

from torch import fx

from msc.cost.epilogue import EPILOGUES, epilogue_work
from msc.cost.flops import window_of
from msc.cost.roofline import Work, op_work
from msc.ir.values import operand_nodes, tensors_of


def node_work(node: fx.Node) -> Work:
    """What a call of an op does, by the values in the graph; of no action and no communication."""
    if node.target in EPILOGUES:
        return epilogue_work(node)
    operands = [tensors[0] for o in operand_nodes(node) if (tensors := tensors_of(o))]
    return op_work(node.target, operands, tensors_of(node), window_of(node))
