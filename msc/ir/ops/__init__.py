"""Opaque ops. Importing this package registers them as `torch.ops.msc.*`."""

from msc.ir.ops import attention as _attention
from msc.ir.ops import collectives as _collectives
from msc.ir.ops import embedding as _embedding
from msc.ir.ops import epilogue as _epilogue
from msc.ir.ops import fused_collectives as _fused_collectives
from msc.ir.ops import gate as _gate
from msc.ir.ops import linear as _linear
from msc.ir.ops import linear_loss as _linear_loss
from msc.ir.ops import loss as _loss
from msc.ir.ops import norm as _norm
from msc.ir.ops import norm_sum as _norm_sum
from msc.ir.ops import random as _random
from msc.ir.ops import repad as _repad
from msc.ir.ops import statistics as _statistics
from msc.ir.ops.library import KERNELS, arguments

__all__ = ["KERNELS", "arguments"]

# What the imports above are for: each defines its family of ops.
FAMILIES = (
    _attention,
    _collectives,
    _embedding,
    _epilogue,
    _fused_collectives,
    _gate,
    _linear,
    _linear_loss,
    _loss,
    _norm,
    _norm_sum,
    _random,
    _repad,
    _statistics,
)
