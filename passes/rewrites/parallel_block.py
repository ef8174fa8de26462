"""Parallel transformer blocks: attention and MLP read the same stream.

    %h = %x + Attn(Norm1(%x))               %z = normalize(%x)
    %y = %h + MLP(Norm2(%h))        ->      %h = %x + Attn(%z * %w1 + %b1)
                                            %y = %h + MLP(%z * %w2 + %b2)

After GPT-J (Wang and Komatsuzaki, 2021) and PaLM (Chowdhery et al., 2022, section 2), as MegaScale
trains with it (NSDI 2024, section 3.1). The stream is normalized once for both; on tp the branches
share one all-gather, and, once `merge-branches` has grouped their sum, one reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from msc.ir.errors import UserError
from msc.ir.rewrites import Finding, Rewrite
from msc.passes.normalize.dead_code import remove_dead_code
from msc.passes.normalize.rewrite import Emitter, aten, is_parameter, shape_of
from msc.passes.rewrites.fuse_gemm import fuse_gemms
from msc.passes.rewrites.norms import Norm, affine
from msc.passes.rewrites.serial_blocks import Place, SerialBlock, find_places


@dataclass(frozen=True)
class ParallelBlock(Rewrite):
    """`y = x + Attn(Norm1(x)) + MLP(Norm2(x))` in place of a serial pre-norm block.

    layers: the numbers of the layers to rewrite (`range(8, 32)`, `[0, 2]`), None for all that are
        serial pre-norm blocks. With several numbered containers, a number means each of them.
    share_norm: one norm for both branches, the attention's; what scales and shifts the other is
        dropped: such a parameter has no gradient any more and keeps its value.
    fuse_gemm: one GEMM for all that read the norm of the stream, of both branches; the findings say
        where they read different activations.

    Raises `UserError` for switches that are no booleans, for layers that are no numbers or none at
    all, and for layers that the model does not have.
    """

    layers: Sequence[int] | None = None
    share_norm: bool = False
    fuse_gemm: bool = False

    def __post_init__(self) -> None:
        for name in ("share_norm", "fuse_gemm"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise UserError(f"ParallelBlock: {name}={value!r} must be True or False.")
        if self.layers is None:
            return
        given = tuple(self.layers) if isinstance(self.layers, Iterable) else None
        if given is None or not all(type(number) is int and number >= 0 for number in given):
            raise UserError(
                f"ParallelBlock: layers={self.layers!r} must be numbers of layers, such as "
                "range(8, 32) or [0, 2]; None means all."
            )
        if not given:
            raise UserError(
                f"ParallelBlock: layers={self.layers!r} names no layer; None means all of them."
            )
        if not isinstance(self.layers, range):
            object.__setattr__(self, "layers", given)

    def apply(self, gm: fx.GraphModule) -> list[Finding]:
        """Rewrite every serial block among `layers`; a finding for each attention of the model."""
        places = find_places(gm)
        self._check_layers(places)
        return [self._finding(gm, place) for place in places]

    def _check_layers(self, places: list[Place]) -> None:
        if self.layers is None:
            return
        known = sorted({place.layer for place in places if place.layer is not None})
        missing = sorted(set(self.layers) - set(known))
        if missing:
            listed = ", ".join(map(str, known)) or "none: its layers have no numbers"
            raise UserError(
                f"ParallelBlock: layers={self.layers} names {missing}, but the "
                f"layers with attention in this model are {listed}."
            )

    def _finding(self, gm: fx.GraphModule, place: Place) -> Finding:
        changed = False
        if self.layers is not None and place.layer not in self.layers:
            what = "not among the layers asked for"
        elif place.block is None:
            what = place.reason
        else:
            changed, what = True, self._rewrite(gm, place.block)
        return Finding(type(self).__name__, place.path, changed, what)

    def _rewrite(self, gm: fx.GraphModule, block: SerialBlock) -> str:
        first, second = block.attention.norm, block.mlp.norm
        what = "attention and MLP both read the stream; "
        read: fx.Node | None = None  # the activation that both branches read
        if self.share_norm:
            what += _share(gm, block)
            read = first.output
        elif first.form != second.form:
            _read_stream(gm, block)
            kept = f"{first.describe()} and {second.describe()}"
            what += f"each normalizes it, as their norms differ ({kept})"
        else:
            normalized = _normalize_once(gm, first, second)
            what += "it is normalized once"
            if first.vectors == second.vectors == (None, None):
                read = normalized
        return what + _fused(gm, read) if self.fuse_gemm else what


def _fused(gm: fx.GraphModule, read: fx.Node | None) -> str:
    """Fuse the GEMMs that read the activation of both branches; says what came of it."""
    if read is None:
        return "; no GEMM is fused, as the branches scale the norm apart: that needs share_norm"
    number = fuse_gemms(gm, read)
    return f"; {number} GEMMs are one" if number else "; no GEMM is fused: their weights differ"


def _normalize_once(gm: fx.GraphModule, first: Norm, second: Norm) -> fx.Node:
    """Give both norms one normalized value, behind which each keeps its vectors."""
    first = first.split(gm)
    assert first.normalized is not None
    normalized = _shaped(gm, first.normalized, first.normalized, second.output)
    if second.normalized is None:
        emit = Emitter(gm, second.call)
        second.call.replace_all_uses_with(affine(emit, normalized, second.vectors))
    else:
        second.normalized.replace_all_uses_with(normalized)
    remove_dead_code(gm)
    return first.normalized


def _read_stream(gm: fx.GraphModule, block: SerialBlock) -> None:
    """Let the MLP's norm read the stream in place of the sum with the attention."""
    nodes = block.mlp.norm.nodes
    first = next(node for node in gm.graph.nodes if node in nodes)
    stream = _shaped(gm, block.stream, first.prev, block.seen)
    for node in nodes:
        node.replace_input_with(block.seen, stream)


def _share(gm: fx.GraphModule, block: SerialBlock) -> str:
    """Let the MLP read the attention's norm; says what that makes of the other norm's vectors."""
    first, second = block.attention.norm, block.mlp.norm
    read = _parameters(second)
    shared = _shaped(gm, first.output, first.output, second.output)
    second.output.replace_all_uses_with(shared)
    remove_dead_code(gm)
    dropped = [str(node.meta["name"]) for node in read if not node.users]
    tail = f"; {' and '.join(dropped)} no longer read" if dropped else ""
    return f"both read the attention's norm{tail}"


def _parameters(norm: Norm) -> list[fx.Node]:
    """The parameters that a norm's affine comes from."""
    found: dict[fx.Node, None] = {}
    pending = [vector for vector in norm.vectors if vector is not None]
    while pending:
        node = pending.pop(0)
        if is_parameter(node):
            found[node] = None
        pending += node.all_input_nodes
    return list(found)


def _shaped(gm: fx.GraphModule, value: fx.Node, behind: fx.Node, like: fx.Node) -> fx.Node:
    """`value` in the shape of `like`, made behind a node: models flatten tokens between the two."""
    if shape_of(value) == shape_of(like):
        return value
    emit = Emitter(gm, behind.next)
    shape = list(shape_of(like))
    return emit(aten.reshape.default, value, shape, shape=shape)
