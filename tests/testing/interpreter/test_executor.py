"""The executor by litmus tests: what a weak memory allows is seen, what it forbids never is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from msc.codegen.kernels import protocol
from msc.codegen.kernels.description import SM_90, Argument, Kernel
from msc.codegen.kernels.source import module
from msc.testing.interpreter import Deadlock, Executor
from msc.testing.interpreter.copy_engine import CopyEngine

WRITER = """
@triton.jit
def writer(data, flag):
    at = tl.arange(0, 8)
    tl.store(data + at, at + 1)
    tl.atomic_add(flag, 1, sem="release", scope="sys")
"""

READER = """
@triton.jit
def reader(data, flag, found):
    at = tl.arange(0, 8)
    while tl.atomic_add(flag, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(found + at, tl.load(data + at))
"""

DESCRIBED = """
@triton.jit
def reader(data, flag, found):
    wait(flag, 1)
    found.store([0, 0], data.load([0, 0]))
"""

DESCRIBED_WRITER = """
@triton.jit
def writer(data, source, flag):
    data.store([0, 0], source.load([0, 0]))
    <<finish>>
    tl.atomic_add(flag, 1, sem="release", scope="sys")
"""

FINISH = (
    '    tl.inline_asm_elementwise("cp.async.bulk.wait_group 0; fence.proxy.async.global; '
    'mov.u32 $0, $1;", "=r,r", [0], dtype=tl.int32, is_pure=False, pack=1)'
)


def kernel(*texts: str, entry: str, names: str, programs: int = 1, described: str = "") -> Kernel:
    arguments = tuple(
        Argument(name, "descriptor", "int32", (2, 4))
        if name in described.split()
        else Argument(name, "pointer", "int32")
        for name in names.split()
    )
    text = module("A test.", {}, *texts)
    return Kernel(entry, text, entry, arguments, (programs,), SM_90, 4, 1)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def passed(seed: int, change: Callable[[str], str]) -> bool:
    """One rank writes and signals, another waits and reads: whether it read what was written."""
    data, flag, found = zeros(8), zeros(1), zeros(8)
    executor = Executor(seed, ranks=2)
    write = kernel(change(WRITER), entry="writer", names="data flag")
    read = kernel(change(READER), entry="reader", names="data flag found")
    executor.launch(0, write, {"data": data, "flag": flag})
    executor.launch(1, read, {"data": data, "flag": flag, "found": found})
    executor.run()
    return torch.equal(found, torch.arange(1, 9, dtype=torch.int32))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace('"release"', '"relaxed"'),
        lambda text: text.replace('"acquire"', '"relaxed"'),
    ],
    ids=["no release", "no acquire"],
)
def test_message_passing_needs_both_sides(change: Callable[[str], str]) -> None:
    assert not all(passed(seed, change) for seed in range(10))


def test_message_passing() -> None:
    assert all(passed(seed, str) for seed in range(20))


@pytest.mark.parametrize("fence", [True, False])
def test_a_descriptor_reads_through_a_proxy_of_its_own(fence: bool) -> None:
    outcomes: list[bool] = []
    for seed in range(10):
        data, flag, found = zeros(2, 4), zeros(1), zeros(2, 4)
        executor = Executor(seed, ranks=2)
        wait = protocol.wait(through_tma=fence)
        described = "data found"
        names = "data flag found"
        read = kernel(wait, DESCRIBED, entry="reader", names=names, described=described)
        write = kernel(WRITER, entry="writer", names="data flag")
        executor.launch(0, write, {"data": data, "flag": flag})
        executor.launch(1, read, {"data": data, "flag": flag, "found": found})
        executor.run()
        outcomes.append(torch.equal(found.flatten(), torch.arange(1, 9, dtype=torch.int32)))
    assert all(outcomes) == fence


@pytest.mark.parametrize("finish", [FINISH, ""], ids=["waited", "not waited"])
def test_a_release_does_not_cover_what_the_tma_unit_still_holds(finish: str) -> None:
    outcomes: list[bool] = []
    for seed in range(10):
        data, source, flag, found = zeros(2, 4), zeros(2, 4) + 7, zeros(1), zeros(8)
        executor = Executor(seed, ranks=2)
        text = DESCRIBED_WRITER.replace("    <<finish>>", finish)
        names = "data source flag"
        write = kernel(text, entry="writer", names=names, described="data source")
        read = kernel(READER, entry="reader", names="data flag found")
        executor.launch(0, write, {"data": data, "source": source, "flag": flag})
        executor.launch(1, read, {"data": data, "flag": flag, "found": found})
        executor.run()
        outcomes.append(bool((found == 7).all()))
    assert all(outcomes) == bool(finish)


def test_a_flag_that_was_raised_before_is_no_deadlock() -> None:
    """A program that asks for one flag after another, and finds both raised."""
    twice = """
@triton.jit
def reader(first, second, found):
    while tl.atomic_add(first, 0, sem="acquire", scope="sys") < 1:
        pass
    while tl.atomic_add(second, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(found, 1)
"""
    first, second, found = zeros(1) + 1, zeros(1) + 1, zeros(1)
    executor = Executor(0, ranks=1)
    read = kernel(twice, entry="reader", names="first second found")
    executor.launch(0, read, {"first": first, "second": second, "found": found})
    executor.run()
    assert found.item() == 1


def test_a_deadlock_names_who_waits() -> None:
    executor = Executor(0, ranks=1)
    read = kernel(READER, entry="reader", names="data flag found", programs=3)
    executor.launch(0, read, {"data": zeros(8), "flag": zeros(1), "found": zeros(8)})
    message = "3 tasks wait, 0 programs have not started: rank 0 reader program 0, rank 0 reader"
    with pytest.raises(Deadlock, match=message):
        executor.run()


def test_programs_that_do_not_fit_wait_for_those_before_them() -> None:
    order = """
@triton.jit
def ticket(count, found):
    tl.store(found + tl.program_id(0), tl.atomic_add(count, 1, sem="relaxed", scope="sys"))
"""
    found = zeros(6)
    executor = Executor(1, ranks=1, resident=1)
    programs = kernel(order, entry="ticket", names="count found", programs=6)
    executor.launch(0, programs, {"count": zeros(1), "found": found})
    executor.run()
    assert found.tolist() == list(range(6))


def test_launches_of_a_rank_follow_each_other() -> None:
    for seed in range(5):
        data, flag, found = zeros(8), zeros(1), zeros(8)
        executor = Executor(seed, ranks=1)
        write = kernel(WRITER, entry="writer", names="data flag")
        read = kernel(READER.replace("< 1", "< 0"), entry="reader", names="data flag found")
        executor.launch(0, write, {"data": data, "flag": flag})
        executor.launch(0, read, {"data": data, "flag": flag, "found": found})
        executor.run()
        assert found.tolist() == list(range(1, 9))


def test_a_copy_engine_signals_after_its_copy() -> None:
    for seed in range(5):
        data, flag, found = zeros(8), zeros(1), zeros(8)
        source = torch.arange(8, dtype=torch.int32)

        def copies(
            engine: CopyEngine, data: Tensor = data, source: Tensor = source, flag: Tensor = flag
        ) -> None:
            engine.copy(data, source)
            engine.signal(flag, 0, 1)

        executor = Executor(seed, ranks=1)
        executor.engine(0, "copies", copies)
        read = kernel(READER, entry="reader", names="data flag found")
        executor.launch(0, read, {"data": data, "flag": flag, "found": found})
        executor.run()
        assert torch.equal(found, source)


def test_the_same_seed_is_the_same_schedule() -> None:
    def relaxed(text: str) -> str:
        return text.replace('"release"', '"relaxed"')

    first = [passed(seed, relaxed) for seed in range(10)]
    assert first == [passed(seed, relaxed) for seed in range(10)]
    assert len(set(first)) == 2


def test_unknown_assembly_is_refused() -> None:
    text = FINISH.replace("cp.async.bulk.wait_group 0", "nanosleep.u32 20")
    odd = f"@triton.jit\ndef odd(data):\n{text}\n"
    executor = Executor(0, ranks=1)
    executor.launch(0, kernel(odd, entry="odd", names="data"), {"data": zeros(8)})
    with pytest.raises(NotImplementedError, match=r"kernels may not use: nanosleep\.u32 20"):
        executor.run()
