"""Checks between processes: versions, clocks, every pair, all-to-all inside a node, all-reduce.

All ranks run them in one order; what each has seen goes through the store to rank 0, which judges.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from msc.runtime.doctor.check import SKIPPED, Check, Value, failed, passed
from msc.runtime.doctor.peers import Peers

CLOCK_S = 1.0
"""Known to be bad: clocks further apart than this are not synchronized at all."""
_PINGS = 5
_WORD = 1_000_003  # of each rank, so that no two send the same


def check_versions(peers: Peers) -> Check:
    """Python, torch, MSC and CUDA are the same on all ranks."""
    told = peers.tell("versions", peers.facts())
    if peers.rank:
        return passed("versions")
    problems, blamed = [], set()
    for name in told[0]:
        usual = Counter(facts[name] for facts in told).most_common(1)[0][0]
        for rank, facts in enumerate(told):
            if facts[name] != usual:
                problems.append(f"rank {rank} has {name} {facts[name]}, most have {usual}")
                blamed.add(rank)
    if problems:
        return failed("versions", "; ".join(problems), tuple(sorted(blamed)))
    return passed("versions", ", ".join(f"{name} {value}" for name, value in told[0].items()))


def check_clocks(peers: Peers) -> Check:
    """How far each rank's clock is from rank 0's, by the fastest of some exchanges in the store."""
    offset = 0.0
    for rank in range(1, peers.world):
        if peers.rank not in (0, rank):
            continue
        best = float("inf")
        for turn in range(_PINGS):
            ping, pong = f"ping/{rank}/{turn}", f"pong/{rank}/{turn}"
            if peers.rank == 0:
                peers.store.get(ping)
                peers.store.set(pong, repr(peers.now()))
            else:
                sent = peers.now()
                peers.store.set(ping, "")
                answer = float(peers.store.get(pong))
                back = peers.now()
                if back - sent < best:
                    best, offset = back - sent, answer - (sent + back) / 2
    told = peers.tell("clocks", offset)
    if peers.rank:
        return passed("clocks")
    far = [rank for rank, value in enumerate(told) if abs(value) > CLOCK_S]
    largest = max(map(abs, told))
    if far:
        words = ", ".join(f"rank {rank} by {told[rank]:+.3f} s" for rank in far)
        return failed("clocks", f"apart from rank 0's: {words}", tuple(far))
    return passed("clocks", largest=Value(largest, "s", ceiling=CLOCK_S))


def rounds(world: int) -> list[list[tuple[int, int]]]:
    """All pairs of ranks, in rounds in which each rank has one partner at most."""
    seats = list(range(world + world % 2))
    half = len(seats) // 2
    found = []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        found.append([(min(pair), max(pair)) for pair in pairs if max(pair) < world])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found


def check_pairs(peers: Peers) -> Check:
    """Every pair of ranks exchanges words that say who has sent them."""
    given = _words(peers, peers.rank)
    seen: dict[str, Any] = {}
    for each in rounds(peers.world):
        for pair in each:
            if peers.rank in pair:
                other = pair[0] + pair[1] - peers.rank
                started = time.perf_counter()
                taken = peers.exchange(other, given)
                seconds = time.perf_counter() - started
                wrong = int((taken != _words(peers, other)).sum())
                seen[str(other)] = [wrong, seconds]
    told = peers.tell("pairs", seen)
    if peers.rank:
        return passed("pairs")
    bad = [(a, int(b), w) for a, row in enumerate(told) for b, (w, _) in row.items() if w]
    if bad:
        words = ", ".join(f"{b} to {a} ({wrong} words)" for a, b, wrong in bad)
        return failed("pairs", f"arrived changed: from rank {words}", _common(bad))
    times = {(a, int(b)): s for a, row in enumerate(told) for b, (_, s) in row.items()}
    slowest = max(times, key=lambda pair: times[pair])
    size = 16 * peers.numbers  # both ways
    rates = {
        "slowest": Value(size / times[slowest] / 1e9, "GB/s"),
        "median": Value(size / sorted(times.values())[len(times) // 2] / 1e9, "GB/s"),
    }
    detail = f"{len(times) // 2} pairs, the slowest is ranks {slowest[0]} and {slowest[1]}"
    return passed("pairs", detail, **rates)


def _common(bad: Sequence[tuple[int, int, int]]) -> tuple[int, ...]:
    """The rank that all bad messages have in common; else all ranks of them."""
    sets = [{a, b} for a, b, _ in bad]
    common = set.intersection(*sets)
    return tuple(sorted(common if len(common) == 1 else set.union(*sets)))


def _words(peers: Peers, rank: int) -> Tensor:
    return torch.arange(peers.numbers, device=peers.device) + rank * _WORD


def check_all_to_all(peers: Peers, group: Any, members: Sequence[int]) -> Check:
    """Ranks of one machine send to each other at once, words that say whose they are."""
    count = max(peers.numbers // len(members), 1)
    place = members.index(peers.rank)
    base = torch.arange(count, device=peers.device)
    given = torch.stack([base + peers.rank * _WORD + to for to in range(len(members))])
    wanted = torch.stack([base + member * _WORD + place for member in members])
    started = time.perf_counter()
    taken = peers.all_to_all(given, group)
    seconds = time.perf_counter() - started
    wrong = [members[row] for row in range(len(members)) if not taken[row].equal(wanted[row])]
    told = peers.tell("all-to-all", [wrong, given.nbytes / seconds / 1e9])
    if peers.rank:
        return passed("all-to-all")
    bad = [(rank, sender, 1) for rank, (senders, _) in enumerate(told) for sender in senders]
    if bad:
        words = ", ".join(f"rank {sender} to {rank}" for rank, sender, _ in bad)
        return failed("all-to-all", f"arrived changed: from {words}", _common(bad))
    slowest = min(rate for _, rate in told)
    return passed("all-to-all", slowest=Value(slowest, "GB/s"))


def check_all_reduce(peers: Peers) -> Check:
    """The sum over all ranks of small whole numbers in float32 is exact, bit for bit."""
    index = torch.arange(2 * peers.numbers, device=peers.device)
    value = ((index + peers.rank) % 7).float()
    wanted = sum((index + rank) % 7 for rank in range(peers.world))
    assert isinstance(wanted, Tensor)
    started = time.perf_counter()
    found = peers.all_reduce(value)
    seconds = time.perf_counter() - started
    wrong = int((found != wanted.float()).sum())
    told = peers.tell("all-reduce", [wrong, value.nbytes / seconds / 1e9])
    if peers.rank:
        return passed("all-reduce")
    bad = [rank for rank, (count, _) in enumerate(told) if count]
    if bad:
        counts = ", ".join(f"{told[rank][0]} of them on rank {rank}" for rank in bad)
        # where all have the same wrong sum, any of them may have given a wrong summand
        blamed = tuple(bad) if len(bad) < peers.world else ()
        return failed("all-reduce", f"sums of {index.numel()} numbers are wrong: {counts}", blamed)
    return passed("all-reduce", slowest=Value(min(rate for _, rate in told), "GB/s"))


def check_peers(peers: Peers, group: Any, members: Sequence[int]) -> list[Check]:
    """All of the above, judged by rank 0; after one that could not end the others are not run.

    group, members: of the ranks on this machine.
    """
    checks: dict[str, Callable[[], Check]] = {
        "versions": lambda: check_versions(peers),
        "clocks": lambda: check_clocks(peers),
        "pairs": lambda: check_pairs(peers),
        "all-to-all": lambda: check_all_to_all(peers, group, members),
        "all-reduce": lambda: check_all_reduce(peers),
    }
    found: list[Check] = []
    broken = ""
    for name, check in checks.items():
        if broken:
            found.append(Check(name, SKIPPED, f"'{broken}' did not come to an end"))
            continue
        started = time.perf_counter()
        try:
            result = check()
            peers.wait_for_all(name)
        except RuntimeError as error:
            text = str(error).strip().partition("\n")[0]
            broken = name
            result = failed(name, f"rank {peers.rank}: {type(error).__name__}: {text}")
        found.append(replace(result, seconds=time.perf_counter() - started))
    return found
