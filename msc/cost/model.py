"""The cost of computing and communicating, in one unit that the passes minimize.

With a `Cluster` the unit is seconds. Without one it is FLOPs and bytes with fixed weights and no
launch floor: work that is not split weighs more than any collective that splits it, so that every
axis that divides is used, and among those plans the one with the least communication wins.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.cost.cluster import Cluster
from msc.cost.collectives import ROUNDS

_FLOP = 1.0
_MEMORY_BYTE = 0.05
_LINK_BYTE = 1.0
_SHARDING_ROUNDS = 8
"""Rounds of messages that sharding a weight takes at most: all-reduces of its operand's gradient
and of its result, and as many for what reads that."""


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
        rate = self.cluster.flops_per_s * self.cluster.gemm_efficiency
        return flops / rate + memory_bytes / self.cluster.memory_bytes_per_s

    def collective(self, kind: str, payload_bytes: float, size: int) -> float:
        """Cost of a ring collective of `size` neighbours on a value of `payload_bytes` (whole)."""
        rounds = ROUNDS[kind]
        moved = rounds * payload_bytes * (size - 1) / size
        if self.cluster is None:
            return _LINK_BYTE * (moved + (rounds * self.message_bytes if size > 1 else 0.0))
        rate, latency = self._link(size)
        return rounds * (size - 1) * latency + moved / rate

    def bucketed(self, payload_bytes: float, size: int) -> float:
        """Cost of an all-reduce that shares its messages with many others: of its bytes alone."""
        moved = 2 * payload_bytes * (size - 1) / size
        return _LINK_BYTE * moved if self.cluster is None else moved / self._link(size)[0]

    def send(self, payload_bytes: float) -> float:
        """Cost of passing `payload_bytes` to the next pipeline stage, across nodes."""
        if self.cluster is None:
            return _LINK_BYTE * payload_bytes
        return self.cluster.network_latency_s + payload_bytes / self.cluster.network_bytes_per_s

    def replicated_parameter(self, num_elements: int, num_tokens: int, size: int) -> float:
        """Cost of a parameter that an axis of `size` ranks does not shard.

        More than any saving in communication: who asks for the axis wants the weights split, and
        in a model so small that messages weigh more than work nothing else would split them. A
        byte on the links for each two multiply-adds of its GEMM, and the messages that shard it.
        Without a cluster it is the FLOPs of its GEMM, which no unequal parts cost (3 units on 2
        ranks take a sixth of three GEMMs longer than equal ones).
        """
        link_bytes = num_elements * num_tokens / 2
        if self.cluster is None:
            return _FLOP * 2 * num_elements * num_tokens
        rate, latency = self._link(size)
        state_bytes = 16 * num_elements  # gradient, moments and masters, read once per step
        held = state_bytes / self.cluster.memory_bytes_per_s
        return held + link_bytes / rate + _SHARDING_ROUNDS * (size - 1) * latency

    def _link(self, size: int) -> tuple[float, float]:
        """Bandwidth and latency between `size` neighbours."""
        assert self.cluster is not None
        if size <= self.cluster.devices_per_node:
            return self.cluster.node_bytes_per_s, self.cluster.node_latency_s
        return self.cluster.network_bytes_per_s, self.cluster.network_latency_s
