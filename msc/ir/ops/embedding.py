"""Rows of a table, whole or one rank's rows of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from msc.ir.errors import InputError
from msc.ir.ops.library import define

_NO_ROW = -1


def embedding(
    ids: Tensor, w: Tensor, start: Tensor | None = None, padding_idx: int = -1, table_rows: int = -1
) -> Tensor:
    """ids int `[...]`, w `[rows, d]` -> `[..., d]`.

    With `start` (0-dim int64) w holds the rows `[start, start + rows)` of a table of `table_rows`,
    and every other id gives zeros. `padding_idx` is an id of the whole table; it only matters for
    the gradient. Raises `InputError` for an id outside of the table, where reading ids back costs
    nothing (on the CPU).
    """
    if start is None:
        try:
            return functional.embedding(ids, w)
        except IndexError as error:
            raise _outside(ids, w.shape[0]) from error
    if table_rows >= 0 and ids.device.type == "cpu" and ids.numel():
        low, high = torch.aminmax(ids)
        if low < 0 or high >= table_rows:
            raise _outside(ids, table_rows)
    local = ids - start
    inside = (local >= 0) & (local < w.shape[0])
    rows = functional.embedding(local.clamp_(0, w.shape[0] - 1), w)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0)


def _outside(ids: Tensor, rows: int) -> InputError:
    return InputError(
        f"An embedding table of {rows} rows was asked for row {int(ids.max())}"
        + (f" and for row {int(ids.min())}" if int(ids.min()) < 0 else "")
        + f". Ids go from 0 to {rows - 1}: check the tokens of the batch and the size of the table."
    )


def embedding_wgrad(
    gy: Tensor, ids: Tensor, start: Tensor | None, num_rows: int, padding_idx: int = -1
) -> Tensor:
    """Gradient of w: gy `[..., d]`, ids `[...]` -> `[num_rows, d]`.

    Ids outside of the table's part and `padding_idx` contribute nothing.
    """
    if start is None:
        return _scatter_rows(gy, ids, num_rows, padding_idx)
    local = ids - start
    outside = (local < 0) | (local >= num_rows)
    if padding_idx >= 0:
        outside |= ids == padding_idx
    # ATen skips the rows whose id is its padding_idx, so gy need not be copied to blank them.
    local.masked_fill_(outside, _NO_ROW)
    return _scatter_rows(gy, local, num_rows, _NO_ROW)


def _scatter_rows(gy: Tensor, ids: Tensor, num_rows: int, skipped: int) -> Tensor:
    rows: Tensor = torch.ops.aten.embedding_dense_backward(gy, ids, num_rows, skipped, False)
    return rows


def _embedding_fake(
    ids: Tensor, w: Tensor, start: Tensor | None = None, padding_idx: int = -1, table_rows: int = -1
) -> Tensor:
    return w.new_empty((*ids.shape, w.shape[1]))


def _embedding_wgrad_fake(
    gy: Tensor, ids: Tensor, start: Tensor | None, num_rows: int, padding_idx: int = -1
) -> Tensor:
    return gy.new_empty((num_rows, gy.shape[-1]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ids, w, start, ctx.padding_idx, _ = inputs
    ctx.save_for_backward(ids, start)
    ctx.num_rows = w.shape[0]


def _backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
    ids, start = ctx.saved_tensors
    return None, EMBEDDING_WGRAD(gy, ids, start, ctx.num_rows, ctx.padding_idx), None, None, None


EMBEDDING_WGRAD = define(
    "embedding_wgrad(Tensor gy, Tensor ids, Tensor? start, int num_rows, int padding_idx=-1)"
    " -> Tensor",
    embedding_wgrad,
    _embedding_wgrad_fake,
)
EMBEDDING = define(
    "embedding(Tensor ids, Tensor w, Tensor? start=None, int padding_idx=-1, int table_rows=-1)"
    " -> Tensor",
    embedding,
    _embedding_fake,
    setup=_setup,
    backward=_backward,
)
