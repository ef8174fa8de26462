"""What a program costs: FLOPs, bytes, communication; on a cluster described by a file.

Reads only the intermediate representation. No device is ever probed.
"""

from msc.cost.cluster import Cluster
from msc.cost.flops import call_flops, window_of
from msc.cost.model import CostModel

__all__ = ["Cluster", "CostModel", "call_flops", "window_of"]
