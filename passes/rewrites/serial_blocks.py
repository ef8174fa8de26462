"""Serial transformer blocks by their residual structure, without a name of a module or parameter.

    %h = %x + Attn(Norm1(%x))     # a branch reads one norm of the stream, and nothing else of it
    %y = %h + MLP(Norm2(%h))      # %h is read by Norm2 and by this sum, and by nothing else

The pre-norm block of GPT-2 and of Xiong et al., 2020 (section 3), with whatever dropout, scales and
gates the branches end in. Every attention of the graph is a place; one that is in no such block has
a reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import fx

import msc.ir.ops  # noqa: F401  (registers torch.ops.msc)
from msc.ir.structure import layer_of
from msc.ir.walks import ancestors
from msc.passes.normalize.rewrite import aten, shape_of
from msc.passes.rewrites.norms import FUSED, Norm, norms_of
from msc.passes.rewrites.origins import Origins

_ATTENTION = torch.ops.msc.attention.default
_LINEAR = torch.ops.msc.linear.default
_MATMULS = (aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default)
_SOFTMAX = (aten.softmax.int, aten._softmax.default)
_PARALLEL = "attention and MLP read one stream already"
_OTHER_NORMS = (aten.native_layer_norm.default, aten.group_norm.default, aten.batch_norm.default)


@dataclass(frozen=True)
class Branch:
    """What is added to a stream: a function of one norm of it.

    inside: the calls between the norm and the sum, `end` among them.
    """

    norm: Norm
    end: fx.Node
    inside: frozenset[fx.Node]


@dataclass(frozen=True)
class SerialBlock:
    """`middle = stream + attention`, `result = seen + mlp`; `seen` is `middle`, maybe reshaped."""

    stream: fx.Node
    attention: Branch
    middle: fx.Node
    seen: fx.Node
    mlp: Branch
    result: fx.Node


@dataclass(frozen=True)
class Place:
    """An attention of the model: the serial block that it is in, or why it is in none.

    path: the layer, such as "h.3"; layer: its number, None where layers have none.
    """

    path: str
    layer: int | None
    block: SerialBlock | None
    reason: str = ""


@dataclass(frozen=True)
class _Residual:
    """`node = stream + end`, where `end` depends on `stream`; inside: what does, up to `end`."""

    node: fx.Node
    stream: fx.Node
    end: fx.Node
    inside: frozenset[fx.Node]


class _OtherStructure(Exception):
    """A place does not have the structure of a serial block."""


def find_places(gm: fx.GraphModule) -> list[Place]:
    """Every attention of a normalized forward graph, in order; those of one block are one place."""
    origins = Origins(gm)
    residuals = [found for node in origins.nodes if (found := _residual(node, origins))]
    places: list[Place] = []
    known: set[fx.Node] = set()  # what is inside of the blocks found so far
    for core in origins.nodes:
        if core not in known and is_attention(core, origins):
            place = _place(core, residuals, origins)
            places.append(place)
            if place.block is not None:
                known |= place.block.attention.inside
    return places


def _place(core: fx.Node, residuals: list[_Residual], origins: Origins) -> Place:
    path = core.meta.get("module_path") or ""
    found = layer_of(path)
    layer = None
    if found is not None:
        container, layer = found
        path = f"{container}.{layer}".lstrip(".")
    around = [each for each in residuals if core in each.inside]
    reason = "no residual sum adds what the attention gives to what it reads"
    for number, residual in enumerate(around):
        try:
            return Place(path, layer, _block(residual, residuals, origins))
        except _OtherStructure as why:
            reason = str(why) if number == 0 else reason
    return Place(path, layer, None, reason)


def is_attention(node: fx.Node, origins: Origins) -> bool:
    """Whether a call is `msc.attention`, or the softmax between the two products of one."""
    if node.target is _ATTENTION:
        return True
    if node.target not in _SOFTMAX:
        return False
    above = _until_product(list(node.all_input_nodes), lambda each: each.all_input_nodes)
    below = _until_product(list(node.users), lambda each: list(each.users))
    return any(_of_activations(each, origins) for each in above) and any(
        _of_activations(each, origins) for each in below
    )


def _until_product(
    pending: list[fx.Node], onward: Callable[[fx.Node], list[fx.Node]]
) -> list[fx.Node]:
    """The first products on the ways that lead onward."""
    found, seen = [], set(pending)
    while pending:
        node = pending.pop()
        if node.target in _MATMULS or node.target is _LINEAR:
            found.append(node)
        elif node.op == "call_function":
            more = [each for each in onward(node) if each not in seen]
            seen.update(more)
            pending += more
    return found


def _of_activations(product: fx.Node, origins: Origins) -> bool:
    operands = product.all_input_nodes
    return (
        product.target in _MATMULS
        and len(operands) > 1
        and all(map(origins.is_activation, operands))
    )


def _residual(node: fx.Node, origins: Origins) -> _Residual | None:
    if node.target is not aten.add.Tensor or len(node.args) != 2 or node.kwargs:
        return None
    left, right = node.args
    for stream, end in ((left, right), (right, left)):
        if not isinstance(stream, fx.Node) or not isinstance(end, fx.Node):
            return None
        if any(shape_of(each) != shape_of(node) for each in (stream, end)):
            return None
        if origins.position[stream] < origins.position[end]:
            below = origins.depending_on(stream, end)
            if end in below:
                inside = frozenset(_between(stream, end, below))
                return _Residual(node, stream, end, inside)
    return None


def _between(source: fx.Node, end: fx.Node, below: set[fx.Node]) -> set[fx.Node]:
    """The calls on the ways from `source` to `end`; `below` depends on `source`."""
    return ancestors([end], lambda node: node in below and node is not source)


def _block(first: _Residual, residuals: list[_Residual], origins: Origins) -> SerialBlock:
    if _followed_by_parallel(first, origins):
        raise _OtherStructure(_PARALLEL)
    attention = _branch("attention", first, origins)
    if _parallel(attention.end, attention, origins):
        raise _OtherStructure(_PARALLEL)
    middle = first.node
    seen = middle
    (*readers,) = middle.users
    if len(readers) == 1 and _keeps_last_dim(readers[0]):
        (seen,) = readers
    seconds = [each for each in residuals if each.stream is seen]
    if len(seconds) != 1 or seconds[0].node not in seen.users:
        names = ", ".join(_name(user) for user in seen.users)
        raise _OtherStructure(
            f"the sum of stream and attention is read by {names}, not by a norm and by the sum "
            "with an MLP"
        )
    (second,) = seconds
    if any(is_attention(node, origins) for node in second.inside):
        raise _OtherStructure("the branch that follows the attention holds another attention")
    mlp = _branch("MLP", second, origins)
    if not any(node.target in (*_MATMULS, _LINEAR) for node in mlp.inside):
        raise _OtherStructure("the branch that follows the attention holds no GEMM: it is no MLP")
    others = [user for user in seen.users if user is not second.node and user not in mlp.norm.nodes]
    if others:
        raise _OtherStructure(
            f"the sum of stream and attention is read by {_name(others[0])} as well"
        )
    return SerialBlock(first.stream, attention, middle, seen, mlp, second.node)


def _branch(name: str, residual: _Residual, origins: Origins) -> Branch:
    """The branch of a residual sum; raises unless it reads one norm of the stream alone."""
    norms = norms_of(residual.stream, origins)
    read: list[Norm] = []
    outputs = {norm.output: norm for norm in norms}
    inner = {node for norm in norms for node in norm.nodes}
    inside: set[fx.Node] = set()
    direct = False
    pending = [residual.end]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if node in outputs:
            if outputs[node] not in read:
                read.append(outputs[node])
        elif node is residual.stream or node in inner:
            direct = True
        elif node in residual.inside:
            inside.add(node)
            pending += node.all_input_nodes
        elif origins.is_activation(node):
            raise _OtherStructure(
                f"the {name} reads {_name(node)}, an activation beside the norm of its stream"
            )
    if direct and read:
        raise _OtherStructure(f"the {name} reads the residual stream itself beside a norm of it")
    if direct:
        raise _OtherStructure(
            f"the {name} reads the residual stream itself, not a norm of it: post-norm, or a norm "
            "of a form that is not known"
        )
    if len(read) != 1:
        raise _OtherStructure(
            f"what is added to the stream reads {len(read)} norms of it: {name} and another branch "
            "are parallel already"
        )
    (norm,) = read
    if residual.end is norm.output:
        raise _OtherStructure(f"the {name} is the norm alone")
    _check_readers(name, residual, norm, inside)
    _check_end(name, residual.end, inside, origins)
    return Branch(norm, residual.end, frozenset(inside))


def _check_readers(name: str, residual: _Residual, norm: Norm, inside: set[fx.Node]) -> None:
    for node in (norm.output, *inside):
        for user in node.users:
            known = user is residual.node if node is residual.end else user in inside
            if not known:
                raise _OtherStructure(
                    f"{_name(user)} outside of the {name} reads {_name(node)} of it"
                )


def _check_end(name: str, end: fx.Node, inside: set[fx.Node], origins: Origins) -> None:
    """Refuse a norm behind the branch's last products."""
    pending, seen = [end], {end}
    while pending:
        node = pending.pop()
        if node.target in (*FUSED, *_OTHER_NORMS) or norms_of(node, origins):
            raise _OtherStructure(f"post-norm: the {name} ends in a norm")
        if node.target not in (*_MATMULS, _LINEAR, _ATTENTION):
            more = [each for each in node.all_input_nodes if each in inside and each not in seen]
            seen.update(more)
            pending += more


def _parallel(end: fx.Node, branch: Branch, origins: Origins) -> bool:
    """Whether a branch is a sum of which one part holds its attention and the other none."""
    parts = end.all_input_nodes
    if end.target is not aten.add.Tensor or not all(each in branch.inside for each in parts):
        return False
    held = []
    for part in parts:
        below = _between(branch.norm.output, part, set(branch.inside))
        held.append(any(is_attention(node, origins) for node in below))
    return held in ([True, False], [False, True])


def _followed_by_parallel(first: _Residual, origins: Origins) -> bool:
    """Whether all that reads the sum adds an MLP that reads the stream, but not the sum."""
    (*readers,) = first.node.users
    if len(readers) != 1 or readers[0].target is not aten.add.Tensor:
        return False
    others = [node for node in readers[0].all_input_nodes if node is not first.node]
    if len(others) != 1 or others[0] in first.inside:
        return False
    (other,) = others
    below = origins.depending_on(first.stream, other)
    if other not in below or other in origins.depending_on(first.node, readers[0]):
        return False
    inside = _between(first.stream, other, below)
    gemms = any(node.target in (*_MATMULS, _LINEAR) for node in inside)
    return gemms and not any(is_attention(node, origins) for node in inside)


def _keeps_last_dim(node: fx.Node) -> bool:
    if node.target is not aten.reshape.default:
        return False
    (source,) = node.all_input_nodes
    return shape_of(source)[-1:] == shape_of(node)[-1:] != ()


def _name(node: fx.Node) -> str:
    """A node as messages name it: its op, and its module where that is known.

    What picks one of several results has the name of the op that gives them.
    """
    if node.target is operator.getitem:
        (node,) = node.all_input_nodes
    if node.op != "call_function":
        return "the model's result" if node.op == "output" else str(node.meta.get("name", node))
    path = node.meta.get("module_path")
    return f"{node.target}" + (f" ({path})" if path else "")
