"""What it takes to keep a value of a block's forward for the backward."""

from __future__ import annotations

from torch import fx

from msc.cost.flops import nbytes
from msc.ir.values import tensors_of


def kept_bytes(node: fx.Node) -> int:
    """Bytes that keeping a value takes: of activations, made here or received; else nothing.

    Parameters, inputs and what the prelude computed are there anyway.
    """
    if node.op == "placeholder" and node.meta.get("kind") != "value":
        return 0
    return sum(map(nbytes, tensors_of(node)))
