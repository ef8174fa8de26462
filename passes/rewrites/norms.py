"""Norms by their structure: a row-wise normalization over the last dim, then an affine.

    %u = aten.layer_norm(%x, [n], %w, %b, eps)       %q = aten.square(%x)  # or pow, or x * x
                                                     %m = aten.mean.dim(%q, [-1], True)
                                                     %r = aten.rsqrt(%m + eps)
                                                     %z = %x * %r
                                                     %u = %w * %z

`aten.layer_norm` and `aten.rms_norm` are one call, maybe between casts; the root mean square norm
(Zhang and Sennrich, 2019, equation 4) and LayerNorm (Ba et al., 2016, equation 4) are also found
written out, with casts, as Hugging Face models have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from msc.ir.ops.library import compute_dtype
from msc.ir.walks import num_reads
from msc.passes.normalize.rewrite import Emitter, aten, named_arguments, shape_of
from msc.passes.rewrites.origins import Origins

FUSED: dict[Any, str] = {aten.layer_norm.default: "layer_norm", aten.rms_norm.default: "rms_norm"}
_CAST = aten.to.dtype  # the one form that normalization leaves of a conversion


@dataclass(frozen=True)
class Norm:
    """A norm of `stream`.

    output: what it gives; nodes: its calls, the output among them; form: equal for two norms whose
    values before the affine are the same function of the stream; normalized: that value, None
    where one call computes it together with the affine; vectors: the affine's scale and shift, of
    shape `[n]`, None where there is none.
    """

    stream: fx.Node
    output: fx.Node
    nodes: frozenset[fx.Node]
    form: tuple[str, ...]
    normalized: fx.Node | None
    vectors: tuple[fx.Node | None, fx.Node | None]

    def describe(self) -> str:
        """Its form in words."""
        return " ".join(self.form)

    @property
    def eps(self) -> float:
        """What is added to the mean square, or the variance."""
        text = self.form[1].removeprefix("eps=")
        if text == "None":  # of `aten.rms_norm`: the smallest step of the dtype it computes in
            dtype: torch.dtype = self.call.args[0].meta["val"].dtype  # type: ignore[union-attr]
            return torch.finfo(compute_dtype(dtype)).eps
        return float(text)

    @property
    def call(self) -> fx.Node:
        """The one call that computes it but for casts, where `normalized` is None."""
        (found,) = (node for node in self.nodes if node.target in FUSED)
        return found

    def split(self, gm: fx.GraphModule) -> Norm:
        """The same norm with its normalized value as a node of its own."""
        if self.normalized is not None:
            return self
        call = self.call
        target: Any = call.target
        shape, eps = shape_of(call), _eps(call)
        vectors = (None, None) if target is aten.layer_norm.default else (None,)
        emit = Emitter(gm, call)
        normalized = emit(target, call.args[0], [shape[-1]], *vectors, eps, shape=shape)
        scaled = affine(emit, normalized, self.vectors)
        call.replace_all_uses_with(scaled)
        gm.graph.erase_node(call)
        output = scaled if self.output is call else self.output
        nodes = self.nodes - {call} | {normalized, scaled}
        return Norm(self.stream, output, nodes, self.form, normalized, self.vectors)


def affine(
    emit: Emitter, normalized: fx.Node, vectors: tuple[fx.Node | None, fx.Node | None]
) -> fx.Node:
    """`normalized * scale + shift`, in one pass over memory."""
    scale, shift = vectors
    shape = shape_of(normalized)
    if scale is not None and shift is not None:
        return emit(aten.addcmul.default, shift, normalized, scale, shape=shape, like=normalized)
    if scale is not None:
        return emit(aten.mul.Tensor, normalized, scale, shape=shape, like=normalized)
    if shift is not None:
        return emit(aten.add.Tensor, normalized, shift, shape=shape, like=normalized)
    return normalized


def norms_of(stream: fx.Node, origins: Origins) -> list[Norm]:
    """Every norm that reads `stream`, in the order of the graph's edges."""
    found: list[Norm] = []
    for user in stream.users:
        norm = _fused(user, stream, origins) or _written_out(user, stream, origins)
        if norm is not None:
            found.append(norm)
    return found


def _fused(first: fx.Node, stream: fx.Node, origins: Origins) -> Norm | None:
    """The norm of one call, which is `first`, or all that reads it where it is a cast."""
    cast = first.target is _CAST
    node = _only_user(first) if cast else first
    if node is None or node.target not in FUSED:
        return None
    named = named_arguments(node, {"weight": None, "bias": None})
    read = first if cast else stream
    if named["input"] is not read or list(named["normalized_shape"]) != [shape_of(stream)[-1]]:
        return None
    vectors = (named["weight"], named.get("bias"))
    form: tuple[str, ...] = (FUSED[node.target], f"eps={_eps(node)}")
    nodes = {node}
    if not cast:
        return Norm(stream, node, frozenset(nodes), form, None, vectors)
    nodes.add(first)
    form = (*form, f"in {first.meta['val'].dtype}")
    if vectors == (None, None):
        return _with_affine(stream, node, nodes, form, origins)
    output = _through_cast(node, nodes)
    form = (*form, f"gives {output.meta['val'].dtype}")
    return Norm(stream, output, frozenset(nodes), form, None, vectors)


def _eps(node: fx.Node) -> float | None:
    """The eps of a call in `FUSED`; None is the smallest of the dtype."""
    default = 1e-5 if node.target is aten.layer_norm.default else None
    found: float | None = named_arguments(node, {"eps": default})["eps"]
    return found


def _written_out(first: fx.Node, stream: fx.Node, origins: Origins) -> Norm | None:
    """The norm whose first call on the stream, or on a cast of it, is `first`."""
    if first.target is _CAST:
        base, nodes = first, {first}
        readers = list(base.users)
    else:
        base, nodes = stream, set()
        readers = [first]
    centers = [user for user in readers if _is_mean(user, base)]
    squares = [user for user in readers if _is_square(user, base)]
    if len(centers) + len(squares) != 1:
        return None
    if centers:
        name, values = "layer_norm", set(centers[0].users)  # twice, where it is subtracted twice
        if not all(_is_call(node, aten.sub.Tensor, (base, centers[0])) for node in values):
            return None
        squares = [user for each in values for user in each.users if _is_square(user, each)]
        nodes |= {centers[0], *values}
    else:
        name, values = "rms_norm", {base}
    steps = _statistics(squares[0]) if len(squares) == 1 else None
    if steps is None:
        return None
    *statistics, root, eps = steps
    scaled = _only_user(root)
    if scaled is None or not any(_divides(scaled, value, root) for value in values):
        return None
    ends = {squares[0], scaled}
    if centers and {user for value in values for user in value.users} != ends:
        return None
    read = {centers[0], *values} if centers else ends
    if base is not stream and set(base.users) != read:
        return None
    nodes |= {*ends, *statistics, root}
    form = (name, f"eps={eps}", f"in {base.meta['val'].dtype}")
    return _with_affine(stream, scaled, nodes, form, origins)


def _is_call(node: fx.Node, target: Any, args: tuple[fx.Node, ...]) -> bool:
    return node.target is target and node.args == args and not node.kwargs


def _is_mean(node: fx.Node, base: fx.Node) -> bool:
    """Whether a call is the mean of `base` over its last dim, which is kept."""
    if node.target is not aten.mean.dim:
        return False
    named = named_arguments(node, {"keepdim": False, "dtype": None})
    rank = len(shape_of(base))
    dims = [dim % rank for dim in named["dim"] or ()]
    return named["self"] is base and dims == [rank - 1] and bool(named["keepdim"])


def _is_square(node: fx.Node, base: fx.Node) -> bool:
    if node.target is aten.pow.Tensor_Scalar:
        return node.args == (base, 2)
    if node.target is aten.mul.Tensor:
        return node.args == (base, base)
    return node.target is aten.square.default and node.args == (base,)


def _statistics(square: fx.Node) -> tuple[Any, ...] | None:
    """mean, mean + eps, its root or inverse root, and eps, behind the square of the stream."""
    mean = _only_user(square)
    if mean is None or not _is_mean(mean, square):
        return None
    shifted = _only_user(mean)
    if shifted is None or shifted.target not in (aten.add.Tensor, aten.add.Scalar):
        return None
    numbers = [each for each in shifted.args if not isinstance(each, fx.Node)]
    root = _only_user(shifted)
    if len(shifted.args) != 2 or len(numbers) != 1 or shifted.kwargs or root is None:
        return None
    inverse = root.target is aten.rsqrt.default or (
        root.target is aten.pow.Tensor_Scalar and root.args[1] == -0.5
    )
    if not inverse and root.target is not aten.sqrt.default:
        return None
    return mean, shifted, root, numbers[0]


def _divides(node: fx.Node, base: fx.Node, root: fx.Node) -> bool:
    """Whether `node` is the stream over the root of its mean square."""
    if root.target is aten.sqrt.default:
        return node.target is aten.div.Tensor and node.args == (base, root)
    return node.target is aten.mul.Tensor and set(node.args) == {base, root}


def _with_affine(
    stream: fx.Node, scaled: fx.Node, nodes: set[fx.Node], form: tuple[str, ...], origins: Origins
) -> Norm:
    """Follow the casts and the affine behind the normalized value."""
    normalized = _through_cast(scaled, nodes)
    form = (*form, f"gives {normalized.meta['val'].dtype}")
    output = normalized
    vectors: list[fx.Node | None] = []
    for target in (aten.mul.Tensor, aten.add.Tensor):
        found = _with_vector(output, target, origins)
        if found is not None:
            output, vector = found
            nodes.add(output)
        vectors.append(None if found is None else vector)
    output = _through_cast(output, nodes)
    scale, shift = vectors
    return Norm(stream, output, frozenset(nodes), form, normalized, (scale, shift))


def _through_cast(node: fx.Node, nodes: set[fx.Node]) -> fx.Node:
    """The cast that is all that reads `node`, if there is one."""
    user = _only_user(node)
    if user is None or user.target is not _CAST:
        return node
    nodes.add(user)
    return user


def _with_vector(node: fx.Node, target: Any, origins: Origins) -> tuple[fx.Node, fx.Node] | None:
    """The call that is all that reads `node` and combines it with a vector of parameters."""
    user = _only_user(node)
    if user is None or user.target is not target or len(user.args) != 2 or user.kwargs:
        return None
    left, right = user.args
    vector = right if left is node else left
    if not isinstance(vector, fx.Node) or shape_of(vector) != shape_of(node)[-1:]:
        return None
    return (user, vector) if origins.of_parameters(vector) else None


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if num_reads(node) == 1 else None
