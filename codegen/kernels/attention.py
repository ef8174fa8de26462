"""What attention kernels have in common: their description, their masks, and how blocks are read.

Dao, "FlashAttention-2", ICLR 2024: the scores of a block of queries and a block of keys are never
in memory. Windows, causal masks and documents skip what no query of a block sees, and blocks that
all of its queries see whole are computed without a mask (not so with documents).

Tensors are [b, s, h, d] in memory, as `msc.attention` has them, and descriptors see them as
[b s, h d]; lse and delta are float32 [b, s, h].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from msc.codegen.kernels.description import Argument, Kernel, Target, Tiles, power_of_two
from msc.codegen.kernels.dtypes import check_dtype, on_tensor_cores, short
from msc.codegen.kernels.source import fill, masked, module, wide_index
from msc.ir.errors import PlanError

HEAD_SIZES = range(16, 257)
_LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Attention:
    """softmax(mask(cap(scale * q @ k.T))) @ v, as `msc.attention` computes it, on one device.

    heads is a multiple of groups (key-value heads). window > 0 needs causal. soft_cap c > 0: scores
    x become c tanh(x / c). documents: queries see only keys of their own document. Documents are
    runs of positions; `begins` and `ends`, int32 [batch, length], say of each position where its
    document begins, and where the next one does. What a block's documents do not reach is skipped.
    """

    batch: int
    length: int
    heads: int
    groups: int
    head_size: int
    dtype: str
    target: Target
    scale: float
    causal: bool = True
    window: int = 0
    soft_cap: float = 0.0
    documents: bool = False

    def __post_init__(self) -> None:
        check_dtype("attention", self.dtype)
        if self.head_size not in HEAD_SIZES:
            raise PlanError(
                f"attention: kernels take heads of {HEAD_SIZES.start} to {HEAD_SIZES.stop - 1} "
                f"elements, not {self.head_size}. ATen's attention takes every size."
            )
        if self.heads % self.groups:
            raise PlanError(f"attention: {self.heads} heads do not share {self.groups} evenly")
        if self.window and not self.causal:
            raise PlanError("attention: a sliding window needs causal=True")

    @property
    def label(self) -> str:
        """What tells it from other attentions, as part of a kernel's name."""
        parts = [
            "causal" * self.causal,
            f"window{self.window}" * bool(self.window),
            "capped" * bool(self.soft_cap),
            "documents" * self.documents,
        ]
        mask = "_".join(filter(None, parts)) or "full"
        size = f"{self.batch}x{self.length}x{self.heads}g{self.groups}x{self.head_size}"
        return f"{mask}_{size}_{short(self.dtype)}"

    @property
    def lanes(self) -> int:
        """The head size that kernels compute with, a power of two."""
        return power_of_two(self.head_size)

    def exact(self, *blocks: int) -> bool:
        """Whether the length is cut into whole blocks of all of these sizes."""
        return all(self.length % block == 0 for block in blocks)

    def described(self, *blocks: int) -> bool:
        """Whether blocks of these numbers of rows can be moved by tensor descriptors."""
        return (
            self.target.has_tensor_memory_accelerator
            and self.lanes == self.head_size
            and self.exact(*blocks)
        )

    def constants(self, tiles: Tiles) -> dict[str, int | float]:
        """The named constants of every attention kernel; tiles: m queries by n keys."""
        found: dict[str, int | float] = {
            "LENGTH": self.length,
            "HEADS": self.heads,
            "GROUPS": self.groups,
            "COPIES": self.heads // self.groups,
            "D": self.head_size,
            "BM": tiles.m,
            "BN": tiles.n,
            "BD": self.lanes,
            "LOG2_E": _LOG2_E,
            "SCALE": self.scale,
        }
        if self.window:
            found["WINDOW"] = self.window
        if self.soft_cap:
            found["CAP"] = self.soft_cap
        return found

    def tensor(self, name: str, rows: int, described: bool) -> Argument:
        """A tensor of heads that is read in blocks of rows."""
        if described:
            return Argument(name, "descriptor", self.dtype, (rows, self.head_size))
        return Argument(name, "pointer", self.dtype)


@dataclass(frozen=True)
class Block:
    """How blocks of rows of one head are read and written.

    exact: no block overhangs the end of the sequence. `rows` is the name of the row indices in the
    text, `start` of the first one.
    """

    attention: Attention
    tensor: str
    heads: str
    head: str
    described: bool
    exact: bool

    def load(self, name: str, start: str, rows: str) -> str:
        """`name = [rows, BD]`; what lies outside is zero."""
        if self.described:
            column = f"{self.head} * D"
            return f"{name} = {self.tensor}.load([sample * LENGTH + {start}, {column}])"
        mask = masked(*self._inside(rows), other="0.0")
        return f"{name} = tl.load({self.tensor} + {self._at(rows)}{mask})"

    def store(self, value: str, start: str, rows: str) -> str:
        """Writes [rows, BD]."""
        dtype = f"tl.{self.attention.dtype}"
        if self.described:
            at = f"[sample * LENGTH + {start}, {self.head} * D]"
            return f"{self.tensor}.store({at}, ({value}).to({dtype}))"
        at = f"{self.tensor} + {self._at(rows)}"
        return f"tl.store({at}, ({value}).to({dtype}){masked(*self._inside(rows))})"

    def _at(self, rows: str) -> str:
        attention = self.attention
        count = attention.batch * attention.length * attention.heads * attention.head_size
        row = f"(sample * LENGTH + {rows})[:, None]{wide_index(count)} * ({self.heads} * D)"
        return f"{row} + ({self.head} * D + lanes)[None, :]"

    def _inside(self, rows: str) -> tuple[str, str]:
        whole = self.attention.lanes == self.attention.head_size
        return (
            # the rows after the last are another sample's
            "" if self.exact else f"({rows}[:, None] < LENGTH)",
            "" if whole else "(lanes[None, :] < D)",
        )


def blocks(attention: Attention, described: bool, exact: bool) -> dict[str, Block]:
    """The tensors of heads by name, each read for the program's own head or group."""
    of_queries, of_keys = ("q", "out", "gy", "dq"), ("k", "v", "dk", "dv")
    found = {x: Block(attention, x, "HEADS", "head", described, exact) for x in of_queries}
    return found | {x: Block(attention, x, "GROUPS", "group", described, exact) for x in of_keys}


def operands(kernel: Kernel, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a kernel takes of `values`: where it wants a descriptor, tensors of heads as [b s, h d].

    Raises KeyError for an argument that has no value.
    """
    given = {argument.name: values[argument.name] for argument in kernel.arguments}
    for argument in kernel.arguments:
        if argument.kind == "descriptor":
            b, length, heads, d = given[argument.name].shape
            given[argument.name] = given[argument.name].view(b * length, heads * d)
    return given


def lanes(described: bool) -> str:
    """The elements of a head, of which only pointers need the indices."""
    return "" if described else "lanes = tl.arange(0, BD)"


def numbers(tensor: str, name: str, rows: str) -> str:
    """`name = [rows]` of a float32 [b, s, h] tensor, for the program's head."""
    at = f"(sample * LENGTH + {rows}) * HEADS + head"
    return f"{name} = tl.load({tensor} + {at}, mask={rows} < LENGTH, other=0.0)"


def document_numbers(attention: Attention, name: str, rows: str) -> str:
    """`name = [rows]`: where their documents begin; -1 after the sequence. Empty without any."""
    if not attention.documents:
        return ""
    at = f"sample * LENGTH + {rows}"
    return f"{name} = tl.load(begins + {at}, mask={rows} < LENGTH, other=-1)"


def scale(attention: Attention, scores: str) -> str:
    """From raw products to scores in units of log2, in place; with a cap, `bent` is tanh(x / c)."""
    if not attention.soft_cap:
        return f"{scores} = {scores} * (SCALE * LOG2_E)"
    # tanh(z) = 2 sigmoid(2 z) - 1
    bent = f"bent = 2.0 * tl.sigmoid({scores} * (2.0 * SCALE / CAP)) - 1.0"
    return f"{bent}\n{scores} = bent * (CAP * LOG2_E)"


def mask(attention: Attention, tiles: Tiles, effect: str, transposed: bool = False) -> str:
    """`shown`, the mask of a block, also for the end of a sequence; then its effect on the block.

    transposed: the block is [keys, queries]. In steps over what comes second, whose documents are
    read here; those of the first are known.
    """
    rows, columns = "[:, None]", "[None, :]"
    if transposed:
        rows, columns = columns, rows
    queries, keys = f"queries{rows}", f"keys{columns}"
    conditions: list[str] = []
    if not attention.exact(tiles.m, tiles.n):
        conditions = [f"({keys} < LENGTH)", f"({queries} < LENGTH)"]
    if attention.causal:
        conditions.append(f"({queries} >= {keys})")
    if attention.window:
        conditions.append(f"({queries} - {keys} < WINDOW)")
    if attention.documents:
        conditions.append(f"(own{rows} == other{columns})")
    step = ("own", "queries") if transposed else ("other", "keys")
    lines = [document_numbers(attention, *step), f"shown = {' & '.join(conditions)}", effect]
    return "\n".join(filter(None, lines))


def key_loops(attention: Attention, tiles: Tiles, step: Callable[[bool], str]) -> str:
    """Loops over the blocks of keys (`start`) that queries `first .. first + BM` see.

    step: the text of a step, with a mask or without.
    """
    masked, unmasked = step(True), step(False)
    low, high = "0", "LENGTH"
    if attention.causal:
        high = "min(LENGTH, first + BM)"
    if attention.window:
        low = "max(0, first - WINDOW + 1) // BN * BN"
    if attention.documents:
        reach = _reach("BM", low, high, "BN", attention.causal)
        return f"{reach}\n{_loops([('lowest', 'beyond', masked)], 'BN')}"
    if not attention.exact(tiles.m, tiles.n):
        return _loops([(low, high, masked)], "BN")
    if not attention.causal:
        return _loops([(low, high, unmasked)], "BN")
    # blocks that end at or before the first query are below the diagonal for all queries
    full_high = "(first + 1) // BN * BN"
    if not attention.window:
        return _loops([(low, full_high, unmasked), (full_high, high, masked)], "BN")
    # and those that begin after the last query's window has begun are inside of all windows
    edge = f"full_low = tl.maximum({low}, (first + BM - WINDOW + BN - 1) // BN * BN)"
    clamp = f"full_low = tl.minimum(full_low, {full_high})"
    phases = [
        (low, "full_low", masked),
        ("full_low", full_high, unmasked),
        (full_high, high, masked),
    ]
    return "\n".join([edge, clamp, _loops(phases, "BN")])


def query_loops(attention: Attention, tiles: Tiles, step: Callable[[bool], str]) -> str:
    """The same over the blocks of queries (`start`) that see keys `first .. first + BN`."""
    masked, unmasked = step(True), step(False)
    low, high = "0", "LENGTH"
    if attention.causal:
        low = "first // BM * BM"
    if attention.window:
        high = "min(LENGTH, first + BN + WINDOW - 1)"
    if attention.documents:
        reach = _reach("BN", low, high, "BM", False)
        return f"{reach}\n{_loops([('lowest', 'beyond', masked)], 'BM')}"
    if not attention.exact(tiles.m, tiles.n):
        return _loops([(low, high, masked)], "BM")
    if not attention.causal:
        return _loops([(low, high, unmasked)], "BM")
    full_low = "(first + BN + BM - 2) // BM * BM"
    if not attention.window:
        edge = f"full_low = tl.minimum({full_low}, LENGTH)"
        phases = [(low, "full_low", masked), ("full_low", high, unmasked)]
        return f"{edge}\n{_loops(phases, 'BM')}"
    edges = [
        f"full_high = tl.maximum({low}, tl.minimum(LENGTH, (first + WINDOW) // BM * BM))",
        f"full_low = tl.minimum({full_low}, full_high)",
    ]
    phases = [
        (low, "full_low", masked),
        ("full_low", "full_high", unmasked),
        ("full_high", high, masked),
    ]
    return "\n".join([*edges, _loops(phases, "BM")])


def _reach(own: str, low: str, high: str, step: str, causal: bool) -> str:
    """From the document of a block's first row to the end of that of its last one.

    causal: what comes after the block is left out as it is.
    """
    text = """
        lowest = tl.maximum($low, tl.load(begins + sample * LENGTH + first) // $step * $step)
        <<high>>
    """
    last = f"min(first + {own}, LENGTH) - 1"
    bound = f"beyond = tl.minimum({high}, tl.load(ends + sample * LENGTH + {last}))"
    return fill(text, low=low, step=step, high=f"beyond = {high}" if causal else bound)


def document_arguments(attention: Attention) -> tuple[Argument, ...]:
    """The tables of the documents; none without them."""
    names = ("begins", "ends") if attention.documents else ()
    return tuple(Argument(name, "pointer", "int32") for name in names)


def _loops(phases: list[tuple[str, str, str]], step: str) -> str:
    text = "for start in range($low, $high, $step):\n    <<body>>"
    return "\n".join(
        fill(text, low=low, high=high, step=step, body=body) for low, high, body in phases
    )


def kernel(
    attention: Attention,
    tiles: Tiles,
    entry: str,
    text: str,
    arguments: tuple[Argument, ...],
    grid: tuple[int, ...],
    multiplies: bool = True,
) -> Kernel:
    """The kernel of a text, named as its function; multiplies: it has products of matrices."""
    direction = "forward" if entry == "attention_forward" else "backward"
    title = f"Flash attention, {direction}: {attention.label}, for {attention.target.name}."
    return Kernel(
        f"{entry}_{attention.label}",
        module(title, attention.constants(tiles), text),
        entry,
        arguments,
        grid,
        attention.target,
        tiles.warps,
        tiles.stages,
        matrix=multiplies and on_tensor_cores(attention.dtype),
    )
