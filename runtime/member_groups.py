"""Groups of ranks that their members make by themselves, in whatever order their programs need.

torch names such a group after its ranks and after how many groups the process has. Members that
have made different numbers of groups, as of (0, 1) and then (1, 2), thus wait under different names
for ever. Here the number is that of earlier groups of the same ranks, which all of them have made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from msc.ir.torch_private import named_group

_job: Any = None  # the default group that the numbers are counted in
_made: Counter[tuple[int, ...]] = Counter()


def member_group(members: Sequence[int], timeout: timedelta | None = None) -> dist.ProcessGroup:
    """A new group of these ranks, of which this process is one; nobody else takes part.

    Any two members make the groups that both are in, in the same order.
    """
    global _job
    if _job is not dist.group.WORLD:
        _job = dist.group.WORLD
        _made.clear()
    ranks = tuple(sorted(members))
    _made[ranks] += 1
    name = f"msc.{'_'.join(map(str, ranks))}.{_made[ranks]}"
    return named_group(ranks, name, timeout)
