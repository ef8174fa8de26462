"""The rule table: how each op's operands and results share dimensions.

A line names a family of ops and how their dims correspond, as a string (`"mk,kn->mn"`) or by a kind
of op (`pointwise`, `reduction`, ...). To add an op, find its family's file and add it to a line;
`tests/passes/sharding/test_rules.py` then asks for sample calls and checks the rule on shards.
"""

from __future__ import annotations

from msc.ir.torch_private import OpOverload
from msc.passes.sharding.rule import Call, Rule
from msc.passes.sharding.rules.attention import ATTENTION
from msc.passes.sharding.rules.binding import Build, bind
from msc.passes.sharding.rules.contractions import CONTRACTIONS
from msc.passes.sharding.rules.creation import CREATION
from msc.passes.sharding.rules.custom import custom_rule
from msc.passes.sharding.rules.indexing import INDEXING
from msc.passes.sharding.rules.joining import JOINING
from msc.passes.sharding.rules.loss import LOSS
from msc.passes.sharding.rules.matrices import MATRICES
from msc.passes.sharding.rules.norms import NORMS
from msc.passes.sharding.rules.opaque import OPAQUE
from msc.passes.sharding.rules.places import PLACES
from msc.passes.sharding.rules.pointwise import POINTWISE
from msc.passes.sharding.rules.reductions import REDUCTIONS
from msc.passes.sharding.rules.views import VIEWS

TABLE = [
    *OPAQUE,
    *CONTRACTIONS,
    *ATTENTION,
    *POINTWISE,
    *VIEWS,
    *JOINING,
    *INDEXING,
    *REDUCTIONS,
    *MATRICES,
    *NORMS,
    *PLACES,
    *LOSS,
    *CREATION,
]

_BUILD: dict[OpOverload, Build] = {op: line.build for line in TABLE for op in line.ops}


def rule_for(call: Call) -> Rule | None:
    """The factor rule of a call; None if its op has none, or not for these arguments."""
    build = _BUILD.get(call.target)
    own = custom_rule(call.target)  # a user's word comes before the table's
    if own is not None:
        build = own.build
    return None if build is None else build(bind(call))
