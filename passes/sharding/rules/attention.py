"""Attention: batch and heads are free; a query sees all keys, so that the keys stay whole.

Of grouped heads `(gr)`, either the groups g are split, or the query heads r of each of them: then
every rank has a part of each group's query heads, and all keys.
"""

from __future__ import annotations

from torch import ops

from msc.passes.sharding.rule import Rule
from msc.passes.sharding.rules.binding import Bound, derived
from msc.passes.sharding.rules.notation import from_notation

aten = ops.aten


def _scaled_dot_product(bound: Bound) -> Rule | None:
    """Query rows are free too unless causality depends on their place. None with dropout."""
    if bound.values["dropout_p"] > 0:
        return None
    whole = "dt" + ("s" if bound.values["is_causal"] else "")
    if not bound.values["enable_gqa"]:
        return from_notation(bound, "...sd,...td,...te,...st->...se", whole=whole, linear="value")
    if len(bound.shape("query")) != 4:
        return None
    return from_notation(
        bound,
        "b(gr)sd,bgtd,bgte,b(gr)st->b(gr)se",
        whole=whole,
        linear="value",
    )


ATTENTION = [derived(_scaled_dot_product, aten.scaled_dot_product_attention)]
