"""Flash attention, backward: the row sums first, then keys and values, then queries.

delta = rowsum(gy * out); with p the weights and dp = gy @ v.T, the gradient of the scores is
p * (dp - delta) (Dao, 2024). The weights are computed again from lse. Every gradient is summed by
one program in a fixed order, so that the result is the same on every run.
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
    numbers,
    query_loops,
    scale,
)
from msc.codegen.kernels.description import Argument, Kernel, Tiles, ceil_div, signature
from msc.codegen.kernels.source import fill, precision

DELTA = """
@triton.jit
def attention_delta(gy, out, delta):
    first = tl.program_id(0) * BM
    head = tl.program_id(1)
    sample = tl.program_id(2)
    queries = first + tl.arange(0, BM)
    lanes = tl.arange(0, BD)
    <<gradient>>
    <<result>>
    at = (sample * LENGTH + queries) * HEADS + head
    sums = tl.sum(gradient.to(tl.float32) * result.to(tl.float32), axis=1)
    tl.store(delta + at, sums, mask=queries < LENGTH)
"""

KEYS = """
@triton.jit
def attention_backward_keys($arguments):
    first = tl.program_id(0) * BN
    group = tl.program_id(1)
    sample = tl.program_id(2)
    keys = first + tl.arange(0, BN)
    <<lanes>>
    <<key>>
    <<value>>
    <<other_documents>>
    key_acc = tl.zeros((BN, BD), tl.float32)
    value_acc = tl.zeros((BN, BD), tl.float32)
    for copy in range(COPIES):
        head = group * COPIES + copy
        <<loops>>
    <<store_key>>
    <<store_value>>
"""

# Transposed, [keys, queries]: the sums are over queries, and need no transposition of the weights.
KEYS_STEP = """
queries = start + tl.arange(0, BM)
<<query>>
<<gradient>>
<<lse>>
<<delta>>
scores = tl.dot(key, query.T$precision)
<<scale>>
weights = tl.exp2(scores - high[None, :] * LOG2_E)
<<mask>>
value_acc = tl.dot(weights.to(gradient.dtype), gradient, value_acc$precision)
slopes = weights * (tl.dot(value, gradient.T$precision) - mean[None, :])
<<bend>>
key_acc = tl.dot(slopes.to(query.dtype), query, key_acc$precision)
"""

QUERIES = """
@triton.jit
def attention_backward_queries($arguments):
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BM
    head = tl.program_id(1)
    group = head // COPIES
    sample = tl.program_id(2)
    queries = first + tl.arange(0, BM)
    <<lanes>>
    <<query>>
    <<gradient>>
    <<lse>>
    <<delta>>
    <<own_documents>>
    acc = tl.zeros((BM, BD), tl.float32)
    <<loops>>
    <<store>>
"""

QUERIES_STEP = """
<<keys>>
<<key>>
<<value>>
scores = tl.dot(query, key.T$precision)
<<scale>>
weights = tl.exp2(scores - high[:, None] * LOG2_E)
<<mask>>
slopes = weights * (tl.dot(gradient, value.T$precision) - mean[:, None])
<<bend>>
acc = tl.dot(slopes.to(key.dtype), key, acc$precision)
"""

_HIDE = "weights = tl.where(shown, weights, 0.0)"
_BEND = "slopes = slopes * (1.0 - bent * bent)"


def emit_delta(attention: Attention, tiles: Tiles) -> Kernel:
    """delta [b, s, h] from gy and out; tiles.m queries a program."""
    heads = blocks(attention, False, attention.exact(tiles.m))
    text = fill(
        DELTA,
        gradient=heads["gy"].load("gradient", "first", "queries"),
        result=heads["out"].load("result", "first", "queries"),
    )
    arguments = (
        Argument("gy", "pointer", attention.dtype),
        Argument("out", "pointer", attention.dtype),
        Argument("delta", "pointer", "float32"),
    )
    grid = (ceil_div(attention.length, tiles.m), attention.heads, attention.batch)
    return kernel(attention, tiles, "attention_delta", text, arguments, grid, multiplies=False)


def emit_keys(attention: Attention, tiles: Tiles) -> Kernel:
    """dk and dv; tiles: steps of m queries, n keys a program."""
    described = attention.described(tiles.m, tiles.n)
    heads = blocks(attention, described, attention.exact(tiles.m, tiles.n))
    arguments = _arguments(attention, tiles, described, {"dk": tiles.n, "dv": tiles.n})
    text = fill(
        KEYS,
        arguments=signature(arguments),
        lanes=lanes(described),
        key=heads["k"].load("key", "first", "keys"),
        value=heads["v"].load("value", "first", "keys"),
        other_documents=document_numbers(attention, "other", "keys"),
        loops=query_loops(attention, tiles, partial(_keys_step, attention, tiles, heads)),
        store_key=heads["dk"].store("key_acc * SCALE", "first", "keys"),
        store_value=heads["dv"].store("value_acc", "first", "keys"),
    )
    grid = (ceil_div(attention.length, tiles.n), attention.groups, attention.batch)
    return kernel(attention, tiles, "attention_backward_keys", text, arguments, grid)


def emit_queries(attention: Attention, tiles: Tiles) -> Kernel:
    """dq; tiles: m queries a program, steps of n keys."""
    described = attention.described(tiles.m, tiles.n)
    heads = blocks(attention, described, attention.exact(tiles.m, tiles.n))
    arguments = _arguments(attention, tiles, described, {"dq": tiles.m})
    text = fill(
        QUERIES,
        arguments=signature(arguments),
        lanes=lanes(described),
        query=heads["q"].load("query", "first", "queries"),
        gradient=heads["gy"].load("gradient", "first", "queries"),
        lse=numbers("lse", "high", "queries"),
        delta=numbers("delta", "mean", "queries"),
        own_documents=document_numbers(attention, "own", "queries"),
        loops=key_loops(attention, tiles, partial(_queries_step, attention, tiles, heads)),
        store=heads["dq"].store("acc * SCALE", "first", "queries"),
    )
    grid = (ceil_div(attention.length, tiles.m), attention.heads, attention.batch)
    return kernel(attention, tiles, "attention_backward_queries", text, arguments, grid)


def _keys_step(attention: Attention, tiles: Tiles, heads: dict[str, Block], masked: bool) -> str:
    return fill(
        KEYS_STEP,
        query=heads["q"].load("query", "start", "queries"),
        gradient=heads["gy"].load("gradient", "start", "queries"),
        lse=numbers("lse", "high", "queries"),
        delta=numbers("delta", "mean", "queries"),
        precision=precision(attention.dtype),
        scale=scale(attention, "scores"),
        mask=mask(attention, tiles, _HIDE, transposed=True) if masked else "",
        bend=_BEND if attention.soft_cap else "",
    )


def _queries_step(attention: Attention, tiles: Tiles, heads: dict[str, Block], masked: bool) -> str:
    return fill(
        QUERIES_STEP,
        keys="keys = start + tl.arange(0, BN)" if masked or not heads["k"].described else "",
        key=heads["k"].load("key", "start", "keys"),
        value=heads["v"].load("value", "start", "keys"),
        precision=precision(attention.dtype),
        scale=scale(attention, "scores"),
        mask=mask(attention, tiles, _HIDE) if masked else "",
        bend=_BEND if attention.soft_cap else "",
    )


def _arguments(
    attention: Attention, tiles: Tiles, described: bool, written: dict[str, int]
) -> tuple[Argument, ...]:
    """What is read, then `written`: the rows of a block by name."""
    read = {"q": tiles.m, "k": tiles.n, "v": tiles.n, "gy": tiles.m}
    return (
        *(attention.tensor(name, rows, described) for name, rows in read.items()),
        Argument("lse", "pointer", "float32"),
        Argument("delta", "pointer", "float32"),
        *(attention.tensor(name, rows, described) for name, rows in written.items()),
        *document_arguments(attention),
    )
