"""The lint of orderings: straight code, branches and loops, each hazard and its remedy."""

from __future__ import annotations

import pytest

from msc.codegen.kernels.ptx_order import (
    UNFENCED_LOAD,
    UNFINISHED_BULK,
    UNORDERED_STORE,
    findings,
)

STORE = "st.global.v4.b32 [%rd1], {%r1, %r2, %r3, %r4};"
RELEASE = "@%p1 atom.global.sys.release.add.u32 %r1, [%rd2], 1;"
BARRIER = "bar.sync 0;"
BULK_STORE = "@%p1 cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1, %r2}], [%r3];"
BULK_READ_WAIT = "cp.async.bulk.wait_group.read 0;"
BULK_WAIT = "cp.async.bulk.wait_group 0;"
ACQUIRE = "@%p1 ld.global.sys.acquire.b32 %r1, [%rd2];"
FENCE = "fence.proxy.async.global;"
BULK_LOAD = (
    "@%p1 cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes "
    "[%r1], [%rd1, {%r2, %r3}], [%r4];"
)


def test_acquire_of_a_generic_fence_counts_for_both() -> None:
    assert findings("\n".join([STORE, "fence.acq_rel.sys;"])) == [f"line 2: {UNORDERED_STORE}"]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([STORE, RELEASE], [f"line 2: {UNORDERED_STORE}"]),
        ([STORE, BARRIER, RELEASE], []),
        ([STORE, BARRIER, STORE, RELEASE], [f"line 4: {UNORDERED_STORE}"]),
        (["st.shared.b32 [%r1], %r2;", RELEASE], []),
        ([BULK_STORE, BULK_READ_WAIT, BARRIER, RELEASE], [f"line 4: {UNFINISHED_BULK}"]),
        ([BULK_STORE, BULK_WAIT, BARRIER, RELEASE], []),
        ([ACQUIRE, BULK_LOAD], [f"line 2: {UNFENCED_LOAD}"]),
        ([ACQUIRE, "fence.proxy.async.shared::cta;", BULK_LOAD], [f"line 3: {UNFENCED_LOAD}"]),
        ([ACQUIRE, FENCE, BULK_LOAD], []),
        ([BULK_LOAD, ACQUIRE], []),
        ([STORE, f"// {RELEASE}"], []),
    ],
)
def test_straight_code(lines: list[str], expected: list[str]) -> None:
    assert findings("\n".join(lines)) == expected


def test_a_loop_carries_a_store_to_the_release_at_its_head() -> None:
    lines = ["$L__BB0_1:", RELEASE, STORE, "@%p2 bra $L__BB0_1;", "ret;"]
    assert findings("\n".join(lines)) == [f"line 2: {UNORDERED_STORE}"]


def test_a_barrier_in_one_branch_does_not_order_the_other() -> None:
    lines = [STORE, "@%p2 bra $L__BB0_2;", BARRIER, "$L__BB0_2:", RELEASE, "ret;"]
    assert findings("\n".join(lines)) == [f"line 5: {UNORDERED_STORE}"]


def test_what_only_comes_before_in_the_text_does_not_count() -> None:
    lines = ["@%p2 bra $L__BB0_2;", STORE, "ret;", "$L__BB0_2:", RELEASE, "ret;"]
    assert findings("\n".join(lines)) == []
    lines = [
        STORE,
        "bra.uni $L__BB0_2;",
        "$L__BB0_1:",
        STORE,
        "ret;",
        "$L__BB0_2:",
        BARRIER,
        RELEASE,
    ]
    assert findings("\n".join(lines)) == []
