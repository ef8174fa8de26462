"""The cost of computing and communicating, in one unit that the passes minimize.

With a `Cluster` the unit is seconds. Without one it is FLOPs and bytes with fixed weights and no
launch floor: work that is not split weighs more than any collective that splits it, so that every
axis that divides is used, and among those plans the one with the least communication wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.cost.cluster import Cluster

_FLOP = 1.0
_MEMORY_BYTE = 0.05
_LINK_BYTE = 1.0


@dataclass(frozen=True)
class CostModel:
    """Costs on a cluster, or in weighted FLOPs and bytes.

    message_bytes: what a round of messages weighs without a cluster, whatever it carries. There is
        no absolute latency then, so the one who knows the model's sizes sets it.
    """

    cluster: Cluster | None = None
    message_bytes: float = 0.0

    def compute(self, flops: float, memory_bytes: float) -> float:
        """Cost of work that runs `flops` on the matrix units and moves `memory_bytes`."""
        if self.cluster is None:
            return _FLOP * flops + _MEMORY_BYTE * memory_bytes
        return flops / self.cluster.flops_per_s + memory_bytes / self.cluster.memory_bytes_per_s

    def collective(self, kind: str, payload_bytes: float, size: int) -> float:
        """Cost of a ring collective of `size` neighbours on a value of `payload_bytes` (whole)."""
        rounds = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}[kind]
        moved = rounds * payload_bytes * (size - 1) / size
        if self.cluster is None:
            return _LINK_BYTE * (moved + (rounds * self.message_bytes if size > 1 else 0.0))
        inside = size <= self.cluster.devices_per_node
        rate = self.cluster.node_bytes_per_s if inside else self.cluster.network_bytes_per_s
        latency = self.cluster.node_latency_s if inside else self.cluster.network_latency_s
        return rounds * (size - 1) * latency + moved / rate

    def replicated_parameter(self, num_elements: int, num_tokens: int) -> float:
        """Cost of a parameter that an axis does not shard.

        Without a cluster: a quarter of the FLOPs of its GEMM, enough that no saving in
        communication pays for copies of a weight.
        """
        if self.cluster is None:
            return _FLOP * num_elements * num_tokens / 2
        state_bytes = 16 * num_elements  # gradient, moments and masters, read once per step
        return state_bytes / self.cluster.memory_bytes_per_s
