"""MSC's own ops (docs/architecture.md, "Opaque ops")."""

from __future__ import annotations

import functools

from torch import ops

import msc.ir.ops  # noqa: F401  registers them
from msc.passes.sharding.rule import Dim, Dims, LocalCall, Localized, Rule
from msc.passes.sharding.rules.binding import Bound, derived, dims_of, with_arguments
from msc.passes.sharding.rules.notation import from_notation

msc_ops = ops.msc


def _linear(bound: Bound) -> Rule:
    """A bias would be added once by each rank that holds a part of k: with one, k is whole."""
    weight = "kn" if bound.values["transposed"] else "nk"
    biased = bound.has_tensor("b")
    return from_notation(
        bound,
        f"...k,{weight},n->...n",
        whole="k" if biased else "",
        linear="x b | w b" if biased else "x | w",
    )


def _embedding(bound: Bound) -> Rule:
    """Each rank looks up the ids among its own rows; all others give zeros."""
    return from_notation(
        bound,
        "...,vd,->...d",
        whole="v" if bound.has_tensor("start") else "",
        contiguous="v",
        linear="w",
        localize=functools.partial(_start_of_rows, table_rows=bound.call.operands[1].shape[0]),
    )


def _nll_terms(bound: Bound) -> Rule:
    return from_notation(
        bound,
        "...v,...,->...,...",
        whole="v" if bound.has_tensor("start") else "",
        contiguous="v",
        contracted={} if bound.has_tensor("start") else {"v": ("logsumexp", "sum")},
        localize=_start_of_rows,
    )


def _start_of_rows(local: LocalCall, **known: int) -> Localized:
    start = local.start("v")
    if start is None:
        return local.target, local.args, local.kwargs
    return with_arguments(local, start=start, **known)


def _attention(bound: Bound) -> Rule:
    return from_notation(
        bound,
        "b(gr)sd,bgtd,bgte,b(gr)st->b(gr)se,b(gr)s",
        whole="stde",
    )


def _dropout(bound: Bound) -> Rule:
    """The shape stays the whole one: it numbers the elements, wherever they are computed."""
    dims = dims_of(bound.shape("x"))
    given = [d for d, entry in enumerate(bound.values["coordinates"]) if entry is not None]
    coordinates: list[Dims] = [(dims[d],) for d in given]

    def localize(local: LocalCall) -> Localized:
        index = 3  # of the argument `coordinates`
        own = list(local.args[index] if len(local.args) > index else local.kwargs["coordinates"])
        for d, entry in enumerate(own):
            own[d] = local.coordinates(0, d) if entry is None else entry
        return with_arguments(local, coordinates=own)

    return bound.rule(
        {"x": tuple(dims), "key": (), "coordinates": coordinates},
        [tuple(dims)],
        linear=[["x"]],
        localize=localize,
    )


def _rng_key(bound: Bound) -> Rule:
    state: tuple[Dim, ...] = tuple(dims_of(bound.shape("rng")))
    return bound.rule({"rng": state}, [()], whole=["d0"])


OPAQUE = [
    derived(_linear, msc_ops.linear),
    derived(_embedding, msc_ops.embedding),
    derived(_attention, msc_ops.attention),
    derived(_nll_terms, msc_ops.nll_terms),
    derived(_dropout, msc_ops.dropout),
    derived(_rng_key, msc_ops.rng_key),
]
