"""Generated source: its text, the lifetime of values, and what it computes."""

from __future__ import annotations

import gc
import math
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from msc.codegen.emit import Emitter, emit
from msc.codegen.pieces import cut_at_communication
from msc.ir import actions
from msc.ir.errors import VerifyError
from msc.ir.mesh import Mesh
from msc.ir.ops.fused_collectives import ALL_GATHER_MATMUL, MATMUL_REDUCE_SCATTER
from msc.ir.ops.library import KERNELS
from msc.runtime.actions import LocalActions
from tests.runtime.build import ATEN, C10D, Builder, all_reduce
from tests.runtime.programs import accumulation, block, two_blocks

RT = LocalActions(Mesh.parse("tp=1"), 0)


class Alone(LocalActions):
    """A process of its own: collectives change nothing, and their starts are counted."""

    starts = 0

    def all_reduce(self, value: torch.Tensor, op: str, group: str, site: str) -> torch.Tensor:
        self.starts += 1
        return value.clone()

    @staticmethod
    def wait(token: torch.Tensor) -> torch.Tensor:
        return token


PROCESS = """\
def first(rt, args):
    x, w = args
    args.clear()
    mm_default = aten_mm(x, w)  # f64[4,8] layers.0
    del w
    all_reduce_default = rt.all_reduce(mm_default, 'sum', 'tp', \
'%all_reduce_default in first (layers.0)')  # f64[4,8] layers.0
    del mm_default
    relu_default = aten_relu(x)  # f64[4,8] layers.0
    del x
    wait_tensor_default = rt.wait(all_reduce_default)  # f64[4,8] layers.0
    del all_reduce_default
    add_tensor = add_(wait_tensor_default, relu_default)  # f64[4,8] layers.0
    del wait_tensor_default
    return (add_tensor, relu_default)


def rank_program(rt, args):
    x, w = args
    args.clear()
    box = [x, w]
    del x
    getitem, _ = first(rt, box)  # (f64[4,8], f64[4,8])
    del _
    box = [getitem, w]
    del w, getitem
    getitem_1, getitem_2 = first(rt, box)  # (f64[4,8], f64[4,8])
    return (getitem_1, getitem_2)
"""


def test_process_dialect() -> None:
    assert emit(two_blocks(0), "process").source == PROCESS


def test_virtual_dialect_differs_only_where_it_waits() -> None:
    expected = PROCESS.replace("= rt.wait(all_reduce_default)", "= yield all_reduce_default")
    assert emit(two_blocks(0), "virtual").source == expected.replace(
        "= first(rt, box)", "= yield from first(rt, box)"
    )


def test_a_graph_that_waits_for_nothing_is_a_plain_function() -> None:
    build = Builder()
    build.call(C10D.all_reduce.default, build.input("x", 4), "sum", "tp")
    emitter = Emitter("virtual")
    started = build.done(None)
    assert not emitter.waits(started)
    assert emitter.waits(block())
    assert emitter.emit(started).program(Alone(RT.mesh, 0), [torch.zeros(4)]) == (None,)


def test_programs_of_one_emitter_share_graphs() -> None:
    emitter = Emitter("process")
    emitter.emit(two_blocks(0))
    assert emitter.emit(two_blocks(1)).source.count("def first") == 1


def test_arguments_of_every_kind() -> None:
    """Literals are written out; what has none is bound by name."""
    seen: list[Any] = []

    def note(*values: Any, **named: Any) -> torch.Tensor:
        seen.append((values, named))
        return torch.zeros(())

    build = Builder()
    x = build.input("x", 4)
    values = (
        -1.5, math.inf, True, None, "a'b", [1, [x]], (x,), {"k": 2}, slice(1, None), torch.float32,
        torch.device("cpu"), torch.strided, torch.channels_last, Ellipsis, 1e300, 2 + 1j,
    )  # fmt: skip
    build.call(note, *values, val=None, axis=x)
    value = torch.ones(4)
    emit(build.done(None), "process").program(RT, [value])
    expected: list[Any] = [*values]
    expected[5], expected[6] = [1, [value]], (value,)
    found, named = seen[-1]  # the first call is the builder's
    assert repr(found) == repr(tuple(expected))
    assert named["axis"] is value


def test_names_never_collide() -> None:
    """Nodes may be called like the generated code's own names."""
    build = Builder()
    values = [build.input(name, 2) for name in ("rt", "args", "aten_add_Tensor", "box", "len")]
    total = values[0]
    for value in values[1:]:
        total = build.call(ATEN.add.Tensor, total, value)
    inner = build.done(total)
    outer = Builder()
    inputs = [outer.input(name, 2) for name in ("rank_program", "inner", "aten_add", "_", "a")]
    result = outer.item(outer.graph_call("inner", inner, *inputs), 0)
    graph = outer.done(outer.call(ATEN.add.Tensor, result, inputs[0]))
    powers = [torch.full((2,), 2.0**index) for index in range(5)]
    (found,) = emit(graph, "process").program(RT, powers)
    assert torch.equal(found, torch.full((2,), 32.0))


def test_values_end_at_their_last_use() -> None:
    """Also inside a callee, and also the caller's own inputs."""
    alive: dict[str, list[bool]] = {}
    watched: dict[str, weakref.ref[torch.Tensor]] = {}

    def watch(name: str) -> Callable[..., torch.Tensor]:
        def function(value: torch.Tensor) -> torch.Tensor:
            alive[name] = [ref() is not None for ref in watched.values()]
            result = value + 1
            watched[name] = weakref.ref(result)
            return result

        return function

    inner = Builder()
    saved, x = inner.input("saved", 2), inner.input("x", 2)
    both = inner.call(ATEN.add.Tensor, saved, x)
    last = inner.call(watch("inner"), both, val=both.meta["val"])
    inner_graph = inner.done(last)
    outer = Builder()
    start = outer.input("start", 2)
    first = outer.call(watch("first"), start, val=start.meta["val"])
    second = outer.call(watch("second"), first, val=start.meta["val"])
    result = outer.graph_call("inner", inner_graph, first, second)
    graph = outer.done(outer.item(result, 0))
    inputs = [torch.zeros(2)]
    watched["start"] = weakref.ref(inputs[0])
    gc.collect()
    emit(graph, "process").program(RT, inputs)
    assert inputs == []
    assert alive == {
        "first": [True],  # start, which is being read
        "second": [False, True],
        "inner": [False, False, False],  # start, first, second: gone within the callee
    }


def test_a_tuple_read_twice_at_one_place() -> None:
    build = Builder()
    halves = build.call(ATEN.split.Tensor, build.input("x", 4), 2)
    graph = build.done(build.item(halves, 1), build.item(halves, 1), build.item(halves, 0))
    found = emit(graph, "process").program(RT, [torch.arange(4)])
    assert [value.tolist() for value in found] == [[2, 3], [2, 3], [0, 1]]


def test_sums_are_reused_only_where_nothing_else_reads_them() -> None:
    source = emit(accumulation(0), "process").source
    assert [source.count(f"rt.{name}(") for name in ("accumulate", "accumulate_")] == [2, 1]

    def first_sum_is_returned(build: Builder, x: fx.Node) -> fx.GraphModule:
        one = build.call(actions.accumulate, None, (x,))
        two = build.call(actions.accumulate, one, (x,))
        three = build.call(actions.accumulate, two, (x,))
        return build.done(build.item(two, 0), build.item(three, 0))

    build = Builder()
    graph = first_sum_is_returned(build, build.input("x", 2))
    found = emit(graph, "process").program(RT, [torch.ones(2)])
    assert [value.tolist() for value in found] == [[2.0, 2.0], [3.0, 3.0]]


@pytest.mark.parametrize(("returned", "reused"), [(False, 1), (True, 0)])
def test_items_of_a_sum_are_reused_under_the_same_condition(returned: bool, reused: int) -> None:
    build = Builder()
    x = build.input("x", 2)
    total = build.call(actions.accumulate, None, (x, x))
    total = build.call(actions.accumulate, total, (x, x))
    items = [build.item(total, index) for index in range(2)]
    last = build.call(actions.accumulate, items, (x, x))
    graph = build.done(build.item(last, 0), items[1] if returned else build.item(last, 1))
    emitted = emit(graph, "process")
    assert emitted.source.count("rt.accumulate_(") == reused
    found = emitted.program(RT, [torch.ones(2)])
    assert [value.tolist() for value in found] == [
        [3.0, 3.0],
        [2.0, 2.0] if returned else [3.0] * 2,
    ]


def test_items_that_nobody_reads_end_at_once() -> None:
    build = Builder()
    halves = build.call(ATEN.split.Tensor, build.input("x", 4), 2)
    first, _ = build.item(halves, 0), build.item(halves, 1)
    source = emit(build.done(build.call(ATEN.neg.default, first)), "process").source
    assert "getitem, getitem_1 = aten_split_Tensor(x, 2)" in source
    assert source.index("del x, getitem_1") < source.index("aten_neg")


def test_opaque_ops_run_as_plain_functions() -> None:
    target = torch.ops.msc.linear.default
    build = Builder()
    graph = build.done(build.call(target, build.input("x", 2, 3), build.input("w", 4, 3)))
    emitted = emit(graph, "process")
    assert emitted.namespace["msc_linear"] is KERNELS[target]
    x, w = torch.randn(2, 3), torch.randn(4, 3)
    torch.testing.assert_close(emitted.program(RT, [x, w])[0], x @ w.T)


def test_tracebacks_show_generated_lines() -> None:
    build = Builder()
    graph = build.done(build.call(ATEN.view.default, build.input("x", 4), [2, 2]))
    with pytest.raises(RuntimeError) as error:
        emit(graph, "process").program(RT, [torch.zeros(3)])
    text = "".join(traceback.format_tb(error.tb))
    assert "view_default = aten_view(x, [2, 2])" in text


@pytest.mark.parametrize(
    ("write", "text"),
    [
        (
            lambda b, x: b.call(C10D.broadcast.default, x, 0, "tp", val=x.meta["val"]),
            "%broadcast_default calls _c10d_functional.broadcast.default; a rank graph uses ",
        ),
        (
            lambda b, x: b.call(C10D.all_reduce.default, x, "sum", group_name="tp", val=1),
            "%all_reduce_default = _c10d_functional.all_reduce.default must have all arguments by "
            "position",
        ),
        (
            lambda b, x: b.call(actions.send, [x], 1, channel="up"),
            "%send = send takes 3 arguments, all by position.",
        ),
        (
            lambda b, x: b.graph.call_module("linear", (x,)),
            "%linear calls 'linear', a Linear; a rank graph calls graphs only.",
        ),
    ],
)
def test_other_forms_are_refused(write: Callable[[Builder, fx.Node], Any], text: str) -> None:
    build = Builder()
    write(build, build.input("x", 4))
    build.graph.output(())
    root = {"linear": torch.nn.Linear(4, 4), **build.modules}
    with pytest.raises(VerifyError) as error:
        emit(fx.GraphModule(root, build.graph), "process")
    assert str(error.value).startswith(text)


OPS = st.lists(
    st.tuples(st.sampled_from(["relu", "add", "split", "reduce", "constant"]), st.integers(0, 99),
              st.integers(0, 99)),
    max_size=12,
)  # fmt: skip


@settings(deadline=None, max_examples=60)
@given(OPS, st.lists(st.integers(0, 99), min_size=1, max_size=3), st.booleans())
def test_emitted_and_cut_graphs_equal_the_graph(
    ops: list[tuple[str, int, int]], results: list[int], cut: bool
) -> None:
    """Against fx's own code, where a collective of one rank is the identity."""
    build, oracle = Builder(), Builder()
    pairs = [(build.input("x", 4), oracle.input("x", 4))]
    constants = {"constant": torch.tensor([1.0, -2.0, 3.0, -4.0], dtype=torch.float64)}
    for kind, left, right in ops:
        (a, a2), (b, b2) = pairs[left % len(pairs)], pairs[right % len(pairs)]
        if kind == "relu":
            pairs.append((build.call(ATEN.relu.default, a), oracle.call(ATEN.relu.default, a2)))
        elif kind == "add":
            pair = build.call(ATEN.add.Tensor, a, b), oracle.call(ATEN.add.Tensor, a2, b2)
            pairs.append(pair)
        elif kind == "split":
            parts = build.call(ATEN.split.Tensor, a, 2), oracle.call(ATEN.split.Tensor, a2, 2)
            items = build.item(parts[0], right % 2), oracle.item(parts[1], right % 2)
            twice = (ATEN.cat.default, ([items[0]] * 2,)), (ATEN.cat.default, ([items[1]] * 2,))
            pairs.append(
                (build.call(twice[0][0], *twice[0][1]), oracle.call(twice[1][0], *twice[1][1]))
            )
        elif kind == "reduce":
            pairs.append((all_reduce(build, a, "tp"), a2))
        else:
            nodes = [own.graph.get_attr("constant") for own in (build, oracle)]
            for node in nodes:
                node.meta["val"] = constants["constant"].to("meta")
            pairs.append((nodes[0], nodes[1]))
    chosen = [pairs[index % len(pairs)] for index in results]
    graphs = []
    for own, side in ((build, 0), (oracle, 1)):
        own.graph.output(tuple(pair[side] for pair in chosen))
        graphs.append(fx.GraphModule(dict[str, Any](constants), own.graph))
    graph = cut_at_communication(graphs[0]) if cut else graphs[0]
    value = torch.tensor([-1.0, 2.0, -3.0, 4.0], dtype=torch.float64)
    rt = Alone(RT.mesh, 0)
    found = emit(graph, "process").program(rt, [value])
    assert rt.starts == sum(kind == "reduce" for kind, _, _ in ops)
    for own, expected in zip(found, graphs[1](value), strict=True):
        assert torch.equal(own, expected)


def test_the_compiler_gets_graphs_that_only_compute() -> None:
    """A block with an all-reduce is cut at its start and its wait, once."""
    given: list[list[str]] = []

    def compile_chunk(module: fx.GraphModule) -> Callable[..., Any]:
        given.append([node.name for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    emitted = emit(two_blocks(0), "process", compile_chunk)
    assert given == [["mm_default"], ["relu_default"], ["add_tensor"]]
    x, w = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    middle = x @ w + x.relu()
    found = emitted.program(Alone(RT.mesh, 0), [x, w])
    torch.testing.assert_close(found, (middle @ w + middle.relu(), middle.relu()))


def fused_layer() -> fx.GraphModule:
    """A gather and a reduction, each with its GEMM, and what is computed between them."""
    build = Builder("up")
    x, w = build.input("x", 2, 4), build.input("w", 3, 4)
    args: tuple[Any, ...] = (x, 0, [w], [None], [False], [], [], True, 2, "tp")
    fused = build.call(ALL_GATHER_MATMUL, *args)
    y = build.call(ATEN.relu.default, build.item(fused, 0))
    z = build.call(MATMUL_REDUCE_SCATTER, y, w, None, True, 0, 2, "tp")
    return build.done(z, build.call(ATEN.neg.default, build.item(fused, 1)))


@pytest.mark.parametrize(("dialect", "waits"), [("process", ""), ("virtual", "yield from ")])
def test_a_fused_collective_is_one_line(dialect: Any, waits: str) -> None:
    lines = [
        line.partition("  #")[0]
        for line in emit(fused_layer(), dialect).source.splitlines()
        if "rt." in line
    ]
    assert lines == [
        f"    getitem, getitem_1 = {waits}rt.all_gather_matmul(x, 0, [w], [None], [False], [], [], "
        "True, 2, 'tp', '%all_gather_matmul_default in rank_program (up)')",
        f"    matmul_reduce_scatter_default = {waits}rt.matmul_reduce_scatter(relu_default, w, "
        "None, True, 0, 2, 'tp', '%matmul_reduce_scatter_default in rank_program (up)')",
    ]


def test_the_results_of_a_fused_collective_are_read_outside_of_pieces() -> None:
    cut = cut_at_communication(fused_layer())
    assert [node.op for node in cut.graph.nodes].count("call_module") == 2
    pieces = [cut.get_submodule(str(n.target)) for n in cut.graph.find_nodes(op="call_module")]
    for piece in pieces:
        assert isinstance(piece, fx.GraphModule)
        (given,) = piece.graph.find_nodes(op="placeholder")
        assert isinstance(given.meta["val"], torch.Tensor)
