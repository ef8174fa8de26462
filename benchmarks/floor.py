"""The least time that a program's communication takes: its bytes at the speed of the moment."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from msc.ir import actions
from msc.ir.communication import COLLECTIVES, subgraph
from msc.ir.values import tensor_of

REPEATS = 3

Transfer = tuple[str, int, torch.dtype]
"""Kind, number of elements that one rank gives, dtype."""


def transfers(graph: fx.GraphModule) -> Counter[Transfer]:
    """What one rank gives to communication in one step; received messages are the sender's."""
    memo: dict[int, Counter[Transfer]] = {}

    def count(module: fx.GraphModule) -> Counter[Transfer]:
        if id(module) in memo:
            return memo[id(module)]
        found: Counter[Transfer] = Counter()
        for node in module.graph.nodes:
            if node.op == "call_module":
                found += count(subgraph(module, node))
            elif node.target in COLLECTIVES:
                value = tensor_of(node.all_input_nodes[0])
                found[COLLECTIVES[node.target], value.numel(), value.dtype] += 1
            elif node.target is actions.send:
                for operand in node.all_input_nodes:
                    value = tensor_of(operand)
                    found["send", value.numel(), value.dtype] += 1
        memo[id(module)] = found
        return found

    return count(graph)


def measure(transfer: Transfer) -> float:
    """Seconds of one transfer between the two ranks, by the fastest way that gloo has here.

    Collective. The median of a few; nothing else runs meanwhile.
    """
    kind, count, dtype = transfer
    value = torch.ones(count, dtype=dtype)
    return min(_median(way) for way in _ways(kind, value))


def seconds(found: Mapping[Transfer, int], speeds: Mapping[Transfer, float]) -> float:
    """All transfers of a step, one after the other."""
    return sum(number * speeds[transfer] for transfer, number in found.items())


def _ways(kind: str, value: Tensor) -> list[Callable[[], Any]]:
    size = dist.get_world_size()
    other = 1 - dist.get_rank()
    if kind == "all_gather":
        whole = value.new_empty(size * value.numel())
        return [
            lambda: dist.all_gather(list(whole.chunk(size)), value),
            lambda: _exchange(value, whole[: value.numel()], other),
        ]
    if kind == "all_reduce":
        again = torch.empty_like(value)
        return [
            lambda: dist.all_reduce(value, dist.ReduceOp.MAX),
            lambda: _exchange(value, again, other),
        ]
    if kind == "reduce_scatter":
        part = value.new_empty(value.numel() // size)
        return [lambda: _exchange(value[: part.numel()], part, other)]
    if kind == "send":
        if other == 1:
            return [lambda: dist.send(value, other)]
        return [lambda: dist.recv(value, other)]
    raise ValueError(f"{kind} between two ranks is not known")


def _exchange(given: Tensor, taken: Tensor, other: int) -> None:
    works = [dist.isend(given, other), dist.irecv(taken, other)]
    for work in works:
        assert work is not None
        work.wait()


def _median(way: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        way()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[REPEATS // 2]
