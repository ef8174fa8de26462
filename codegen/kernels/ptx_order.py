"""Finds wrong orderings of memory in PTX: what a model of whole programs cannot see.

    release    needs a barrier of the program after its last global store: one thread releases, and
               only the barrier orders the other threads' stores before it
    release    needs a full bulk wait after a TMA store: Triton 3.6 waits only until the source was
               read (`cp.async.bulk.wait_group.read`), when nothing need have been written
    TMA load   needs a proxy fence after an acquire: it goes through the async proxy, which an
               acquire of the generic proxy does not order

A forward dataflow analysis over the control-flow graph: what may hold on some path to an
instruction. PTX ISA 8.7, sections on the memory consistency model and on proxies.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_LABEL = re.compile(r"^\s*(\$\w+):")
_BRANCH = re.compile(r"\bbra(?:\.uni)?\s+(\$\w+)")
_RETURN = re.compile(r"^\s*(?:ret|exit)\b")
_STORE = re.compile(r"\bst\.(?!shared|local|param)[\w.:]*global")
_BULK_STORE = re.compile(r"\bcp\.async\.bulk[\w.:]*\.global\.shared")
_BULK_LOAD = re.compile(r"\bcp\.async\.bulk[\w.:]*\.shared::\w+\.global")
_BULK_WAIT = re.compile(r"\bcp\.async\.bulk\.wait_group\s+0")
_RELEASE = re.compile(r"\b(?:atom|red|st|fence)\.[\w.:]*(?:release|acq_rel)")
_ACQUIRE = re.compile(r"\b(?:atom|ld|fence)\.[\w.:]*(?:acquire|acq_rel)")
_BARRIER = re.compile(r"\bbar(?:rier)?\.sync")
_PROXY_FENCE = re.compile(r"\bfence\.proxy\.async(?:\.global)?\s*;")

UNORDERED_STORE = "release without a barrier after the last global store"
UNFINISHED_BULK = "release after a TMA store that may not have been written"
UNFENCED_LOAD = "TMA load after an acquire without a proxy fence"


@dataclass
class _Block:
    lines: list[tuple[int, str]] = field(default_factory=list)
    successors: list[int] = field(default_factory=list)


def findings(ptx: str) -> list[str]:
    """One line per wrong ordering, in the order of the text; empty if there is none."""
    blocks = _blocks(ptx)
    states: list[frozenset[str] | None] = [None] * len(blocks)
    found: dict[int, str] = {}
    queue = [(0, frozenset[str]())] if blocks else []
    while queue:
        number, arriving = queue.pop()
        before = states[number]
        state = arriving if before is None else before | arriving
        if state == before:
            continue
        states[number] = state
        after = _run(blocks[number], state, found)
        queue.extend((successor, after) for successor in blocks[number].successors)
    return [f"line {number}: {found[number]}" for number in sorted(found)]


def _run(block: _Block, state: frozenset[str], found: dict[int, str]) -> frozenset[str]:
    """The hazards after a block: "stored", "bulk" and "acquired"."""
    hazards = set(state)
    for number, line in block.lines:
        if _RELEASE.search(line):
            if "bulk" in hazards:
                found[number] = UNFINISHED_BULK
            if "stored" in hazards:
                found[number] = UNORDERED_STORE
        if _BULK_STORE.search(line):
            hazards.add("bulk")
        elif _STORE.search(line):
            hazards.add("stored")
        if _BARRIER.search(line):
            hazards.discard("stored")
        if _BULK_WAIT.search(line):
            hazards.discard("bulk")
        if _ACQUIRE.search(line):
            hazards.add("acquired")
        if _PROXY_FENCE.search(line):
            hazards.discard("acquired")
        if _BULK_LOAD.search(line) and "acquired" in hazards:
            found[number] = UNFENCED_LOAD
    return frozenset(hazards)


def _blocks(ptx: str) -> list[_Block]:
    """Basic blocks of the text, the first one is the entry."""
    blocks = [_Block()]
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    falls_through = True
    for number, raw in enumerate(ptx.splitlines(), 1):
        line = raw.split("//")[0]
        label = _LABEL.match(line)
        if label:
            if falls_through:
                blocks[-1].successors.append(len(blocks))
            labels[label[1]] = len(blocks)
            blocks.append(_Block())
            falls_through = True
            line = line[label.end() :]
        blocks[-1].lines.append((number, line))
        branch = _BRANCH.search(line)
        if branch or _RETURN.match(line):
            if branch:
                jumps.append((len(blocks) - 1, branch[1]))
            # a predicated branch may also fall through; after another, a label must come
            falls_through = bool(branch) and line.lstrip().startswith("@")
            if falls_through:
                blocks[-1].successors.append(len(blocks))
            blocks.append(_Block())
    for number, label_name in jumps:
        blocks[number].successors.append(labels[label_name])
    for block in blocks:
        block.successors = [successor for successor in block.successors if successor < len(blocks)]
    return blocks
