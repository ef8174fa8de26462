"""Results are written over operands only where nobody can see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from msc.codegen.emit import emit
from msc.codegen.in_place import in_place_calls
from msc.ir.mesh import Mesh
from msc.runtime.actions import LocalActions
from tests.runtime.build import ATEN, C10D, Builder

MSC = torch.ops.msc
NORM = ([4], None, None, 1e-5)
RT = LocalActions(Mesh.parse(""), 0)


def product(build: Builder, x: fx.Node) -> fx.Node:
    """A value whose memory is the graph's own."""
    return build.call(ATEN.mm.default, x, x)


def in_place(write: Callable[[Builder, fx.Node], fx.Node]) -> int | None:
    """Which operand the node that `write` returns overwrites."""
    build = Builder()
    last = write(build, build.input("x", 4, 4))
    found = in_place_calls(build.done(last))
    return found[last][1] if last in found else None


def view(build: Builder, x: fx.Node, *shape: int) -> fx.Node:
    return build.call(ATEN.view.default, x, list(shape))


@pytest.mark.parametrize(
    ("write", "operand"),
    [
        (lambda b, x: b.call(ATEN.add.Tensor, product(b, x), x), 0),
        (lambda b, x: b.call(ATEN.add.Tensor, x, product(b, x)), 1),
        (lambda b, x: b.call(ATEN.add.Tensor, x, product(b, x), alpha=2), None),
        (lambda b, x: b.call(ATEN.add.Tensor, product(b, x), x, alpha=2), 0),
        (lambda b, x: b.call(ATEN.sub.Tensor, x, product(b, x)), None),
        (lambda b, x: b.call(ATEN.mul.Tensor, product(b, x), 2.0), 0),
        (lambda b, x: b.call(ATEN.add.Tensor, x, x), None),
        (lambda b, x: b.call(ATEN.gelu_backward.default, product(b, x), x), 0),
        (lambda b, x: b.call(ATEN.gelu_backward.default, x, product(b, x)), None),
        (lambda b, x: b.call(ATEN.add.Tensor, view(b, product(b, x), 4, 4), x), 0),
        (lambda b, x: b.call(ATEN.add.Tensor, view(b, x, 4, 4), 1.0), None),
        (lambda b, x: b.call(MSC.add_layer_norm.default, x, product(b, x), *NORM), 1),
        (lambda b, x: b.call(MSC.add_layer_norm.default, x, x, *NORM), None),
        (lambda b, x: b.call(MSC.gated_backward.default, product(b, x), x, x, "silu"), 0),
        (lambda b, x: b.call(MSC.gated_backward.default, x, product(b, x), x, "silu"), None),
    ],
)
def test_which_operand_is_overwritten(write: Any, operand: int | None) -> None:
    assert in_place(write) == operand


def test_another_shape_layout_or_dtype_is_not_overwritten() -> None:
    def transposed(build: Builder, x: fx.Node) -> fx.Node:
        return build.call(ATEN.add.Tensor, x, build.call(ATEN.t.default, product(build, x)))

    def row(build: Builder, x: fx.Node) -> fx.Node:
        return build.call(
            ATEN.add.Tensor, x, build.call(ATEN.sum.dim_IntList, product(build, x), [0])
        )

    def narrow(build: Builder, x: fx.Node) -> fx.Node:
        half = build.call(ATEN.cat.default, [build.input("y", 4, 4, dtype=torch.float32)])
        return build.call(ATEN.add.Tensor, x, half)

    assert [in_place(write) for write in (transposed, row, narrow)] == [None, None, None]


def test_an_operand_that_another_view_reads_beside_it_stays() -> None:
    """`y + y.T` in place would read what it has just written."""

    def write(build: Builder, x: fx.Node) -> fx.Node:
        y = product(build, x)
        return build.call(ATEN.add.Tensor, y, build.call(ATEN.t.default, y))

    assert in_place(write) is None


def test_what_a_collective_in_flight_reads_stays() -> None:
    build = Builder()
    x = build.input("x", 4, 4)
    sent = product(build, x)
    start = build.call(C10D.all_reduce.default, sent, "sum", "tp")
    early = build.call(ATEN.add.Tensor, sent, x)
    late = build.call(ATEN.add.Tensor, build.wait(start), x)
    found = in_place_calls(build.done(early, late))
    assert early not in found
    assert found[late][1] == 0


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_random_graphs_compute_the_same_and_keep_their_inputs(data: st.DataObject) -> None:
    build = Builder()
    values = [build.input("x", 4, 4), build.input("y", 4, 4)]
    unary = [ATEN.neg.default, ATEN.t.default, ATEN.clone.default, ATEN.alias.default]
    binary = [ATEN.add.Tensor, ATEN.sub.Tensor, ATEN.mul.Tensor, ATEN.mm.default]
    for _ in range(data.draw(st.integers(1, 12))):
        target = data.draw(st.sampled_from([*unary, *binary, ATEN.gelu_backward.default]))
        operands = [data.draw(st.sampled_from(values)) for _ in range(1 if target in unary else 2)]
        values.append(build.call(target, *operands))
    returned = data.draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    graph = build.done(*returned)
    inputs = [torch.randn(4, 4, dtype=torch.float64) / 4 for _ in range(2)]
    given_inputs = [value.clone() for value in inputs]
    expected = fx.Interpreter(graph).run(*[value.clone() for value in inputs])
    found: tuple[Tensor, ...] = emit(graph, "process").program(RT, list(inputs))
    assert all(torch.equal(a, b) for a, b in zip(inputs, given_inputs, strict=True))
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)
