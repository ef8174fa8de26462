"""All ranks are there: they form the next generation, and are told whose state they go on with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msc.runtime.recovery.members import Stage
from msc.runtime.recovery.ranks import Ranks


def form(ranks: Ranks, from_storage: bool, may_grow: bool, before: Callable[[], None]) -> None:
    """Let them join.

    from_storage: their state is to come from there, whatever is in memory; may_grow: whether there
    may be more of them later; before: is called when the generation has its number, and nobody has
    joined it yet.
    """
    roster = ranks.roster
    common = None if from_storage else roster.newest_common()
    inside = [member.fit for member in ranks.members if member.fit is not None]
    ranks.generation += 1
    source: dict[str, Any] | None = None
    where: list[tuple[int, str, int]] = []
    if common is not None:
        holders = roster.holders(common)
        own = all(roster.of(rank) is node for rank, node in enumerate(holders))
        text = "memory" if own else "a neighbour's copy"
        source = {"mark": [common.generation, common.step], "text": text}
        where = [(rank, *node.address) for rank, node in enumerate(holders)]
    elif ranks.generation > 1 and not from_storage:
        ranks.say(
            "no snapshot is in memory of all ranks; state comes from storage, or the run from its "
            "beginning"
        )
    farthest = max(roster, key=lambda node: node.reached)
    for member in ranks.members:
        member.stage = Stage.JOINS
    before()
    for node in roster.seated.values():
        node.send(
            "join",
            number=ranks.generation,
            host=ranks.host,
            port=ranks.store.port,
            source=source,
            where=where,
            journal=farthest.address if farthest is not node else None,
            last=inside[0].last if inside else None,
            reached=farthest.reached,
            may_grow=may_grow,
        )
