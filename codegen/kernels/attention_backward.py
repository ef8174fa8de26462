"""Flash attention, backward: the row sums first, then keys and values, then queries.

delta = rowsum(gy * out); with p the weights and dp = gy @ v.T, the gradient of the scores is
p * (dp - delta) (Dao, 2024). The weights are computed again from lse. Every gradient is summed by
one program in a fixed order, so that the result is the same on every run.
"""

from __future__ import annotations

from msc.codegen.kernels.attention import (
    Attention,
    Block,
    document_arguments,
    document_numbers,
    key_loops,
    matrix,
    numbers,
    precision,
    query_loops,
    scale,
    visible,
)
from msc.codegen.kernels.description import Argument, Kernel, Tiles, ceil_div
from msc.codegen.kernels.source import fill, module

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
def attention_backward_keys(q, k, v, gy, lse, delta, dk, dv$documents):
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
def attention_backward_queries(q, k, v, gy, lse, delta, dq$documents):
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

_BEND = "slopes = slopes * (1.0 - bent * bent)"


def emit_delta(attention: Attention, tiles: Tiles) -> Kernel:
    """delta [b, s, h] from gy and out; tiles.m queries a program."""
    blocks = _blocks(attention, False, attention.exact(tiles.m))
    text = fill(
        DELTA,
        gradient=blocks["gy"].load("gradient", "first", "queries"),
        result=blocks["out"].load("result", "first", "queries"),
    )
    arguments = (
        Argument("gy", "pointer", attention.dtype),
        Argument("out", "pointer", attention.dtype),
        Argument("delta", "pointer", "float32"),
    )
    grid = (ceil_div(attention.length, tiles.m), attention.heads, attention.batch)
    return _kernel(attention, tiles, "attention_delta", text, arguments, grid, multiplies=False)


def emit_keys(attention: Attention, tiles: Tiles) -> Kernel:
    """dk and dv; tiles: steps of m queries, n keys a program."""
    described = attention.described(tiles.m, tiles.n)
    blocks = _blocks(attention, described, attention.exact(tiles.m, tiles.n))
    text = fill(
        KEYS,
        documents=", begins, ends" * attention.documents,
        lanes="" if described else "lanes = tl.arange(0, BD)",
        key=blocks["k"].load("key", "first", "keys"),
        value=blocks["v"].load("value", "first", "keys"),
        other_documents=document_numbers(attention, "other", "keys"),
        loops=query_loops(
            attention,
            tiles,
            _keys_step(attention, tiles, blocks, masked=True),
            _keys_step(attention, tiles, blocks, masked=False),
        ),
        store_key=blocks["dk"].store("key_acc * SCALE", "first", "keys"),
        store_value=blocks["dv"].store("value_acc", "first", "keys"),
    )
    sizes = {"q": tiles.m, "k": tiles.n, "v": tiles.n, "gy": tiles.m}
    arguments = _arguments(attention, described, sizes, {"dk": tiles.n, "dv": tiles.n})
    grid = (ceil_div(attention.length, tiles.n), attention.groups, attention.batch)
    return _kernel(attention, tiles, "attention_backward_keys", text, arguments, grid)


def emit_queries(attention: Attention, tiles: Tiles) -> Kernel:
    """dq; tiles: m queries a program, steps of n keys."""
    described = attention.described(tiles.m, tiles.n)
    blocks = _blocks(attention, described, attention.exact(tiles.m, tiles.n))
    text = fill(
        QUERIES,
        documents=", begins, ends" * attention.documents,
        lanes="" if described else "lanes = tl.arange(0, BD)",
        query=blocks["q"].load("query", "first", "queries"),
        gradient=blocks["gy"].load("gradient", "first", "queries"),
        lse=numbers("lse", "high", "queries"),
        delta=numbers("delta", "mean", "queries"),
        own_documents=document_numbers(attention, "own", "queries"),
        loops=key_loops(
            attention,
            tiles,
            _queries_step(attention, tiles, blocks, masked=True),
            _queries_step(attention, tiles, blocks, masked=False),
        ),
        store=blocks["dq"].store("acc * SCALE", "first", "queries"),
    )
    sizes = {"q": tiles.m, "k": tiles.n, "v": tiles.n, "gy": tiles.m}
    arguments = _arguments(attention, described, sizes, {"dq": tiles.m})
    grid = (ceil_div(attention.length, tiles.m), attention.heads, attention.batch)
    return _kernel(attention, tiles, "attention_backward_queries", text, arguments, grid)


def _blocks(attention: Attention, described: bool, exact: bool) -> dict[str, Block]:
    of_queries = ("q", "gy", "out", "dq")
    of_keys = ("k", "v", "dk", "dv")
    rest = (described, exact)
    found = {name: Block(attention, name, "HEADS", "head", *rest) for name in of_queries}
    return found | {name: Block(attention, name, "GROUPS", "group", *rest) for name in of_keys}


def _keys_step(attention: Attention, tiles: Tiles, blocks: dict[str, Block], masked: bool) -> str:
    names = ("own[None, :]", "other[:, None]")
    condition = visible(attention, tiles, "queries[None, :]", "keys[:, None]", names)
    own = document_numbers(attention, "own", "queries")
    hidden = f"shown = {condition}\nweights = tl.where(shown, weights, 0.0)"
    return fill(
        KEYS_STEP,
        query=blocks["q"].load("query", "start", "queries"),
        gradient=blocks["gy"].load("gradient", "start", "queries"),
        lse=numbers("lse", "high", "queries"),
        delta=numbers("delta", "mean", "queries"),
        precision=precision(attention),
        scale=scale(attention, "scores"),
        mask="\n".join(filter(None, [own, hidden])) if masked else "",
        bend=_BEND if attention.soft_cap else "",
    )


def _queries_step(
    attention: Attention, tiles: Tiles, blocks: dict[str, Block], masked: bool
) -> str:
    names = ("own[:, None]", "other[None, :]")
    condition = visible(attention, tiles, "queries[:, None]", "keys[None, :]", names)
    other = document_numbers(attention, "other", "keys")
    hidden = f"shown = {condition}\nweights = tl.where(shown, weights, 0.0)"
    return fill(
        QUERIES_STEP,
        keys="keys = start + tl.arange(0, BN)" if masked or not blocks["k"].described else "",
        key=blocks["k"].load("key", "start", "keys"),
        value=blocks["v"].load("value", "start", "keys"),
        precision=precision(attention),
        scale=scale(attention, "scores"),
        mask="\n".join(filter(None, [other, hidden])) if masked else "",
        bend=_BEND if attention.soft_cap else "",
    )


def _arguments(
    attention: Attention, described: bool, read: dict[str, int], written: dict[str, int]
) -> tuple[Argument, ...]:
    return (
        *(attention.tensor(name, rows, described) for name, rows in read.items()),
        Argument("lse", "pointer", "float32"),
        Argument("delta", "pointer", "float32"),
        *(attention.tensor(name, rows, described) for name, rows in written.items()),
        *document_arguments(attention),
    )


def _kernel(
    attention: Attention,
    tiles: Tiles,
    entry: str,
    text: str,
    arguments: tuple[Argument, ...],
    grid: tuple[int, ...],
    multiplies: bool = True,
) -> Kernel:
    title = f"Flash attention, backward: {attention.label}, for {attention.target.name}."
    return Kernel(
        f"{entry}_{attention.label}",
        module(title, attention.constants(tiles), text),
        entry,
        arguments,
        grid,
        attention.target,
        tiles.warps,
        tiles.stages,
        matrix=multiplies and matrix(attention),
    )
