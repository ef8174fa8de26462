"""How fused kernels of several ranks tell each other that data is there.

A flag counts arrivals and is never reset: call number e (from 1) waits for the count that e calls
give, so that calls follow each other without a barrier between them. What a flag guards has two
buffers, used in turns: a rank can be one call ahead of another, but not two, because its own call
waits for data of every rank's call (see `GatherGemm` and `GemmScatter`). Flags that several ranks
raise are doubled with the buffers; else a rank that is one call ahead would count for a slower one.

wait    poll with an acquire at system scope. Triton 3.6 has no atomic load; adding 0 is compiled to
        one (`ld.acquire.sys`). Then a proxy fence, where what was acquired is read by the TMA unit.
signal  a barrier of the program, so that all of its threads' stores come before the release of the
        one thread that signals, then a release at system scope. What is signalled is written by
        plain stores: Triton 3.6 waits only for the reads of a TMA store.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, ceil_div
from msc.codegen.kernels.source import fill
from msc.ir.errors import PlanError

FEW_WAVES = 6
MAX_SPLITS = 4

WAIT = """
@triton.jit
def wait(flag, want):
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < want:
        pass
    <<fence>>
"""

FENCE = """
# the TMA unit reads through another proxy, which the acquire does not order
tl.inline_asm_elementwise(
    "fence.proxy.async.global; mov.u32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1
)
"""

SIGNAL = """
@triton.jit
def signal(flag):
    # one thread releases; the barrier puts the stores of all threads before it
    tl.debug_barrier()
    tl.atomic_add(flag, 1, sem="release", scope="sys")
"""

WAIT_ARGUMENTS = (
    Argument("flags", "pointer", "int32"),
    Argument("rank", "int32"),
    Argument("want", "int32"),
)
"""What a kernel that waits for shards takes besides its tensors."""


def wait(through_tma: bool) -> str:
    """The function `wait(flag, want)`."""
    return fill(WAIT, fence=FENCE if through_tma else "")


def signal() -> str:
    """The function `signal(flag)`."""
    return SIGNAL


@dataclass(frozen=True)
class Chunks:
    """`rows` rows in equal chunks, one per rank, each announced by `splits` flags."""

    rows: int
    ranks: int
    splits: int = 1

    def __post_init__(self) -> None:
        if self.rows % self.ranks:
            raise PlanError(
                f"a fused kernel needs equal shards: {self.rows} rows do not divide over "
                f"{self.ranks} ranks. Uneven shards take the collective and the product apart."
            )
        if not _all_announce(self.chunk, self.splits):
            raise PlanError(
                f"{self.splits} flags for a shard of {self.chunk} rows leave one without rows"
            )

    @property
    def chunk(self) -> int:
        """Rows of one rank."""
        return self.rows // self.ranks

    @property
    def flags(self) -> int:
        """Flags on one rank: `source * splits + part`."""
        return self.ranks * self.splits

    @property
    def part(self) -> int:
        """Rows that one flag announces; the last part of a chunk may have fewer."""
        return ceil_div(self.chunk, self.splits)


def splits_for(tiles: int, programs: int, chunk_rows: int) -> int:
    """Flags per shard: one, or up to four where there are few waves of tiles to hide behind."""
    waves = tiles / programs
    wanted = 1 if waves >= FEW_WAVES else 2 if waves >= FEW_WAVES / 2 else MAX_SPLITS
    return max(splits for splits in range(1, wanted + 1) if _all_announce(chunk_rows, splits))


def _all_announce(chunk: int, splits: int) -> bool:
    """Whether each flag has rows to announce: of 9 rows, 4 flags announce 3, 3, 3 and none."""
    return splits >= 1 and (splits - 1) * ceil_div(chunk, splits) < chunk


def buffer_of(call: int) -> int:
    """Which of the two buffers call number `call` (from 1) uses."""
    return call % 2


def uses_of_buffer(call: int) -> int:
    """How often the buffer of call number `call` (from 1) has been used, with this call."""
    return (call + 1) // 2
