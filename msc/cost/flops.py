"""FLOPs and bytes of one call, from the shapes in the graph.

A multiply-add counts as two FLOPs; attention counts its full square (no causal halving), as in
Narayanan et al., SC 2021, and with a window all keys of it for every query.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.ops.attention import ATTENTION, ATTENTION_BACKWARD
from msc.ir.ops.library import arguments

_MATMULS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.matmul.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.baddbmm.default,
    torch.ops.aten.linear.default,
}


def call_flops(
    target: Any,
    operands: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    window: int = 0,
) -> int:
    """Forward FLOPs of a call on these operands; one per element for what is no GEMM.

    window: that of an attention (`window_of`).
    """
    name = str(target)
    if not results:
        return 0
    if name.startswith("msc.linear_nll_terms"):
        x, w = operands[:2]
        # the gradient makes the logits again; of its results that of a bias alone has one dim
        products = 1 + ("backward" in name) * sum(result.dim() > 1 for result in results)
        return products * 2 * (x.numel() // x.shape[-1]) * w.numel()
    if name.startswith("msc.linear_wgrad"):
        return 2 * operands[0].numel() * operands[1].shape[-1]
    if name.startswith("msc.linear_dgrad"):
        return 2 * operands[0].numel() * results[0].shape[-1]
    if name.startswith("msc.linear_gated."):
        return 4 * results[0].numel() * operands[0].shape[-1]
    if name.startswith(("msc.linear.", "msc.linear_epilogue.")) or target in _MATMULS:
        left = operands[1] if "addmm" in name else operands[0]
        return 2 * results[0].numel() * left.shape[-1]
    if name.startswith("msc.attention"):
        query, key = operands[1:3] if "backward" in name else operands[0:2]
        seen = min(window, key.shape[-2]) if window else key.shape[-2]
        scores = math.prod(query.shape[:-1]) * seen
        return (10 if "backward" in name else 4) * scores * query.shape[-1]
    if name.startswith("aten.scaled_dot_product"):
        query, key = operands[0], operands[1]
        return 4 * math.prod(query.shape[:-1]) * key.shape[-2] * query.shape[-1]
    return sum(result.numel() for result in results)


def window_of(node: fx.Node) -> int:
    """The window of a call of `msc.attention` or of its gradient; 0 for none and for other ops."""
    if node.target not in (ATTENTION, ATTENTION_BACKWARD):
        return 0
    window: int = arguments(node.target, node.args, node.kwargs)["window"]
    return window


def is_gemm(target: Any) -> bool:
    """Whether a call's FLOPs run on the matrix units."""
    name = str(target)
    return target in _MATMULS or name.startswith(("msc.linear", "msc.attention", "aten.scaled_dot"))


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()
