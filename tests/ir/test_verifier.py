"""Checks find the first offending node, and the error shows what was done and where."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from msc.ir import actions
from msc.ir.errors import MSCError, VerifyError
from msc.ir.torch_private import FakeTensorMode
from msc.ir.verifier import (
    Violation,
    functional,
    starts_are_waited,
    structure,
    values_known,
    verify,
    well_formed,
)

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
MODE = FakeTensorMode()
NO_VALUE = object()


def fake(*shape: int) -> torch.Tensor:
    with MODE:
        return torch.empty(shape)


class Builder:
    """A graph under construction; every value is a fake f32[2] unless said otherwise."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, name: str = "x") -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = fake(2)
        return node

    def call(self, target: Any, *args: Any, val: Any = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        if val is not NO_VALUE:
            node.meta["val"] = fake(2) if val is None else val
        return node

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def start(b: Builder, x: fx.Node) -> fx.Node:
    return b.call(c10d.all_reduce.default, x, "sum", "tp")


def starts(b: Builder, x: fx.Node) -> fx.Node:
    target = c10d.all_gather_into_tensor_coalesced.default
    return b.call(target, [x, x], 2, "tp", val=[fake(4), fake(4)])


def wait(b: Builder, x: fx.Node) -> fx.Node:
    return b.call(c10d.wait_tensor.default, x)


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    (found,) = (node for node in gm.graph.nodes if node.name == name)
    assert isinstance(found, fx.Node)
    return found


def test_a_sound_graph_passes() -> None:
    b = Builder()
    x = b.input()
    reduced = wait(b, start(b, x))
    both = starts(b, reduced)
    parts = [wait(b, b.call(operator.getitem, both, index)) for index in (0, 1)]
    b.call(aten._assert_async.default, x, val=NO_VALUE)
    b.call(actions.wait, b.call(actions.send, [reduced], 1, "down", val=NO_VALUE), val=NO_VALUE)
    received = b.call(actions.wait, b.call(actions.recv, 1, "up", [(2,)], [0], val=NO_VALUE))
    gm = b.done(*parts, received)
    verify(gm, [structure], "pass 1 of 1, nothing")


def test_a_value_read_before_it_is_computed() -> None:
    b = Builder()
    x = b.input()
    first = b.call(aten.neg.default, x)
    second = b.call(aten.abs.default, first)
    gm = b.done(second)
    second.append(first)
    assert well_formed(gm) == Violation(
        second, "%abs_default reads %neg_default before it is computed"
    )


def test_a_value_of_another_graph() -> None:
    foreign = Builder().input("other")
    b = Builder()
    total = b.call(aten.neg.default, b.input())
    gm = b.done(total)
    total.args = (foreign,)
    assert well_formed(gm) == Violation(total, "%neg_default reads %other before it is computed")


def test_a_graph_without_output() -> None:
    b = Builder()
    x = b.input()
    gm = b.done(x)
    gm.graph.erase_node(find(gm, "output"))
    assert well_formed(gm) == Violation(x, "the last node is not an output")


def test_a_call_of_a_module_that_is_not_there() -> None:
    b = Builder()
    root = torch.nn.Module()
    root.add_module("chunk", torch.nn.Identity())
    node = b.graph.call_module("chunk", (b.input(),))
    b.graph.output(node)
    gm = fx.GraphModule(root, b.graph)
    del gm.chunk
    violation = well_formed(gm)
    assert violation is not None
    assert violation.node is None
    assert "chunk" in violation.reason


@pytest.mark.parametrize("target", [aten.neg.default, actions.accumulate, operator.getitem])
def test_a_value_that_is_not_known(target: Any) -> None:
    b = Builder()
    node = b.call(target, b.input(), 0, val=NO_VALUE)
    reason = f"%{node.name} has no meta['val'], so its shape is not known"
    assert values_known(b.done(node)) == Violation(node, reason)


@pytest.mark.parametrize("target", [aten.add_.Tensor, c10d.all_reduce_.default, aten.add.out])
def test_an_op_that_writes_to_an_operand(target: Any) -> None:
    b = Builder()
    x = b.input()
    node = b.call(target, x, x)
    violation = functional(b.done(node))
    assert violation is not None
    assert violation.node is node
    assert violation.reason.endswith(
        f"calls {target}, which writes to an operand".replace(".default", "")
    )


def unwaited(b: Builder, x: fx.Node) -> str:
    start(b, x)
    return "%all_reduce_default is started and never waited for"


def read_early(b: Builder, x: fx.Node) -> str:
    reduced = start(b, x)
    wait(b, reduced)
    b.call(aten.neg.default, reduced)
    return "%neg_default reads %all_reduce_default without a wait"


def waited_twice(b: Builder, x: fx.Node) -> str:
    reduced = start(b, x)
    wait(b, reduced)
    wait(b, reduced)
    return "%all_reduce_default is waited for 2 times"


def half_waited(b: Builder, x: fx.Node) -> str:
    wait(b, b.call(operator.getitem, starts(b, x), 0))
    return "only 1 of 2 results of %all_gather_into_tensor_coalesced_default are waited for"


def taken_twice(b: Builder, x: fx.Node) -> str:
    both = starts(b, x)
    for _ in range(2):
        wait(b, b.call(operator.getitem, both, 0))
    return "%getitem_1 takes a result of %all_gather_into_tensor_coalesced_default a second time"


def list_read_early(b: Builder, x: fx.Node) -> str:
    b.call(aten.cat.default, starts(b, x))
    return (
        "%cat_default reads the results of %all_gather_into_tensor_coalesced_default without a wait"
    )


def item_read_early(b: Builder, x: fx.Node) -> str:
    b.call(aten.neg.default, b.call(operator.getitem, starts(b, x), 0))
    return "%neg_default reads %getitem without a wait"


def token_unwaited(b: Builder, x: fx.Node) -> str:
    b.call(actions.send, [x], 1, "down", val=NO_VALUE)
    return "%send is started and never waited for"


def token_read(b: Builder, x: fx.Node) -> str:
    token = b.call(actions.recv, 1, "down", [(2,)], [torch.float32], val=NO_VALUE)
    b.call(operator.getitem, token, 0)
    return "%getitem reads %recv without a wait"


@pytest.mark.parametrize(
    "build",
    [
        unwaited,
        read_early,
        waited_twice,
        half_waited,
        taken_twice,
        list_read_early,
        item_read_early,
        token_unwaited,
        token_read,
    ],
)
def test_a_start_without_its_wait(build: Callable[[Builder, fx.Node], str]) -> None:
    b = Builder()
    x = b.input()
    reason = build(b, x)
    gm = b.done(x)
    violation = starts_are_waited(gm)
    assert violation is not None
    assert violation.reason == reason
    assert violation.node is not None
    assert structure(gm) == violation


def test_an_unfinished_result_is_not_returned() -> None:
    b = Builder()
    gm = b.done(start(b, b.input()))
    violation = starts_are_waited(gm)
    assert violation is not None
    assert violation.reason == "the output reads %all_reduce_default without a wait"


def no_neg(gm: fx.GraphModule) -> Violation | None:
    """Nothing is negated."""
    for node in gm.graph.nodes:
        if node.target is aten.neg.default:
            return Violation(node, f"%{node.name} is negative")
    return None


def test_the_error_shows_the_program() -> None:
    b = Builder()
    node = b.call(aten.neg.default, b.input())
    gm = b.done(b.call(aten.abs.default, node))
    with pytest.raises(VerifyError) as error:
        verify(gm, [structure, no_neg], "pass 2 of 2, negate")
    assert isinstance(error.value, MSCError)
    assert (
        str(error.value)
        == """\
no_neg fails after pass 2 of 2, negate:
  %neg_default is negative

  %x: f32[2] = input
> %neg_default: f32[2] = aten.neg(%x)
  %abs_default: f32[2] = aten.abs(%neg_default)
  return (%abs_default,)

This is a bug in the pass. MSC_DUMP=<folder> writes the program before and after it."""
    )


@given(st.lists(st.sampled_from(["start", "wait", "neg"]), max_size=12), st.data())
def test_the_check_agrees_with_counting(steps: list[str], data: st.DataObject) -> None:
    """Random programs: sound iff every start has one reader, and that is a wait."""
    b = Builder()
    nodes = [b.input()]
    for step in steps:
        operand = nodes[data.draw(st.integers(0, len(nodes) - 1))]
        if step == "neg":
            nodes.append(b.call(aten.neg.default, operand))
        else:
            nodes.append(start(b, operand) if step == "start" else wait(b, operand))
    gm = b.done(nodes[0])
    all_reduce, wait_tensor = c10d.all_reduce.default, c10d.wait_tensor.default
    sound = all(
        [user.target for user in node.users] == [wait_tensor]
        for node in nodes
        if node.target is all_reduce
    )
    assert (starts_are_waited(gm) is None) == sound
