"""Drop what only checks: assertions on sizes, dtypes and numbers.

    %_assert_tensor_metadata = aten._assert_tensor_metadata(%x, None, None, f32)    ->   (nothing)

Sizes and dtypes were checked when the graph was captured, and batches are checked against it. An
assertion on the numbers of a tensor is not kept; there is no line of the user's to stop at.

Numerics: kept bit for bit.
"""

from __future__ import annotations

import torch
from torch import fx

_ASSERTIONS = {
    torch.ops.aten._assert_async.default,
    torch.ops.aten._assert_async.msg,
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten._assert_tensor_metadata.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
}


def drop_asserts(gm: fx.GraphModule) -> int:
    """Remove every assertion; returns their number."""
    found = [n for n in gm.graph.nodes if n.op == "call_function" and n.target in _ASSERTIONS]
    for node in found:
        gm.graph.erase_node(node)
    return len(found)
