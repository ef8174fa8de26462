"""Causal attention in blocks of queries, each of which reads only the keys that it can see.

Block-sparse as in Longformer (Beltagy et al., 2020, section 3.1): with a window of w keys, a block
of n queries meets a band of n + w - 1 keys, so that time grows with s * w, and memory beyond the
operands with n * w. Blocks run in order and each sums into its keys' gradients in that order, so
that equal operands give equal bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from msc.ir.ops import attention_kernels as kernels
from msc.ir.ops.library import compute_dtype

_SMALLEST, _LARGEST = 64, 256


@dataclass(frozen=True)
class Band:
    """A block of queries and the keys that any of them sees (none: an empty range)."""

    queries: slice
    keys: slice

    def hidden(self, window: int, device: torch.device) -> Tensor:
        """Bool `[1, 1, queries, keys]`: what a query of the block does not see of its keys."""
        rows = torch.arange(self.queries.start, self.queries.stop, device=device).unsqueeze(1)
        columns = torch.arange(self.keys.start, self.keys.stop, device=device)
        return ((columns > rows) | (columns <= rows - window))[None, None]

    @property
    def shape(self) -> tuple[int, int, int]:
        """What `hidden` depends on: lengths, and how far the keys lie before the queries."""
        return (
            self.queries.stop - self.queries.start,
            self.keys.stop - self.keys.start,
            self.queries.start - self.keys.start,
        )


def block_length(window: int) -> int:
    """Queries in a block: a fourth of the window, so that a fifth of the scores is hidden."""
    return min(max(window // 256 * 64, _SMALLEST), _LARGEST)


def bands(s: int, t: int, window: int) -> list[Band]:
    """All blocks of `s` queries to `t` keys, in order; one block for a short sequence."""
    length = block_length(window)
    found = []
    for start in range(0, s, length):
        stop = min(start + length, s)
        last = min(stop, t)
        found.append(Band(slice(start, stop), slice(min(max(0, start - window + 1), last), last)))
    return found


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Write out `[b, h, s, e]` and lse `[b, h, s]`; operands as of `msc.attention`."""
    for band, bias in _masked_bands(q, k, mask, window):
        rows, keys = band.queries, band.keys
        if bias is None:
            out[:, :, rows], lse[:, :, rows] = 0, 0
            continue
        out[:, :, rows], lse[:, :, rows] = kernels.forward(
            q[:, :, rows], k[:, :, keys], v[:, :, keys], bias, scale, False, soft_cap
        )


def backward(
    gy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    scale: float,
    window: int,
    soft_cap: float,
    grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Write the gradients of q, k and v; a key's are summed over blocks, in float32 at least."""
    dq, dk, dv = grads
    wide = compute_dtype(q.dtype)
    sums = [dk, dv] if wide == q.dtype else [torch.empty_like(x, dtype=wide) for x in (dk, dv)]
    for total in sums:
        total.zero_()
    for band, bias in _masked_bands(q, k, mask, window):
        rows, keys = band.queries, band.keys
        if bias is None:
            dq[:, :, rows] = 0
            continue
        dq[:, :, rows], *parts = kernels.backward(
            gy[:, :, rows], q[:, :, rows], k[:, :, keys], v[:, :, keys], out[:, :, rows],
            lse[:, :, rows], bias, scale, False, soft_cap,
        )  # fmt: skip
        for total, part in zip(sums, parts, strict=True):
            total[:, :, keys] += part
    if wide != q.dtype:
        dk.copy_(sums[0])
        dv.copy_(sums[1])


def _masked_bands(
    q: Tensor, k: Tensor, mask: Tensor | None, window: int
) -> Iterator[tuple[Band, Tensor | None]]:
    """Each band with its additive mask; None where no query sees a key."""
    shape, common = None, None
    for band in bands(q.shape[2], k.shape[2], window):
        if band.keys.start == band.keys.stop:
            yield band, None
            continue
        part = q[:, :, band.queries]
        if mask is not None:
            hidden = band.hidden(window, q.device)
            yield band, kernels.additive(_part(mask, band), hidden, part)
            continue
        if band.shape != shape:  # all blocks but the first few and the last look alike
            shape, common = band.shape, None  # frees the other before this one is made
            common = kernels.additive(None, band.hidden(window, q.device), part)
        yield band, common


def _part(mask: Tensor, band: Band) -> Tensor:
    """The part of a mask of 4 dims that a band reads."""
    rows = band.queries if mask.shape[2] > 1 else slice(None)
    return mask[:, :, rows, band.keys if mask.shape[3] > 1 else slice(None)]
