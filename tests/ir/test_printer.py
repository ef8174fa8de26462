"""The text of graphs: whole, stable, and free of anything that differs between two runs."""

from __future__ import annotations

import operator
import re
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import fx

from msc.ir import actions
from msc.ir.placement import Partial, Placement, Replicate, Shard
from msc.ir.printer import (
    format_argument,
    format_graph,
    format_neighbourhood,
    format_node,
    format_target,
)
from msc.ir.torch_private import FakeTensorMode

aten = torch.ops.aten
MODE = FakeTensorMode()


def fake(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    with MODE:
        return torch.empty(shape, dtype=dtype)


def placeholder(graph: fx.Graph, name: str, val: Any, /, **meta: Any) -> fx.Node:
    node = graph.placeholder(name)
    node.meta = {"val": val, **meta}
    return node


def call(graph: fx.Graph, target: Any, /, *args: Any, val: Any = None, **meta: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta = {"val": val, **meta}
    return node


def sharded_graph() -> fx.GraphModule:
    graph = fx.Graph()
    h = placeholder(graph, "h", fake(4, 4), kind="input", name="ids", placement={"tp": Shard(1)})
    weight = placeholder(
        graph,
        "down",
        fake(4, 8, dtype=torch.bfloat16),
        kind="parameter",
        name="layers.0.down.weight",
        placement={"dp": Replicate(), "tp": Shard(0, (4, 2, 2))},
        grad_placement={"dp": Partial(), "tp": Shard(0, (4, 2, 2))},
    )
    mm = call(
        graph,
        aten.mm.default,
        h,
        weight,
        val=fake(4, 8),
        module_path="layers.0.down",
        placement={"tp": Partial()},
        grad_placement={},
        marks={"recompute": True, "bucket": 3},
    )
    top = call(graph, aten.max.dim, mm, 1, val=(fake(4), fake(4, dtype=torch.int64)))
    first = call(graph, operator.getitem, top, 0, val=fake(4))
    graph.output((first,))
    return fx.GraphModule(torch.nn.Module(), graph)


SHARDED = """\
layer on tp=2
  %h: f32[4,4]{tp:S1} = input "ids"
  %down: bf16[4,8]{dp:R~,tp:S0/4+2+2} = parameter "layers.0.down.weight"
  %mm_default: f32[4,8]{tp:P} = aten.mm(%h, %down) [recompute, bucket=3]  # layers.0.down
  %max_dim: (f32[4], i64[4]) = aten.max.dim(%mm_default, 1)
  %getitem: f32[4] = %max_dim[0]
  return (%getitem,)"""


def test_the_whole_text() -> None:
    assert format_graph(sharded_graph(), "layer on tp=2") == SHARDED


def test_without_a_title_nothing_is_indented() -> None:
    expected = [line.removeprefix("  ") for line in SHARDED.splitlines()[1:]]
    assert format_graph(sharded_graph()).splitlines() == expected


def test_a_rank_graph_names_actions_and_chunks() -> None:
    inner = fx.Graph()
    inner.output(inner.placeholder("x"))
    root = torch.nn.Module()
    root.add_module("chunk", fx.GraphModule(torch.nn.Module(), inner))
    graph = fx.Graph()
    batch = placeholder(graph, "ids", fake(8, 2, dtype=torch.int64), kind="input", name="ids")
    part = call(graph, actions.micro_batch, batch, 0, 1, 4, val=fake(2, 2, dtype=torch.int64))
    out = graph.call_module("chunk", (part,))
    out.meta = {"val": (fake(2, 2),)}
    value = call(graph, operator.getitem, out, 0, val=fake(2, 2))
    token = graph.call_function(actions.send, ([value],), {"stage": 1, "channel": "down"})
    call(graph, actions.wait, token)
    received = graph.call_function(actions.recv, (1, "up", [(2, 2)], [torch.float32]))
    done = call(graph, actions.wait, received, val=(fake(2, 2),))
    graph.output(done)
    text = format_graph(fx.GraphModule(root, graph))
    assert (
        text
        == """\
%ids: i64[8,2] = input "ids"
%micro_batch: i64[2,2] = micro_batch(%ids, 0, 1, 4)
%chunk: (f32[2,2]) = call chunk(%micro_batch)
%getitem: f32[2,2] = %chunk[0]
%send = send([%getitem], stage=1, channel='down')
%wait = wait(%send)
%recv = recv(1, 'up', [(2, 2)], [f32])
%wait_1: (f32[2,2]) = wait(%recv)
return %wait_1"""
    )


class Opaque:
    """An argument whose repr holds an address."""


def test_arguments() -> None:
    node = fx.Graph().placeholder("x")
    arguments = {
        "(%x,)": (node,),
        "[%x, None, slice(1, %x, None)]": [node, None, slice(1, node)],
        "{'a': [f64, cuda:1]}": {"a": [torch.float64, torch.device("cuda", 1)]},
        "inf": float("inf"),
        "'it\\'s \"x\"'": 'it\'s "x"',
        "torch.strided": torch.strided,
        "torch.preserve_format": torch.preserve_format,
        "tensor f32[2]": torch.zeros(2),
        "Opaque": Opaque(),
        "aten.add.Tensor": aten.add.Tensor,
        "accumulate": actions.accumulate,
    }
    assert [format_argument(value) for value in arguments.values()] == list(arguments)


def test_targets() -> None:
    targets = {
        "aten.mm": aten.mm.default,
        "aten.add.Tensor": aten.add.Tensor,
        "_c10d_functional.wait_tensor": torch.ops._c10d_functional.wait_tensor.default,
        "operator.add": operator.add,
        "send": actions.send,
        "len": len,
        "layers.0": "layers.0",
    }
    assert [format_target(value) for value in targets.values()] == list(targets)


def test_a_neighbourhood_marks_its_node() -> None:
    gm = sharded_graph()
    node = next(node for node in gm.graph.nodes if node.name == "max_dim")
    assert (
        format_neighbourhood(gm, node, around=1)
        == """\
  %mm_default: f32[4,8]{tp:P} = aten.mm(%h, %down) [recompute, bucket=3]  # layers.0.down
> %max_dim: (f32[4], i64[4]) = aten.max.dim(%mm_default, 1)
  %getitem: f32[4] = %max_dim[0]"""
    )


def test_a_neighbourhood_ends_with_the_graph() -> None:
    gm = sharded_graph()
    first = next(iter(gm.graph.nodes))
    lines = format_neighbourhood(gm, first, around=99).splitlines()
    assert [line[2:] for line in lines] == format_graph(gm).splitlines()
    assert [line[0] for line in lines] == [">"] + [" "] * (len(lines) - 1)


PLACEMENTS = st.sampled_from([Replicate(), Shard(0), Shard(1, 2), Partial(), Partial("max")])


STATES = st.tuples(
    st.dictionaries(st.sampled_from(["dp", "tp"]), PLACEMENTS),
    st.none() | st.dictionaries(st.sampled_from(["dp", "tp"]), PLACEMENTS),
)


def meaning(placement: dict[str, Placement], gradient: dict[str, Placement] | None) -> Any:
    """Value and gradient placement on each axis; a gradient that is not stated is the usual one."""
    result = {}
    for axis in ("dp", "tp"):
        value = placement.get(axis, Replicate())
        usual = Replicate() if isinstance(value, Partial) else value
        result[axis] = (value, usual if gradient is None else gradient.get(axis, Replicate()))
    return result


@given(STATES, STATES)
def test_the_text_tells_placements_apart(first: Any, second: Any) -> None:
    """The pipeline takes the text for the program, so whatever differs must be readable from it."""
    texts = []
    for placement, gradient in (first, second):
        ordered = {axis: placement[axis] for axis in sorted(placement)}
        node = placeholder(fx.Graph(), "x", fake(4, 4), placement=ordered)
        if gradient is not None:
            node.meta["grad_placement"] = {axis: gradient[axis] for axis in sorted(gradient)}
        shown = re.findall(r"(\w+):([^,}]+)", format_node(node).partition("{")[2])
        texts.append(sorted(shown))
    assert (texts[0] == texts[1]) == (meaning(*first) == meaning(*second))


@given(st.lists(st.sampled_from([aten.add.Tensor, aten.mul.Tensor]), max_size=8), st.data())
def test_equal_graphs_have_equal_texts(ops: list[Any], data: st.DataObject) -> None:
    choices = [data.draw(st.integers(0, index)) for index, _ in enumerate(ops)]

    def build() -> fx.GraphModule:
        graph = fx.Graph()
        nodes = [placeholder(graph, "x", fake(2))]
        for op, choice in zip(ops, choices, strict=True):
            nodes.append(call(graph, op, nodes[-1], nodes[choice], val=fake(2)))
        graph.output((nodes[-1],))
        return fx.GraphModule(torch.nn.Module(), graph)

    assert format_graph(build()) == format_graph(build())
    assert len(format_graph(build()).splitlines()) == len(ops) + 2
