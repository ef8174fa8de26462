"""`msc.linear` and its gradients as products of matrices."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, is_dense, one_dtype, rows
from msc.codegen.kernels import gemm
from msc.codegen.kernels.description import Kernel, Target, Tiles
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gemm import Gemm
from msc.codegen.kernels.tiles import product_tiles
from msc.ir.errors import PlanError


def linear(
    target: Target,
    x: Tensor,
    w: Tensor,
    b: Tensor | None = None,
    transposed: bool = False,
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """`x @ w.T + b`, the bias in the epilogue."""
    dtype = one_dtype("linear", x, w, b)
    k = x.shape[-1]
    n = w.numel() // max(1, k)
    layout = "kn" if transposed else "nk"
    size = (x.numel() // max(1, k), n, k)
    kernel = product(target, dtype, size, "mk", layout, tiles, bias=b is not None)

    def run(
        x: Tensor, w: Tensor, b: Tensor | None = None, transposed: bool = False
    ) -> tuple[Launches, Tensor]:
        y = x.new_empty((*x.shape[:-1], n))
        values = {"a": rows(x), "b": dense(w), "c": y.view(-1, n)}
        if b is not None:
            values["bias"] = dense(b)
        return [(kernel, values)], y

    return Plan((kernel,), run)


def linear_dgrad(
    target: Target,
    gy: Tensor,
    w: Tensor,
    transposed: bool = False,
    sum_with: Tensor | None = None,
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """`gy @ w`, plus what it is summed with in the epilogue, which the result may overwrite."""
    dtype = one_dtype("linear_dgrad", gy, w, sum_with)
    n = gy.shape[-1]
    k = w.numel() // max(1, n)
    layout = "nk" if transposed else "kn"
    size = (gy.numel() // max(1, n), k, n)
    kernel = product(target, dtype, size, "mk", layout, tiles, residual=sum_with is not None)

    def run(
        gy: Tensor, w: Tensor, transposed: bool = False, sum_with: Tensor | None = None
    ) -> tuple[Launches, Tensor]:
        gx = gy.new_empty((*gy.shape[:-1], k))
        values = {"a": rows(gy), "b": dense(w), "c": gx.view(-1, k)}
        if sum_with is not None:
            values["residual"] = rows(sum_with)
        return [(kernel, values)], gx

    def over(
        total: Tensor, gy: Tensor, w: Tensor, transposed: bool = False
    ) -> tuple[Launches, Tensor]:
        if not is_dense(total):
            return run(gy, w, transposed, total)
        # a program reads a tile of the sum before it writes it, and no other program does
        flat = total.view(-1, k)
        return [(kernel, {"a": rows(gy), "b": dense(w), "c": flat, "residual": flat})], total

    return Plan((kernel,), run, over if sum_with is not None else None)


def linear_wgrad(
    target: Target, gy: Tensor, x: Tensor, transposed: bool = False, *, tiles: Tiles | None = None
) -> Plan:
    """`gy.T @ x`, or transposed `x.T @ gy`, over all rows."""
    dtype = one_dtype("linear_wgrad", gy, x)
    n, k = gy.shape[-1], x.shape[-1]
    m, other = (k, n) if transposed else (n, k)
    kernel = product(target, dtype, (m, other, gy.numel() // max(1, n)), "km", "kn", tiles)

    def run(gy: Tensor, x: Tensor, transposed: bool = False) -> tuple[Launches, Tensor]:
        gw = gy.new_empty((m, other))
        left, right = (x, gy) if transposed else (gy, x)
        return [(kernel, {"a": rows(left), "b": rows(right), "c": gw})], gw

    return Plan((kernel,), run)


def product(
    target: Target,
    dtype: str,
    size: tuple[int, int, int],
    a_layout: str,
    b_layout: str,
    tiles: Tiles | None = None,
    **epilogue: Any,
) -> Kernel:
    """The kernel of a product [m, n] over k; epilogue: the fields of an `Epilogue`."""
    m, n, k = size
    if not m * n * k:
        raise PlanError(f"linear: a product of {m} by {n} over {k} is empty")
    own = Epilogue(**epilogue)
    cut = tiles or product_tiles(target, size, dtype, own)
    return gemm.emit(Gemm(m, n, k, dtype, target, cut, a_layout, b_layout, own))
