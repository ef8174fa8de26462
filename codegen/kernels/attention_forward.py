"""Flash attention, forward: one program per block of queries and head.

Keeps of each row the highest score and the sum of exponentials so far, and rescales what it has
added up whenever the highest score grows (Milakov and Gimelshein, 2018; Dao, 2024).
"""

from __future__ import annotations

from msc.codegen.kernels.attention import (
    Attention,
    Block,
    document_arguments,
    document_numbers,
    key_loops,
    matrix,
    precision,
    scale,
    visible,
)
from msc.codegen.kernels.description import Argument, Kernel, Tiles, ceil_div
from msc.codegen.kernels.source import fill, module

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
    heads = {
        name: Block(attention, name, *side, described, attention.exact(tiles.m, tiles.n))
        for name, side in {
            "q": ("HEADS", "head"),
            "k": ("GROUPS", "group"),
            "v": ("GROUPS", "group"),
            "out": ("HEADS", "head"),
        }.items()
    }
    text = fill(
        KERNEL,
        arguments="q, k, v, out, lse" + ", begins, ends" * attention.documents,
        lanes="" if described else "lanes = tl.arange(0, BD)",
        query=heads["q"].load("query", "first", "queries"),
        own_documents=document_numbers(attention, "own", "queries"),
        loops=key_loops(
            attention,
            tiles,
            _step(attention, tiles, heads, masked=True),
            _step(attention, tiles, heads, masked=False),
        ),
        store=heads["out"].store("acc / total[:, None]", "first", "queries"),
    )
    return Kernel(
        f"attention_forward_{attention.label}",
        module(
            f"Flash attention, forward: {attention.label}, for {attention.target.name}.",
            attention.constants(tiles),
            text,
        ),
        "attention_forward",
        (
            attention.tensor("q", tiles.m, described),
            attention.tensor("k", tiles.n, described),
            attention.tensor("v", tiles.n, described),
            attention.tensor("out", tiles.m, described),
            Argument("lse", "pointer", "float32"),
            *document_arguments(attention),
        ),
        (ceil_div(attention.length, tiles.m), attention.heads, attention.batch),
        attention.target,
        tiles.warps,
        tiles.stages,
        matrix=matrix(attention),
    )


def _step(attention: Attention, tiles: Tiles, heads: dict[str, Block], masked: bool) -> str:
    mask = ""
    if masked:
        names = ("own[:, None]", "other[None, :]")
        condition = visible(attention, tiles, "queries[:, None]", "keys[None, :]", names)
        other = document_numbers(attention, "other", "keys")
        hidden = 'scores = tl.where(shown, scores, float("-inf"))'
        mask = "\n".join(filter(None, [other, f"shown = {condition}", hidden]))
    # a row that has seen no key yet: -inf minus -inf would be no number
    finite = 'finite = tl.where(higher == float("-inf"), 0.0, higher)'
    return fill(
        STEP,
        keys="keys = start + tl.arange(0, BN)" if masked or not heads["k"].described else "",
        key=heads["k"].load("key", "start", "keys"),
        precision=precision(attention),
        scale=scale(attention, "scores"),
        mask=mask,
        reference=finite if masked else "",
        shift="finite" if masked else "higher",
        value=heads["v"].load("value", "start", "keys"),
    )
