"""`msc.attention` and its gradient.

The contract is the op's own: out `[b, h, s, e]` and the natural logsumexp of each row `[b, h, s]`
(float32), both views of `[b, s, h, ..]` in memory. So a backward in kernels may follow a forward of
ATen's and the other way. delta, which only the kernels of the backward read, is theirs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, one_dtype
from msc.codegen.kernels import attention_backward as backward_kernels
from msc.codegen.kernels import attention_forward as forward_kernels
from msc.codegen.kernels.attention import Attention, operands
from msc.codegen.kernels.description import Target
from msc.codegen.kernels.tiles import attention_tiles
from msc.ir.errors import PlanError

WIDEST = 128
"""Elements of a head for which tiles are known to pass the gate of `make kernels`."""


def attention(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Plan:
    """out and lse."""
    own = _attention(target, q, k, v, mask, scale, causal, window, soft_cap)
    kernel = forward_kernels.emit(own, attention_tiles(own).forward)

    def run(
        q: Tensor, k: Tensor, v: Tensor, *rest: Any, **named: Any
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        out, lse = _rows_like(q), _numbers(q)
        values = {"q": _rows(q), "k": _rows(k), "v": _rows(v), "out": out, "lse": lse}
        return [(kernel, operands(kernel, values))], (out.transpose(1, 2), lse.transpose(1, 2))

    return Plan((kernel,), run)


def attention_backward(
    target: Target,
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Plan:
    """dq, dk and dv."""
    own = _attention(target, q, k, v, mask, scale, causal, window, soft_cap)
    tiles = attention_tiles(own)
    kernels = (
        backward_kernels.emit_delta(own, tiles.delta),
        backward_kernels.emit_keys(own, tiles.keys),
        backward_kernels.emit_queries(own, tiles.queries),
    )

    def run(
        gy: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *rest: Any,
        **named: Any,
    ) -> tuple[Launches, tuple[Tensor, Tensor, Tensor]]:
        dq, dk, dv = _rows_like(q), _rows_like(k), _rows_like(v)
        values = {"q": _rows(q), "k": _rows(k), "v": _rows(v), "gy": _rows(gy), "out": _rows(out)}
        values |= {"lse": _rows(lse), "delta": _numbers(q), "dq": dq, "dk": dk, "dv": dv}
        launches = [(kernel, operands(kernel, values)) for kernel in kernels]
        return launches, (dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2))

    return Plan(kernels, run)


def _attention(
    target: Target,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    causal: bool,
    window: int,
    soft_cap: float,
) -> Attention:
    b, h, s, d = q.shape
    if mask is not None:
        raise PlanError(
            "attention: kernels know causal masks and windows, and this mask is a tensor"
        )
    if k.shape[2] != s:
        raise PlanError(
            f"attention: kernels take as many keys as queries, not {k.shape[2]} and {s}"
        )
    if v.shape[3] != d:
        raise PlanError(f"attention: the heads of v have {v.shape[3]} elements, those of q {d}")
    if not q.numel():
        raise PlanError("attention: there are no queries")
    dtype = one_dtype("attention", q, k, v)
    if not target.interpreted and dtype == "float32":
        raise PlanError("attention: in float32, without tensor cores, kernels spill on a device")
    if not target.interpreted and d > WIDEST:
        raise PlanError(
            f"attention: heads of {d} elements spill or take too much shared memory; kernels are "
            f"compiled for heads of up to {WIDEST}"
        )
    window = window if window < s else 0  # a window that hides nothing is none
    return Attention(b, s, h, k.shape[1], d, dtype, target, scale, causal, window, float(soft_cap))


def _rows(x: Tensor) -> Tensor:
    """`[b, h, s, ..]` as it lies in memory, `[b, s, h, ..]`."""
    return dense(x.transpose(1, 2))


def _rows_like(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x.new_empty((b, s, h, d))


def _numbers(x: Tensor) -> Tensor:
    b, h, s, _ = x.shape
    return x.new_empty((b, s, h), dtype=torch.float32)
