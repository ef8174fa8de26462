"""Seconds of one communication on a cluster: latencies and bandwidths of its links.

n ranks on m nodes with k ranks on each; B bytes is the whole value; a and b are latency and bytes
per second of one device's links, inside a node (in) and across nodes (net).

ring   r rounds (all-gather and reduce-scatter 1, all-reduce 2) of n-1 steps, of which m-1 cross
       nodes: r ((n-m) a_in + (m-1) a_net) + r (n-1)/n B / min(b_in, k b_net). NCCL runs a ring per
       network adapter, so that all k adapters of a node work. Patarasuk and Yuan, JPDC 2009;
       latencies as NCCL counts them (src/graph/tuning.cc).
tree   all-reduce alone: 2 ((k-1) a_in + ceil(log2 m) a_net) + 2 B / min(b_in, k b_net): up and down
       two binary trees at once. Sanders, Speck and Traeff, Parallel Computing 2009. An all-reduce
       takes the faster of the two.
all-to-all   each rank sends B_rank/n to each: (k-1) a_in + (n-k) a_net, and the slower of
       (k-1)/n B_rank / b_in and (n-k)/n B_rank / b_net. Pairwise; Thakur et al., IJHPCA 2005.
send   a + B / b of the link.
"""

from __future__ import annotations

import math

from msc.cost.cluster import Cluster
from msc.cost.topology import Span

ROUNDS = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""Passes of a ring over its ranks."""


def collective_seconds(cluster: Cluster, kind: str, payload_bytes: float, span: Span) -> float:
    """Seconds of "all_gather", "reduce_scatter", "all_reduce" or "all_to_all".

    payload_bytes: of the whole value; of an all-to-all what one rank sends.
    """
    if span.size == 1:
        return 0.0
    if kind == "all_to_all":
        return _all_to_all(cluster, payload_bytes, span)
    ring = _ring(cluster, ROUNDS[kind], payload_bytes, span)
    return min(ring, _tree(cluster, payload_bytes, span)) if kind == "all_reduce" else ring


def send_seconds(cluster: Cluster, payload_bytes: float, across_nodes: bool) -> float:
    """Seconds of a message from one device to another."""
    if across_nodes:
        return cluster.network_latency_s + payload_bytes / cluster.network_bytes_per_s
    return cluster.node_latency_s + payload_bytes / cluster.node_bytes_per_s


def _rate(cluster: Cluster, span: Span) -> float:
    """Bytes per second at which a value passes through each rank."""
    if span.nodes == 1:
        return cluster.node_bytes_per_s
    network = span.per_node * cluster.network_bytes_per_s
    return network if span.per_node == 1 else min(cluster.node_bytes_per_s, network)


def _ring(cluster: Cluster, rounds: int, payload_bytes: float, span: Span) -> float:
    steps = (span.size - span.nodes) * cluster.node_latency_s
    steps += (span.nodes - 1) * cluster.network_latency_s
    moved = payload_bytes * (span.size - 1) / span.size
    return rounds * (steps + moved / _rate(cluster, span))


def _tree(cluster: Cluster, payload_bytes: float, span: Span) -> float:
    inside = math.ceil(span.size / span.nodes) - 1
    hops = inside * cluster.node_latency_s
    hops += math.ceil(math.log2(span.nodes)) * cluster.network_latency_s
    return 2 * (hops + payload_bytes / _rate(cluster, span))


def _all_to_all(cluster: Cluster, sent_bytes: float, span: Span) -> float:
    inside, across = span.per_node - 1, span.size - span.per_node
    latency = inside * cluster.node_latency_s + across * cluster.network_latency_s
    part = sent_bytes / span.size
    return latency + max(
        inside * part / cluster.node_bytes_per_s, across * part / cluster.network_bytes_per_s
    )
