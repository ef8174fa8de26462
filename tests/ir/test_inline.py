"""A flat graph computes what the nested one does, with the names and paths of its own layers."""

from __future__ import annotations

import copy
import operator
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx
from torch.utils import _pytree as pytree

import msc
from msc.ir.communication import graphs_below
from msc.ir.errors import VerifyError
from msc.ir.inline import inline
from msc.ir.printer import format_graph
from msc.ir.serialize import graphs_from_json, graphs_to_json
from tests.ir.compiled import MESHES, batch, compiled

aten = torch.ops.aten


# -- small graphs


def block() -> fx.GraphModule:
    """`(x, w) -> ((w x, relu x), None)`, with the module paths of layer 0."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    relu = graph.call_function(aten.relu.default, (x,))
    relu.meta = {"module_path": "h.0", "phase": "forward"}
    mul = graph.call_function(aten.mul.Tensor, (w, x))
    mul.meta = {"module_path": "h.0.fc", "marks": {"recompute": True}}
    graph.output(((mul, relu), None))
    return fx.GraphModule(torch.nn.Module(), graph)


def item(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    return graph.call_function(operator.getitem, (node, index))


def chunk() -> fx.GraphModule:
    """Layers 2 and 3, then layer 3 again."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    value = x
    for path in ("h.2", "h.3", "h.3"):
        call = graph.call_module("block", (value, w))
        call.meta["module_path"] = path
        values = item(graph, call, 0)
        value = item(graph, values, -1)
    scale = graph.call_function(aten.neg.default, (value,))
    scale.meta["module_path"] = "norm"
    graph.output({"out": scale, "last": values, "same": item(graph, call, 1)})
    return fx.GraphModule({"block": block()}, graph)


def step() -> fx.GraphModule:
    """Two calls of a chunk, and a node whose name an inlined one would like to have."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    first = graph.call_module("chunk", (x, w))
    second = graph.call_module("chunk", (graph.call_function(operator.getitem, (first, "out")), w))
    last = graph.call_function(operator.getitem, (second, "last"))
    stack = graph.call_function(aten.stack.default, (last,))
    graph.create_node("call_function", aten.neg.default, (stack,), {}, "chunk_h_2_relu_default")
    graph.output((stack, graph.call_function(operator.getitem, (first, "last"))))
    gm = fx.GraphModule({"chunk": chunk()}, graph)
    gm.meta["gradients"] = ["w"]
    return gm


STEP = """\
%x = input
%w = input
%chunk_h_2_relu_default_1 = aten.relu(%x)  # h.2
%chunk_h_2_mul_tensor = aten.mul.Tensor(%w, %x) [recompute]  # h.2.fc
%chunk_h_3_relu_default = aten.relu(%chunk_h_2_relu_default_1)  # h.3
%chunk_h_3_mul_tensor = aten.mul.Tensor(%w, %chunk_h_2_relu_default_1) [recompute]  # h.3.fc
%chunk_h_3_relu_default_1 = aten.relu(%chunk_h_3_relu_default)  # h.3
%chunk_h_3_mul_tensor_1 = aten.mul.Tensor(%w, %chunk_h_3_relu_default) [recompute]  # h.3.fc
%chunk_neg_default = aten.neg(%chunk_h_3_relu_default_1)  # norm
%chunk_1_h_2_relu_default = aten.relu(%chunk_neg_default)  # h.2
%chunk_1_h_2_mul_tensor = aten.mul.Tensor(%w, %chunk_neg_default) [recompute]  # h.2.fc
%chunk_1_h_3_relu_default = aten.relu(%chunk_1_h_2_relu_default)  # h.3
%chunk_1_h_3_mul_tensor = aten.mul.Tensor(%w, %chunk_1_h_2_relu_default) [recompute]  # h.3.fc
%chunk_1_h_3_relu_default_1 = aten.relu(%chunk_1_h_3_relu_default)  # h.3
%chunk_1_h_3_mul_tensor_1 = aten.mul.Tensor(%w, %chunk_1_h_3_relu_default) [recompute]  # h.3.fc
%chunk_1_neg_default = aten.neg(%chunk_1_h_3_relu_default_1)  # norm
%stack_default = aten.stack((%chunk_1_h_3_mul_tensor_1, %chunk_1_h_3_relu_default_1))
%chunk_h_2_relu_default = aten.neg(%stack_default)
return (%stack_default, (%chunk_h_3_mul_tensor_1, %chunk_h_3_relu_default_1))"""


def test_the_text_of_a_flat_graph() -> None:
    nested = step()
    before = [format_graph(gm) for gm in graphs_below(nested)]
    flat = inline(nested)
    assert format_graph(flat) == STEP
    assert flat.meta == nested.meta
    assert [format_graph(gm) for gm in graphs_below(nested)] == before


def test_metadata_is_a_copy_of_the_inner_nodes() -> None:
    nested = chunk()
    flat = inline(nested)
    relu = next(node for node in flat.graph.nodes if node.name == "h_3_relu_default")
    assert relu.meta == {"module_path": "h.3", "phase": "forward"}
    relu.meta["phase"] = "backward"
    inner = nested.get_submodule("block")
    assert isinstance(inner, fx.GraphModule)
    assert [n.meta.get("phase") for n in inner.graph.nodes if n.op == "call_function"] == [
        "forward",
        None,
    ]


def test_a_flat_graph_stays_as_it_is() -> None:
    flat = inline(step())
    assert format_graph(inline(flat)) == format_graph(flat)


def paths(*own: str, called: str) -> list[str]:
    """The paths that nodes with the paths `own` have after a call with the path `called`."""
    graph = fx.Graph()
    x = node = graph.placeholder("x")
    for path in own:
        node = graph.call_function(aten.neg.default, (node,))
        node.meta["module_path"] = path
    graph.output((node,))
    callee = fx.GraphModule(torch.nn.Module(), graph)
    outer = fx.Graph()
    call = outer.call_module("callee", (outer.placeholder(x.name),))
    call.meta["module_path"] = called
    outer.output((item(outer, call, 0),))
    flat = inline(fx.GraphModule({"callee": callee}, outer))
    return [node.meta["module_path"] for node in flat.graph.nodes if node.op == "call_function"]


def test_only_paths_of_the_layer_are_rewritten() -> None:
    found = paths("h.1", "h.1.fc", "", "norm", "h.1.experts.1.up", called="h.12")
    assert found == ["h.12", "h.12.fc", "", "norm", "h.12.experts.1.up"]


def test_a_layer_of_another_container_takes_its_path() -> None:
    two_layers = ["encoder.h.0.fc", "0"]
    assert paths(*two_layers, called="g.1") == two_layers  # which of them is the call's? No guess.
    assert paths(*two_layers, called="1") == ["encoder.h.0.fc", "1"]
    assert paths("encoder.h.0.fc", called="decoder.h.4") == ["decoder.h.4.fc"]


def test_a_node_of_the_layer_before_is_of_the_layer_before_the_call() -> None:
    """A residual sum of the layer before may stand in a layer's graph."""
    found = paths("h.1.fc", "h.0", "h.1.norm", "g.0", called="h.12")
    assert found == ["h.12.fc", "h.11", "h.12.norm", "g.0"]


def test_a_call_of_no_layer_keeps_paths() -> None:
    assert paths("head", "h.3", called="head") == ["head", "h.3"]


def test_a_call_without_a_path_keeps_paths() -> None:
    assert paths("h.0.fc", called="") == ["h.0.fc"]


def test_constants_come_along() -> None:
    graph = fx.Graph()
    graph.output((graph.call_function(aten.neg.default, (graph.get_attr("c"),)),))
    inner = fx.GraphModule({"c": torch.ones(2)}, graph)
    outer = fx.Graph()
    outer.output((item(outer, outer.call_module("inner", ()), 0), outer.get_attr("c")))
    flat = inline(fx.GraphModule({"inner": inner, "c": torch.zeros(2)}, outer))
    negative, zero = flat()
    assert (negative.tolist(), zero.tolist()) == ([-1, -1], [0, 0])


def test_a_call_of_no_graph_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.call_module("relu", (graph.placeholder("x"),)),))
    gm = fx.GraphModule({"relu": torch.nn.ReLU()}, graph)
    with pytest.raises(
        VerifyError, match="%relu calls 'relu', a ReLU; a rank graph calls graphs only"
    ):
        inline(gm)


# -- random nested graphs


@st.composite
def nested_graphs(draw: st.DrawFn, depth: int = 3) -> fx.GraphModule:
    """Two inputs; ops and calls on what there is; a result of any nesting, or one tensor."""
    graph = fx.Graph()
    values: list[Any] = [graph.placeholder("x"), graph.placeholder("w")]
    modules: dict[str, Any] = {}
    shared = [draw(nested_graphs(depth - 1))] if depth else []
    for _ in range(draw(st.integers(0, 4))):
        operands = tuple(draw(st.sampled_from(values)) for _ in range(2))
        if not shared or draw(st.booleans()):
            values.append(graph.call_function(aten.sub.Tensor, operands))
            continue
        name = f"inner_{len(modules)}"
        modules[name] = shared[0]
        call = graph.call_module(name, operands)
        call.meta["module_path"] = draw(st.sampled_from(("", "h.0", "h.7")))
        result = shared[0].graph.output_node().args[0]
        values += draw_items(draw, graph, call, result)
    graph.output(draw_result(draw, values))
    return fx.GraphModule(modules, graph)


def draw_items(draw: st.DrawFn, graph: fx.Graph, node: fx.Node, result: Any) -> list[fx.Node]:
    """The tensors in the result of a call, some of them."""
    if isinstance(result, fx.Node):
        return [node]
    found = []
    for index, part in enumerate(result):
        if draw(st.booleans()):
            found += draw_items(draw, graph, item(graph, node, index), part)
    return found


def draw_result(draw: st.DrawFn, values: list[Any]) -> Any:
    node = st.sampled_from(values)
    return draw(st.recursive(node, lambda inner: st.lists(inner).map(tuple), max_leaves=5))


@given(nested_graphs())
def test_a_flat_graph_computes_the_same(nested: fx.GraphModule) -> None:
    flat = inline(nested)
    flat.graph.lint()
    assert all(node.op != "call_module" for node in flat.graph.nodes)
    names = [node.name for node in flat.graph.nodes]
    assert len(set(names)) == len(names)
    inputs = torch.tensor(3), torch.tensor(5)
    expected, found = fx.Interpreter(nested).run(*inputs), fx.Interpreter(flat).run(*inputs)
    assert pytree.tree_map(Tensor.item, found) == pytree.tree_map(Tensor.item, expected)


# -- whole programs


def calls(gm: fx.GraphModule) -> Counter[str]:
    """How often each op runs, whatever the nesting."""
    found: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op == "call_module":
            inner = gm.get_submodule(str(node.target))
            assert isinstance(inner, fx.GraphModule)
            found += calls(inner)
        elif node.op == "call_function" and node.target is not operator.getitem:
            found[str(node.target)] += 1
    return found


@pytest.mark.parametrize("mesh", MESHES)
def test_a_flat_program_has_every_layer(mesh: str) -> None:
    layers: Counter[str] = Counter()
    for nested in compiled(mesh).rank_graphs:
        flat = inline(nested)
        flat.graph.lint()
        assert calls(flat) == calls(nested)
        paths = [str(node.meta.get("module_path")) for node in flat.graph.nodes]
        layers.update(path[:3] for path in paths if path.startswith("h."))
    assert set(layers) == {"h.0", "h.1", "h.2", "h.3"}
    assert len(set(layers.values())) == 1  # equal layers have equally many nodes


@pytest.mark.parametrize("mesh", MESHES)
def test_flat_and_reread_programs_compute_the_same(mesh: str) -> None:
    program = compiled(mesh)
    expected = copy.copy(program).run_virtual(batch())
    named = {str(index): gm for index, gm in enumerate(program.rank_graphs)}
    for graphs in (
        [inline(gm) for gm in program.rank_graphs],
        list(graphs_from_json(graphs_to_json(named)).values()),
    ):
        found = with_graphs(program, graphs).run_virtual(batch())
        assert torch.equal(found.loss, expected.loss)
        for name in expected.params:
            assert torch.equal(found.params[name], expected.params[name])
            assert torch.equal(found.grads[name], expected.grads[name])


def with_graphs(program: msc.Program, graphs: list[fx.GraphModule]) -> msc.Program:
    result = copy.copy(program)
    result.rank_graphs = graphs
    return result
