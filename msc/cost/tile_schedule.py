"""How much communication a fused kernel hides: its tiles, programs and chunks as events.

Program p of P makes tiles p, p + P, ...; a tile starts when its program is free and, in an
all-gather, its rows are there. Chunks come over one link after another, this rank's own first in an
all-gather and last in a reduce-scatter, in which every finished tile is sent at once. All ranks are
taken to run alike, so that what one sends is what it receives. Exact for that model, and instant.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TileSchedule:
    """A product of `ranks` chunks, each `rows` by `columns` tiles, on `programs` programs.

    tile_s: seconds of a tile. chunk_s: seconds that a chunk takes over the link. group: rows of
    tiles that are made column after column. splits: parts of a chunk that are announced alone.
    """

    ranks: int
    rows: int
    columns: int
    programs: int
    tile_s: float
    chunk_s: float
    group: int = 8
    splits: int = 1

    @property
    def tiles(self) -> int:
        """Tiles of the whole product."""
        return self.ranks * self.rows * self.columns

    @property
    def waves(self) -> float:
        """Tiles per program."""
        return self.tiles / self.programs

    @property
    def gemm_s(self) -> float:
        """Seconds of the product alone: the last wave may be partly empty."""
        return -(-self.tiles // self.programs) * self.tile_s

    @property
    def link_s(self) -> float:
        """Seconds of the communication alone."""
        return (self.ranks - 1) * self.chunk_s


@dataclass(frozen=True)
class Timeline:
    """Seconds of a product, of its communication, and of both in one kernel."""

    gemm_s: float
    link_s: float
    fused_s: float

    @property
    def hidden(self) -> float:
        """The share hidden of what could be: 1 if both together take as long as the longer one."""
        saved = self.gemm_s + self.link_s - self.fused_s
        return saved / min(self.gemm_s, self.link_s)

    @property
    def speedup(self) -> float:
        """Times faster than one after the other."""
        return (self.gemm_s + self.link_s) / self.fused_s


def grouped(index: int, rows: int, columns: int, group: int) -> tuple[int, int]:
    """Row and column of tile `index`: `group` rows at a time, column after column."""
    first = index // (group * columns) * group
    inside = index % (group * columns)
    height = min(rows - first, group)
    return first + inside % height, inside // height


def gather(schedule: TileSchedule) -> Timeline:
    """All-gather and product: a tile waits for the last part of its chunk that it reads."""
    per_chunk = schedule.rows * schedule.columns
    free = [0.0] * schedule.programs
    for index in range(schedule.tiles):
        step, inside = divmod(index, per_chunk)
        row, _ = grouped(inside, schedule.rows, schedule.columns, schedule.group)
        start = max(free[index % schedule.programs], _arrival(schedule, step, row))
        free[index % schedule.programs] = start + schedule.tile_s
    return Timeline(schedule.gemm_s, schedule.link_s, max(free))


def scatter(schedule: TileSchedule, sum_s: float = 0.0) -> Timeline:
    """Product and reduce-scatter: tiles queue for the link; sum_s: to add up the rank's own chunk.

    Every rank receives what it sends, so its last tile is there when its link is done.
    """
    per_chunk = schedule.rows * schedule.columns
    sent_s = schedule.chunk_s / per_chunk
    remote = schedule.tiles - per_chunk
    ends = [(index // schedule.programs + 1) * schedule.tile_s for index in range(schedule.tiles)]
    link = 0.0
    for end in ends[:remote]:
        link = max(link, end) + sent_s
    done = max(link, ends[-1])
    return Timeline(schedule.gemm_s, schedule.link_s, done + sum_s)


def _arrival(schedule: TileSchedule, step: int, row: int) -> float:
    """When the rows of a tile of the chunk that comes as number `step` are all there."""
    if step == 0:
        return 0.0
    parts = -(-(row + 1) * schedule.splits // schedule.rows)
    return (step - 1 + parts / schedule.splits) * schedule.chunk_s
