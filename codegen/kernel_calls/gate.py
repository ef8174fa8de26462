"""`msc.gated`, its gradient, and the products before it: `msc.linear_gated`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, is_dense, one_dtype, rows
from msc.codegen.kernel_calls.linear import product
from msc.codegen.kernels import gate as kernels
from msc.codegen.kernels.description import Target, Tiles
from msc.codegen.kernels.epilogue import GATED
from msc.codegen.kernels.gate import LANE, Gate
from msc.ir.errors import PlanError
from msc.ir.ops.linear import linear

_NAMES = {activation: name for name, activation in GATED.items()}


def gated(target: Target, gate: Tensor, up: Tensor, activation: str) -> Plan:
    """`activation(gate) * up` in one pass."""
    kernel = kernels.emit_forward(_gate(target, gate, up, activation))

    def run(gate: Tensor, up: Tensor, activation: str) -> tuple[Launches, Tensor]:
        y = gate.new_empty(gate.shape)
        return [(kernel, _rows(gate=gate, up=up) | {"y": y})], y

    return Plan((kernel,), run)


def gated_backward(target: Target, gy: Tensor, gate: Tensor, up: Tensor, activation: str) -> Plan:
    """Both gradients in one pass."""
    one_dtype("gate", gy, gate)
    kernel = kernels.emit_backward(_gate(target, gate, up, activation))

    def run(
        gy: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        d_gate, d_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
        values = _rows(gate=gate, up=up) | {"gy": dense(gy), "d_gate": d_gate, "d_up": d_up}
        return [(kernel, values)], (d_gate, d_up)

    def over(
        gy: Tensor, gate: Tensor, up: Tensor, activation: str
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        if not is_dense(gy):
            return run(gy, gate, up, activation)
        # an element of gy is read before the gradient of its gate is written there
        d_up = up.new_empty(up.shape)
        values = _rows(gate=gate, up=up) | {"gy": gy, "d_gate": gy, "d_up": d_up}
        return [(kernel, values)], (gy, d_up)

    return Plan((kernel,), run, over)


def linear_gated(
    target: Target,
    x: Tensor,
    w: Tensor,
    up: Tensor | None,
    activation: str,
    keep: bool,
    transposed: bool = False,
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """Both products, and the gate before their tiles leave the processor."""
    dtype = one_dtype("linear_gated", x, w, up)
    m, n, k = _size(x, w, up)
    kernel = product(
        target,
        dtype,
        (m, n, k),
        "mk",
        "kn" if transposed else "nk",
        activation=_NAMES[activation],
        keep=keep,
        apart=up is not None,
        tiles=tiles,
    )

    def run(
        x: Tensor,
        w: Tensor,
        up: Tensor | None,
        activation: str,
        keep: bool,
        transposed: bool = False,
    ) -> tuple[Launches, list[Tensor]]:
        widths = [n, 2 * n] if up is None else [n, n, n]
        results = [x.new_empty((*x.shape[:-1], width)) for width in widths[: None if keep else 1]]
        values = {"a": rows(x), "b": dense(w), "c": results[0].view(-1, n)}
        if up is not None:
            values["b_up"] = dense(up)
        values |= dict(zip(("kept", "kept_up"), results[1:], strict=False))
        return [(kernel, values)], results

    return Plan((kernel,), run)


def linear_then_gate(
    target: Target,
    x: Tensor,
    w: Tensor,
    up: Tensor | None,
    activation: str,
    keep: bool,
    transposed: bool = False,
) -> Plan:
    """The products by the library, and the gate in one pass behind them."""
    dtype = one_dtype("linear_gated", x, w, up)
    m, n, _ = _size(x, w, up)
    kernel = kernels.emit_forward(Gate(m, n, activation, dtype, target))

    def run(
        x: Tensor,
        w: Tensor,
        up: Tensor | None,
        activation: str,
        keep: bool,
        transposed: bool = False,
    ) -> tuple[Launches, list[Tensor]]:
        first = linear(x, w, None, transposed)
        second = None if up is None else linear(x, up, None, transposed)
        halves = first.chunk(2, -1) if second is None else (first, second)
        y = x.new_empty((*x.shape[:-1], n))
        kept = [first] if second is None else [first, second]
        values = _rows(gate=halves[0], up=halves[1]) | {"y": y}
        return [(kernel, values)], [y, *kept] if keep else [y]

    return Plan((kernel,), run)


def _size(x: Tensor, w: Tensor, up: Tensor | None) -> tuple[int, int, int]:
    """Of one of the two products: [m, n] over k."""
    k = x.shape[-1]
    n = w.numel() // max(1, k)
    size = (x.numel() // max(1, k), n // 2 if up is None else n, k)
    if 0 in size:
        raise PlanError(f"linear_gated: a product of {size[0]} by {size[1]} over {k} is empty")
    return size


def _gate(target: Target, gate: Tensor, up: Tensor, activation: str) -> Gate:
    dtype = one_dtype("gate", gate, up)
    if not gate.dim() or not gate.numel():
        raise PlanError("gate: the kernel takes rows, and there are none")
    width = gate.shape[-1]
    return Gate(gate.numel() // width, width, activation, dtype, target)


def _rows(**operands: Tensor) -> dict[str, Any]:
    """Operands with the distance of their rows; copies of those whose rows are not alike."""
    values: dict[str, Any] = {}
    for name, operand in operands.items():
        flat = _apart(operand)
        length = (flat.shape[0] - 1) * flat.stride(0) + flat.shape[1]
        values[name] = flat.as_strided((length,), (1,))
        values[f"{name}_row"] = flat.stride(0)
    return values


def _apart(operand: Tensor) -> Tensor:
    """`[..., n]` as [rows, n], whose rows may lie apart, each at a multiple of 16 bytes."""
    width = operand.shape[-1]
    flat = operand.reshape(-1, width)
    aligned = flat.stride(0) % LANE == 0 or width % LANE
    if flat.stride(1) == 1 and flat.storage_offset() % LANE == 0 and aligned:
        return flat
    return dense(flat.clone(memory_format=torch.contiguous_format))
