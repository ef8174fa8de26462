"""Rank graphs as JSON: nothing is lost, equal graphs give equal bytes, errors name the node."""

from __future__ import annotations

import json
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from msc.ir import actions
from msc.ir.communication import graphs_below
from msc.ir.errors import UserError, VerifyError
from msc.ir.placement import Partial, Shard
from msc.ir.printer import format_graph
from msc.ir.serialize import fingerprint, graphs_from_json, graphs_to_json, to_text
from msc.ir.torch_private import FakeTensorMode, new_fake
from msc.ir.values import tensors_of
from tests.ir.compiled import MESHES, compiled

aten = torch.ops.aten
MODE = FakeTensorMode()


def ranks(mesh: str) -> dict[str, fx.GraphModule]:
    return {f"rank.pp{stage}": gm for stage, gm in enumerate(compiled(mesh).rank_graphs)}


def reread(graphs: dict[str, fx.GraphModule]) -> dict[str, fx.GraphModule]:
    return graphs_from_json(json.loads(to_text(graphs_to_json(graphs))))


def every_graph(graphs: dict[str, fx.GraphModule]) -> list[fx.GraphModule]:
    """All graphs in order, each object once."""
    found = [gm for root in graphs.values() for gm in graphs_below(root)]
    return list({id(gm): gm for gm in found}.values())


def knowledge(gm: fx.GraphModule) -> list[Any]:
    """All that is known of each node, and all that its text leaves out."""

    def plain(node: fx.Node) -> dict[str, Any]:
        tensors = [(tuple(t.shape), t.stride(), t.dtype) for t in tensors_of(node)]
        return {**node.meta, "val": tensors, "val type": type(node.meta.get("val"))}

    return [(node.op, node.target, node.name, plain(node)) for node in gm.graph.nodes]


@pytest.mark.parametrize("mesh", MESHES)
def test_rank_graphs_come_back_the_same(mesh: str) -> None:
    before = ranks(mesh)
    after = reread(before)
    assert list(after) == list(before)
    pairs = list(zip(every_graph(before), every_graph(after), strict=True))  # shared as before
    assert len(pairs) > len(before)
    for old, new in pairs:
        new.graph.lint()
        assert format_graph(new) == format_graph(old)
        assert knowledge(new) == knowledge(old)
        assert new.meta == old.meta


@pytest.mark.parametrize("mesh", MESHES)
def test_writing_again_gives_the_same_text(mesh: str) -> None:
    data = graphs_to_json(ranks(mesh))
    again = graphs_to_json(reread(ranks(mesh)))
    assert to_text(again) == to_text(data)
    assert json.loads(to_text(data)) == data
    assert fingerprint(json.loads(to_text(data))) == fingerprint(data)


def test_all_fake_tensors_are_of_one_mode() -> None:
    nodes = [n for gm in every_graph(reread(ranks("pp=2,dp=2"))) for n in gm.graph.nodes]
    modes = {id(getattr(t, "fake_mode", None)) for node in nodes for t in tensors_of(node)}
    assert len(modes) == 1


def test_fingerprints_tell_programs_apart() -> None:
    found = {fingerprint(graphs_to_json(ranks(mesh))) for mesh in MESHES}
    assert len(found) == len(MESHES)


SCRIPT = """
import sys
from tests.ir.compiled import compiled
from msc.ir.serialize import graphs_to_json, to_text
graphs = compiled("pp=2,dp=2,tp=2", layers=2).rank_graphs
sys.stdout.write(to_text(graphs_to_json({str(i): gm for i, gm in enumerate(graphs)})))
"""


def test_two_processes_write_the_same_bytes() -> None:
    root = Path(__file__).parents[2]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
            stdout=subprocess.PIPE,
        )
        for seed in ("1", "2")
    ]
    first, second = (process.communicate()[0] for process in processes)
    assert [process.returncode for process in processes] == [0, 0]
    assert first.startswith(b'{"format": "msc graphs"')
    assert first == second


# -- small graphs


def small() -> fx.GraphModule:
    """One graph called twice, every field of a node in use."""
    inner = fx.Graph()
    x = inner.placeholder("x")
    x.meta = {"val": new_fake(MODE, (4, 8), torch.float32), "kind": "input", "name": "x"}
    total = inner.call_function(aten.sum.dim_IntList, (x, [0], True), {"dtype": torch.float64})
    total.meta = {
        "val": new_fake(MODE, (1, 8), torch.float64, (1, 1)),
        "placement": {"tp": Shard(1, (4, 4)), "dp": Partial("max")},
        "grad_placement": {},
        "module_path": "layers.0",
        "source": "model.py:3 in forward",
        "phase": "forward",
        "differentiable": True,
        "marks": {"recompute": True, "limit": float("inf")},
    }
    inner.output((total, None))
    callee = fx.GraphModule(torch.nn.Module(), inner)
    graph = fx.Graph()
    y = graph.placeholder("y")
    y.meta = {"val": x.meta["val"]}
    calls = [graph.call_module(name, (y,)) for name in ("one", "two")]
    items = [graph.call_function(operator.getitem, (call, 0)) for call in calls]
    sent = graph.call_function(actions.send, ([*items], 1, "pp:0>1"))
    done = graph.call_function(actions.wait, (sent,))
    graph.output({"sum": tuple(items), "done": done})
    gm = fx.GraphModule({"one": callee, "two": callee}, graph)
    gm.meta = {"gradients": ["w"], "sizes": (1, 2)}
    return gm


SMALL = """\
{"format": "msc graphs", "version": 1, "roots": [["rank", 1]], "graphs": [
{"name": "one", "meta": [], "modules": {}, "nodes": [
["placeholder", "x", "x", [], [], {"kind": "input", "name": "x", "val": {"T": "f32[4,8]"}}],
["call_function", "sum_dim_int_list", "aten.sum.dim_IntList", [{"n": "x"}, [0], true], \
[["dtype", {"torch": "float64"}]], {"differentiable": true, "grad_placement": {"d": []}, \
"marks": {"d": [["recompute", true], ["limit", {"float": "inf"}]]}, "module_path": "layers.0", \
"phase": "forward", "placement": {"d": [["tp", {"S": [1, [4, 4], 0]}], ["dp", {"P": "max"}]]}, \
"source": "model.py:3 in forward", "val": {"T": "f64[1,8]/1,1"}}],
["output", "output", "output", [{"t": [{"n": "sum_dim_int_list"}, null]}], [], {}]]},
{"name": "rank", "meta": [["gradients", ["w"]], ["sizes", {"t": [1, 2]}]], \
"modules": {"one": 0, "two": 0}, "nodes": [
["placeholder", "y", "y", [], [], {"val": {"T": "f32[4,8]"}}],
["call_module", "one", "one", [{"n": "y"}], [], {}],
["call_module", "two", "two", [{"n": "y"}], [], {}],
["call_function", "getitem", "operator.getitem", [{"n": "one"}, 0], [], {}],
["call_function", "getitem_1", "operator.getitem", [{"n": "two"}, 0], [], {}],
["call_function", "send", "send", [[{"n": "getitem"}, {"n": "getitem_1"}], 1, "pp:0>1"], [], {}],
["call_function", "wait", "wait", [{"n": "send"}], [], {}],
["output", "output", "output", [{"d": [["sum", {"t": [{"n": "getitem"}, {"n": "getitem_1"}]}], \
["done", {"n": "wait"}]]}], [], {}]]}]}
"""


def test_the_text_of_a_small_graph() -> None:
    assert to_text(graphs_to_json({"rank": small()})) == SMALL


def test_a_small_graph_comes_back_with_all_that_is_known() -> None:
    before = small()
    after = reread({"rank": before})["rank"]
    assert format_graph(after) == format_graph(before)
    assert after.meta == before.meta
    assert after.get_submodule("one") is after.get_submodule("two")
    assert list(after.graph.output_node().args[0]) == ["sum", "done"]  # type: ignore[arg-type]
    for old, new in zip(every_graph({"": before}), every_graph({"": after}), strict=True):
        assert knowledge(new) == knowledge(old)


def test_one_graph_under_two_names_is_one_object() -> None:
    gm = small()
    data = graphs_to_json({"a": gm, "b": gm})
    assert len(data["graphs"]) == 2
    found = graphs_from_json(data)
    assert found["a"] is found["b"]


def test_a_name_that_fx_would_not_give_is_kept() -> None:
    gm = small()
    for node, name in zip(gm.graph.nodes, ("sum", "x_01"), strict=False):
        node.name = name
    assert format_graph(reread({"": gm})[""]) == format_graph(gm)


# -- refusals


def called(target: Callable[..., Any], *args: Any, **meta: Any) -> fx.GraphModule:
    graph = fx.Graph()
    node = graph.call_function(target, args)
    node.meta = meta
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


def test_a_function_that_has_no_name_in_torch_is_refused() -> None:
    with pytest.raises(VerifyError) as error:
        graphs_to_json({"rank": called(operator.add, 1, 2)})
    assert str(error.value) == (
        "%add in graph 'rank' is call_function <built-in function add>, which cannot be written to "
        "a file: a graph calls registered ops, operator.getitem, actions and graphs."
    )


def test_a_constant_is_refused() -> None:
    graph = fx.Graph()
    graph.output((graph.get_attr("c"),))
    gm = fx.GraphModule({"c": torch.zeros(2)}, graph)
    with pytest.raises(
        VerifyError, match="%c in graph 'rank' is get_attr c, which cannot be written"
    ):
        graphs_to_json({"rank": gm})


def test_an_argument_that_is_no_value_is_refused() -> None:
    with pytest.raises(VerifyError) as error:
        graphs_to_json({"rank": called(aten.add.Tensor, torch.zeros(2), 1)})
    assert str(error.value) == (
        "%add_tensor in graph 'rank': an argument cannot be written to a file: "
        "a tensor with numbers, of shape (2,), cannot be saved."
    )


def test_metadata_that_is_no_value_is_refused() -> None:
    with pytest.raises(VerifyError) as error:
        graphs_to_json({"rank": called(aten.zeros.default, [2], cache={1})})
    assert str(error.value) == (
        "%zeros_default in graph 'rank': 'cache' cannot be written to a file: "
        "a value of type builtins.set cannot be saved."
    )


def test_another_version_is_refused() -> None:
    data = graphs_to_json({"rank": small()})
    with pytest.raises(UserError, match="version 2; this MSC reads 'msc graphs', version 1"):
        graphs_from_json({**data, "version": 2})


@pytest.mark.parametrize("name", ["aten.no_such_op.default", "aten.add", "os.system", "no_action"])
def test_an_op_that_is_not_there_is_refused(name: str) -> None:
    data = graphs_to_json({"rank": called(aten.zeros.default, [2])})
    data["graphs"][0]["nodes"][0][2] = name
    with pytest.raises(UserError, match=f"The saved program calls {name}, which is not registered"):
        graphs_from_json(data)
