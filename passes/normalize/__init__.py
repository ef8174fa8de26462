"""Normalization: from what torch.export gives to functional graphs of ATen and opaque MSC ops."""

from __future__ import annotations

from torch import fx

from msc.ir.passes import GraphPass
from msc.passes.normalize.dead_code import RemoveDeadCode
from msc.passes.normalize.drop_no_ops import DropNoOps
from msc.passes.normalize.fill_constants import FillConstants
from msc.passes.normalize.identity_index import IdentityIndex
from msc.passes.normalize.lift_constants import LiftConstants
from msc.passes.normalize.raise_attention import RaiseAttention
from msc.passes.normalize.raise_cross_entropy import RaiseCrossEntropy
from msc.passes.normalize.raise_dropout import RaiseDropout
from msc.passes.normalize.raise_eager_attention import RaiseEagerAttention
from msc.passes.normalize.raise_embedding import RaiseEmbedding
from msc.passes.normalize.raise_linear import RaiseLinear
from msc.passes.normalize.reshape_views import ReshapeViews
from msc.passes.normalize.split_slices import SplitSlices

NORMALIZE: tuple[GraphPass, ...] = (
    DropNoOps(),  # first: the patterns below would otherwise have to look through copies
    FillConstants(),
    RaiseAttention(),
    RaiseEagerAttention(),  # while repeated heads and masks still look as models write them
    IdentityIndex(),  # after attention, whose constant masks need no index any more
    RaiseLinear(),
    SplitSlices(),  # after linears, whose results it splits
    RaiseEmbedding(),
    RaiseCrossEntropy(),
    RaiseDropout(),  # after attention, which may leave dropout of its probabilities
    ReshapeViews(),
    LiftConstants(),
    RemoveDeadCode(),
)
"""The normalizing passes, in order."""


def normalize(gm: fx.GraphModule) -> int:
    """Run all of `NORMALIZE` on a captured graph; returns the number of changes."""
    changes = sum(each.run(gm, None) for each in NORMALIZE)
    gm.recompile()
    return changes
