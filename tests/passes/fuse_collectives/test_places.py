"""Collectives become one op with their GEMMs: what is found, what is written, what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.ir.mesh import Mesh
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.passes.fuse_collectives.places import Gather, Reduce, places
from msc.passes.fuse_collectives.rewrite import fuse
from msc.passes.lower_collectives import lower_collectives
from msc.runtime.virtual import VirtualExecutor
from tests.passes.graphs import (
    ATEN,
    Forward,
    assert_text,
    random_values,
)

MSC = torch.ops.msc
GATHER, SCATTER = MSC.all_gather.default, MSC.reduce_scatter.default
LINEAR, DGRAD, WGRAD = MSC.linear.default, MSC.linear_dgrad.default, MSC.linear_wgrad.default


def lowered(gm: fx.GraphModule) -> fx.GraphModule:
    lower_collectives(gm)
    return gm


def gather(build: Forward, x: fx.Node, dim: int, size: int = 2, runs: Any = None) -> fx.Node:
    runs = runs or [x.meta["val"].shape[dim]]
    return build.call(GATHER, x, dim, runs, "tp", size, "reduce_scatter", path="norm")


def scatter(build: Forward, x: fx.Node, dim: int, size: int = 2, runs: Any = None) -> fx.Node:
    runs = runs or [x.meta["val"].shape[dim] // size]
    return build.call(SCATTER, x, dim, runs, "tp", size, path="down")


def fuse_all(gm: fx.GraphModule) -> list[str]:
    """Fuse all that can be; the reasons of the others."""
    reasons = []
    for start in [place.start for place in places(gm)]:
        (place,) = (each for each in places(gm) if each.start is start)
        if place.reason:
            reasons.append(place.reason)
        else:
            fuse(place)
    gm.graph.lint()
    gm.recompile()
    return reasons


def run(gm: fx.GraphModule, size: int) -> list[Any]:
    values = [random_values(gm, seed) for seed in range(size)]
    return VirtualExecutor(Mesh.parse(f"tp={size}"), lambda rank: gm).run(values)


def test_the_forward_of_a_layer() -> None:
    build = Forward()
    w, b, v = build.parameter("w", 6, 4), build.parameter("b", 6), build.parameter("v", 4, 6)
    x = build.input("x", 1, 2, 4)
    whole = gather(build, x, 1)
    y = build.call(LINEAR, whole, w, b, path="up")
    z = scatter(build, build.call(LINEAR, y, v, path="down"), 1)
    gm = lowered(build.done(z, whole))
    assert fuse_all(gm) == []
    assert_text(
        gm,
        """
%w: f64[6,4] = parameter "w"
%b: f64[6] = parameter "b"
%v: f64[4,6] = parameter "v"
%x: f64[1,2,4] = input "x"
%all_gather_matmul_default: (f64[1,4,6], f64[1,4,4]) = msc.all_gather_matmul(%x, 1, [%w], [%b], [False], [], [], True, 2, 'tp')  # up
%getitem: f64[1,4,6] = %all_gather_matmul_default[0]  # up
%getitem_1: f64[1,4,4] = %all_gather_matmul_default[1]  # norm
%matmul_reduce_scatter_default: f64[1,2,4] = msc.matmul_reduce_scatter(%getitem, %v, None, False, 1, 2, 'tp')  # down
return (%matmul_reduce_scatter_default, %getitem_1)
""",  # noqa: E501
    )


def test_the_backward_of_a_layer() -> None:
    """One gather for both gradients of a linear; the input gradient of the other one is summed."""
    build = Forward()
    w, v = build.parameter("w", 6, 4), build.parameter("v", 4, 6)
    gz, y = build.input("gz", 2, 4), build.input("y", 4, 6)
    whole = gather(build, gz, 0)
    gv = build.call(WGRAD, whole, y)
    gy = build.call(DGRAD, whole, v)
    gx = scatter(build, build.call(DGRAD, gy, w), 0)
    gm = lowered(build.done(gx, gv))
    found = list(places(gm))
    assert [type(place) for place in found] == [Gather, Reduce]
    assert fuse_all(gm) == []
    assert_text(
        gm,
        """
%w: f64[6,4] = parameter "w"
%v: f64[4,6] = parameter "v"
%gz: f64[2,4] = input "gz"
%y: f64[4,6] = input "y"
%all_gather_matmul_default: (f64[4,6], f64[4,6]) = msc.all_gather_matmul(%gz, 0, [%v], [None], [True], [%y], [True], False, 2, 'tp')  # norm
%getitem: f64[4,6] = %all_gather_matmul_default[0]
%getitem_1: f64[4,6] = %all_gather_matmul_default[1]
%matmul_reduce_scatter_default: f64[2,4] = msc.matmul_reduce_scatter(%getitem, %w, None, True, 0, 2, 'tp')  # down
return (%matmul_reduce_scatter_default, %getitem_1)
""",  # noqa: E501
    )


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(2, 3),
    st.lists(st.sampled_from(["linear", "bias", "dgrad", "first", "second", "other"]), max_size=4),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_gathers_compute_the_same(
    shape: Sequence[int], size: int, readers: list[str], transposed: bool, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 2))
    k, rows = shape[-1], (*shape[:dim], size * shape[dim], *shape[dim + 1 : -1])

    def graph() -> fx.GraphModule:
        build = Forward()
        x = build.input("x", *shape)
        numbers = range(len(readers))
        wide = [(5, k), (k, 5)]
        ws = [build.parameter(f"w{i}", *wide[transposed]) for i in numbers]
        vs = [build.parameter(f"v{i}", *wide[not transposed]) for i in numbers]
        bs = [build.parameter(f"b{i}", 5) for i in numbers]
        others = [build.input(f"o{i}", *rows, 5) for i in numbers]
        whole = gather(build, x, dim, size)
        calls: dict[str, tuple[Any, Callable[[int], tuple[Any, ...]]]] = {
            "linear": (LINEAR, lambda i: (whole, ws[i], None, transposed)),
            "bias": (LINEAR, lambda i: (whole, ws[i], bs[i], transposed)),
            "dgrad": (DGRAD, lambda i: (whole, vs[i], transposed)),
            "first": (WGRAD, lambda i: (whole, others[i], transposed)),
            "second": (WGRAD, lambda i: (others[i], whole, transposed)),
            "other": (ATEN.relu.default, lambda i: (whole,)),
        }
        results = []
        for number, kind in enumerate(readers):
            target, arguments = calls[kind]
            results.append(build.call(target, *arguments(number)))
        return lowered(build.done(*results, *([whole] if not results else [])))

    before, gm = graph(), graph()
    assert fuse_all(gm) == []
    fused = [node for node in gm.graph.nodes if node.target is ALL_GATHER_MATMUL]
    assert len(fused) == any(kind != "other" for kind in readers)
    for node in fused:
        assert node.args[7] == ("other" in readers)  # keep
        assert len(node.args[2]) + len(node.args[5]) == sum(kind != "other" for kind in readers)
    torch.testing.assert_close(run(gm, size), run(before, size), rtol=1e-12, atol=1e-12)
    assert fuse_all(gm) == []  # a second time changes nothing


@given(
    st.lists(st.integers(1, 3), min_size=2, max_size=4),
    st.integers(2, 3),
    st.sampled_from(["linear", "bias", "dgrad", "dgrad sum", "linear + ", " + linear"]),
    st.booleans(),
    st.data(),
)
@settings(deadline=None, max_examples=40)
def test_reductions_compute_the_same(
    shape: Sequence[int], size: int, kind: str, transposed: bool, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 2))
    k, rows = shape[-1], (*shape[:dim], size * shape[dim], *shape[dim + 1 : -1])

    def graph() -> fx.GraphModule:
        build = Forward()
        x, other = build.input("x", *rows, k), build.input("other", *rows, 5)
        w = build.parameter("w", *((k, 5) if transposed else (5, k)))
        v = build.parameter("v", *((5, k) if transposed else (k, 5)))
        bias = build.parameter("b", 5)
        if kind.startswith("dgrad"):
            rest = (other,) if "sum" in kind else ()
            made = build.call(DGRAD, x, v, transposed, *rest)
        else:
            made = build.call(LINEAR, x, w, bias if kind == "bias" else None, transposed)
        if "+" in kind:
            left, right = (made, other) if kind.startswith("linear") else (other, made)
            made = build.call(ATEN.add.Tensor, left, right)
        return lowered(build.done(scatter(build, made, dim, size)))

    before, gm = graph(), graph()
    assert fuse_all(gm) == []
    calls = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert calls == [MATMUL_REDUCE_SCATTER]
    torch.testing.assert_close(run(gm, size), run(before, size), rtol=1e-12, atol=1e-12)


def reasons_of(write: Any) -> list[str]:
    build = Forward()
    gm = lowered(build.done(*write(build)))
    count = len(list(gm.graph.nodes))
    reasons = fuse_all(gm)
    assert len(list(gm.graph.nodes)) == count
    return reasons


def contracted(build: Forward) -> list[fx.Node]:
    whole = gather(build, build.input("x", 4, 2), 1)
    return [build.call(LINEAR, whole, build.parameter("w", 3, 4))]


def columns(build: Forward) -> list[fx.Node]:
    made = build.call(LINEAR, build.input("x", 4, 3), build.parameter("w", 6, 3))
    return [scatter(build, made, 1)]


def read_twice(build: Forward) -> list[fx.Node]:
    made = build.call(LINEAR, build.input("x", 4, 3), build.parameter("w", 6, 3))
    return [scatter(build, made, 0), made]


def segments(build: Forward) -> list[fx.Node]:
    whole = gather(build, build.input("x", 3, 4), 0, runs=[1, 2])
    return [build.call(LINEAR, whole, build.parameter("w", 3, 4))]


def segments_scattered(build: Forward) -> list[fx.Node]:
    made = build.call(LINEAR, build.input("x", 6, 3), build.parameter("w", 6, 3))
    return [scatter(build, made, 0, runs=[1, 2])]


def unequal(build: Forward) -> list[fx.Node]:
    whole = gather(build, build.input("x", 3, 4), 0)
    cut = build.call(MSC.repad.default, whole, 0, [3, 3], [3, 2])
    return [build.call(LINEAR, cut, build.parameter("w", 3, 4))]


def unequal_scattered(build: Forward) -> list[fx.Node]:
    made = build.call(LINEAR, build.input("x", 5, 3), build.parameter("w", 6, 3))
    return [scatter(build, build.call(MSC.repad.default, made, 0, [3, 2], [3, 3]), 0)]


def viewed(build: Forward) -> list[fx.Node]:
    whole = gather(build, build.input("x", 2, 3, 4), 0)
    flat = build.call(ATEN.view.default, whole, [12, 4])
    return [build.call(LINEAR, flat, build.parameter("w", 3, 4))]


def later(build: Forward) -> list[fx.Node]:
    """A weight gradient that needs what the gathered value is used for."""
    whole = gather(build, build.input("x", 2, 4), 0)
    return [build.call(WGRAD, build.call(ATEN.relu.default, whole), whole)]


def both(build: Forward) -> list[fx.Node]:
    w, b = build.parameter("w", 6, 3), build.parameter("b", 6)
    made = build.call(LINEAR, build.input("x", 4, 3), w, b)
    return [scatter(build, build.call(ATEN.add.Tensor, made, build.input("o", 4, 6)), 0)]


def no_gemm(build: Forward) -> list[fx.Node]:
    return [build.call(ATEN.relu.default, gather(build, build.input("x", 2, 4), 0))]


CASES: list[tuple[Any, list[str]]] = [
    (contracted, ["dim 1 is gathered, which the GEMM contracts or its weight has"]),
    (columns, ["dim 1 is scattered, which the GEMM's weight has"]),
    (read_twice, ["something else reads the product too, which is never there in one place"]),
    (segments, ["the parts of a rank are not one run of one dim"]),
    (segments_scattered, ["the parts of a rank are not one run of one dim"]),
    (
        unequal,
        [
            "ranks have parts of unequal length there, which are padded on the way (msc.repad); "
            "use a size that the axis divides"
        ],
    ),
    (viewed, ["aten.view stands between the collective and the GEMM"]),
    (later, ["the GEMM adds to a sum, or reads what is made after the gathered value"]),
    (both, ["the product has a bias and is added to something else"]),
    (no_gemm, []),
]


@pytest.mark.parametrize(("write", "reasons"), CASES)
def test_what_stays_has_a_reason(write: Any, reasons: list[str]) -> None:
    assert reasons_of(write) == reasons


def test_parts_of_unequal_length_are_not_scattered() -> None:
    assert "msc.repad" in reasons_of(unequal_scattered)[0]
