"""`msc.linear_epilogue`: what follows a product, done before its tiles leave the processor."""

from __future__ import annotations

from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, one_dtype, rows
from msc.codegen.kernel_calls.linear import product
from msc.codegen.kernels.description import Target, Tiles


def linear_epilogue(
    target: Target,
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    residual: Tensor | None,
    activation: str,
    keep: bool,
    transposed: bool = False,
    *,
    tiles: Tiles | None = None,
) -> Plan:
    """The result, and with `keep` what the activation reads; both are rounded once."""
    dtype = one_dtype("linear_epilogue", x, w, b, residual)
    k = x.shape[-1]
    n = w.numel() // max(1, k)
    size = (x.numel() // max(1, k), n, k)
    kernel = product(
        target,
        dtype,
        size,
        "mk",
        "kn" if transposed else "nk",
        bias=b is not None,
        activation=activation,
        residual=residual is not None,
        keep=keep,
        tiles=tiles,
    )

    def run(
        x: Tensor,
        w: Tensor,
        b: Tensor | None,
        residual: Tensor | None,
        activation: str,
        keep: bool,
        transposed: bool = False,
    ) -> tuple[Launches, list[Tensor]]:
        results = [x.new_empty((*x.shape[:-1], n)) for _ in range(2 if keep else 1)]
        values = {"a": rows(x), "b": dense(w), "c": results[0].view(-1, n)}
        if keep:
            values["kept"] = results[1]
        if b is not None:
            values["bias"] = dense(b)
        if residual is not None:
            values["residual"] = rows(residual)
        return [(kernel, values)], results

    return Plan((kernel,), run)
