"""Flash attention, forward: one program per block of queries and head.

Keeps of each row the highest score and the sum of exponentials so far, and rescales what it has
added up whenever the highest score grows (Milakov and Gimelshein, 2018; Dao, 2024).
"""

from __future__ import annotations

from functools import partial

from msc.codegen.kernels.attention import (
    Attention,
    Block,
    blocks,
    document_arguments,
    document_numbers,
    kernel,
    key_loops,
    lanes,
    mask,
    scale,
)
from msc.codegen.kernels.description import Argument, Kernel, Tiles, ceil_div, signature
from msc.codegen.kernels.source import fill, precision

KERNEL = """
@triton.jit
def attention_forward($arguments):
    # the last queries see the most keys: their programs start first
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1)
    group = head // COPIES
    sample = tl.program_id(2)
    queries = first + tl.arange(0, BM)
    <<lanes>>
    <<query>>
    <<own_documents>>
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BD), tl.float32)
    <<loops>>
    <<store>>
    at = (sample * LENGTH + queries) * HEADS + head
    tl.store(lse + at, (highest + tl.log2(total)) / LOG2_E, mask=queries < LENGTH)
"""

STEP = """
<<keys>>
<<key>>
scores = tl.dot(query, key.T$precision)
<<scale>>
<<mask>>
higher = tl.maximum(highest, tl.max(scores, axis=1))
<<reference>>
weights = tl.exp2(scores - $shift[:, None])
kept = tl.exp2(highest - $shift)
total = total * kept + tl.sum(weights, axis=1)
<<value>>
acc = acc * kept[:, None]
acc = tl.dot(weights.to(value.dtype), value, acc$precision)
highest = higher
"""


def emit(attention: Attention, tiles: Tiles) -> Kernel:
    """The kernel; tiles: m queries by n keys, warps and stages."""
    described = attention.described(tiles.m, tiles.n)
    heads = blocks(attention, described, attention.exact(tiles.m, tiles.n))
    arguments = (
        attention.tensor("q", tiles.m, described),
        attention.tensor("k", tiles.n, described),
        attention.tensor("v", tiles.n, described),
        attention.tensor("out", tiles.m, described),
        Argument("lse", "pointer", "float32"),
        *document_arguments(attention),
    )
    text = fill(
        KERNEL,
        arguments=signature(arguments),
        lanes=lanes(described),
        query=heads["q"].load("query", "first", "queries"),
        own_documents=document_numbers(attention, "own", "queries"),
        loops=key_loops(attention, tiles, partial(_step, attention, tiles, heads)),
        store=heads["out"].store("acc / total[:, None]", "first", "queries"),
    )
    grid = (ceil_div(attention.length, tiles.m), attention.heads, attention.batch)
    return kernel(attention, tiles, "attention_forward", text, arguments, grid)


def _step(attention: Attention, tiles: Tiles, heads: dict[str, Block], masked: bool) -> str:
    hidden = 'scores = tl.where(shown, scores, float("-inf"))'
    # a row that has seen no key yet: -inf minus -inf would be no number
    finite = 'finite = tl.where(higher == float("-inf"), 0.0, higher)'
    return fill(
        STEP,
        keys="keys = start + tl.arange(0, BN)" if masked or not heads["k"].described else "",
        key=heads["k"].load("key", "start", "keys"),
        precision=precision(attention.dtype),
        scale=scale(attention, "scores"),
        mask=mask(attention, tiles, hidden) if masked else "",
        reference=finite if masked else "",
        shift="finite" if masked else "higher",
        value=heads["v"].load("value", "start", "keys"),
    )
