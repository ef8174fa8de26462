"""Kills a writer at random bytes, and looks at what is left: `python kill_points.py FOLDER N`.

A process of its own, since each kill is a fork of it: it has one thread and no torch.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from msc.runtime.checkpoint.catalog import checkpoints, verify
from msc.runtime.checkpoint.manifest import data_name
from msc.runtime.checkpoint.storage import LocalStorage
from tests.runtime.checkpoint.writes import WORLD, image, save

PIECE = 1000


class Dying(LocalStorage):
    """Ends its process by SIGKILL when `left` bytes are written; every removal counts as one."""

    def __init__(self, folder: Path, left: int) -> None:
        super().__init__(folder)
        self.left = left

    def write(self, name: str, blocks: Iterable[memoryview]) -> None:
        super().write(name, self._counted(blocks))
        self._spend(1)  # before a file that is put gets its name

    def _counted(self, blocks: Iterable[memoryview]) -> Iterator[memoryview]:
        for block in blocks:
            for start in range(0, len(block), PIECE):
                piece = block[start : start + PIECE]
                if self.left < len(piece):
                    yield piece[: self.left]
                self._spend(len(piece))
                yield piece

    def remove(self, name: str) -> None:
        self._spend(1)
        super().remove(name)

    def _spend(self, amount: int) -> None:
        self.left -= amount
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def run(folder: Path, seed: int, total: int) -> int:
    """One kill; the step that is found then."""
    chance = random.Random(seed)
    storage = LocalStorage(folder)
    save(storage, 1)
    order = chance.sample(range(WORLD), WORLD)
    # Most bytes are data; the last few are records, and the very last what follows the commit.
    left = chance.choice([chance.randrange(total), total - chance.randrange(2000)])
    if seed % 4 == 0:
        left = total - chance.randrange(1, 5)
    child = os.fork()
    if child == 0:
        save(Dying(folder, left), 2, order=order, keep=1)
        os._exit(0)
    os.waitpid(child, 0)
    found = next(each for each in checkpoints(storage) if each.complete)
    verify(storage, found.folder)
    for rank in range(WORLD):
        assert storage.read(f"{found.folder}/{data_name(rank)}") == image(found.step, rank)
    assert [each.step for each in checkpoints(storage) if each.complete] in ([1], [2, 1], [2])
    again = save(storage, 2, attempt="bb", keep=1)  # the next life of the job
    assert next(each.folder for each in checkpoints(storage) if each.complete) == max(
        again, found.folder
    )
    shutil.rmtree(folder)
    return found.step


def main() -> None:
    """Prints how often each step was found."""
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    endless = 1 << 40
    counting = Dying(folder / "counting", endless)
    save(counting, 1)
    before = counting.left
    save(counting, 2, keep=1)
    total = before - counting.left
    found = [run(folder / str(seed), seed, total) for seed in range(count)]
    print(found.count(1), found.count(2))


if __name__ == "__main__":
    main()
