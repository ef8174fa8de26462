"""A linear layer with what follows it: bias, activation, residual sum.

Graphs have it in the place of the single ops once they are differentiated (`fuse-epilogue`), so it
has no gradient. Here it is their sequence; a kernel does it in the product's own pass.
"""

# Shape letters: `...` any leading dims, k input features, n output features.

from __future__ import annotations

import torch
from torch import Tensor

from msc.ir.ops.activations import ACTIVATIONS
from msc.ir.ops.library import define
from msc.ir.ops.linear import linear


def linear_epilogue(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    residual: Tensor | None,
    activation: str,
    keep: bool,
    transposed: bool = False,
) -> list[Tensor]:
    """`activation(linear(x, w, b, transposed)) + residual`, `[..., n]`.

    residual: `[..., n]`. activation: "" for none, or one of `ACTIVATIONS`. With `keep` the value
    that the activation reads comes second, `[..., n]`, as its gradient needs it.
    """
    if residual is not None and b is None and not activation:
        rows = x.reshape(-1, x.shape[-1])
        total = residual.reshape(rows.shape[0], -1)
        return [torch.addmm(total, rows, w if transposed else w.t()).view(residual.shape)]
    before = linear(x, w, b, transposed)
    out = before
    if activation:
        own = ACTIVATIONS[activation]
        out = own.apply(before) if keep else own.overwrite(before)
    if residual is not None:
        out = out.add_(residual)
    return [out, before] if keep else [out]


def _linear_epilogue_fake(
    x: Tensor,
    w: Tensor,
    b: Tensor | None,
    residual: Tensor | None,
    activation: str,
    keep: bool,
    transposed: bool = False,
) -> list[Tensor]:
    n, k = (w.shape[1], w.shape[0]) if transposed else (w.shape[0], w.shape[1])
    shape = (*x.shape[:-1], n)
    if x.shape[-1] != k or (b is not None and tuple(b.shape) != (n,)):
        raise ValueError(
            f"linear_epilogue: x {tuple(x.shape)}, w {tuple(w.shape)} (transposed={transposed}) "
            f"and b {None if b is None else tuple(b.shape)} do not fit together"
        )
    if residual is not None and tuple(residual.shape) != shape:
        raise ValueError(
            f"linear_epilogue: the residual {tuple(residual.shape)} is not of the result's shape "
            f"{shape}"
        )
    if activation and activation not in ACTIVATIONS:
        raise ValueError(
            f"linear_epilogue: no activation {activation!r}; there are {', '.join(ACTIVATIONS)}"
        )
    if keep and not activation:
        raise ValueError("linear_epilogue: it keeps what its activation reads, and it has none")
    return [x.new_empty(shape) for _ in range(2 if keep else 1)]


LINEAR_EPILOGUE = define(
    "linear_epilogue(Tensor x, Tensor w, Tensor? b, Tensor? residual, str activation, bool keep,"
    " bool transposed=False) -> Tensor[]",
    linear_epilogue,
    _linear_epilogue_fake,
)
