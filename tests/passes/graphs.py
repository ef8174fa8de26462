"""Hand-built forward graphs, as normalization leaves them, and compilations of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from msc.capture.entry import capture
from msc.compiler import new_unit
from msc.ir.layout import InputLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.optimizer import Optimizer
from msc.ir.pipeline import Pipeline
from msc.ir.placement import Shard
from msc.ir.printer import format_graph
from msc.ir.structure import output_nodes, placeholders
from msc.ir.torch_private import FakeTensorMode
from msc.passes.compilation import Compilation, Settings
from msc.passes.normalize import NORMALIZE
from msc.passes.pipelines import TRAIN
from msc.runtime.virtual import VirtualExecutor
from tests.capture.models import GPT as GPT
from tests.capture.models import Llama as Llama
from tests.capture.models import token_batch as token_batch

ATEN = torch.ops.aten
LINEAR = torch.ops.msc.linear.default


class Forward:
    """Writes a forward graph node by node; `val` of each op comes from running it on fakes."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        self.graph = fx.Graph()
        self.mode = FakeTensorMode()
        self.dtype = dtype

    def placeholder(
        self, kind: str, name: str, *shape: int, dtype: torch.dtype | None = None, **meta: Any
    ) -> fx.Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        with self.mode:
            value = torch.empty(shape, dtype=dtype or self.dtype)
        node.meta = {"val": value, "kind": kind, "name": name, **meta}
        return node

    def parameter(self, name: str, *shape: int, trains: bool = True) -> fx.Node:
        return self.placeholder("parameter", name, *shape, requires_grad=trains)

    def input(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        return self.placeholder("input", name, *shape, dtype=dtype)

    def buffer(self, name: str, *shape: int) -> fx.Node:
        return self.placeholder("buffer", name, *shape)

    def call(self, target: Any, *args: Any, path: str = "", **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        with self.mode:
            values, named = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
            node.meta = {"val": target(*values, **named)}
        if path:
            node.meta["module_path"] = path
        return node

    def linear(self, x: fx.Node, w: fx.Node, path: str = "") -> fx.Node:
        return self.call(LINEAR, x, w, path=path)

    def done(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(tuple(results))
        self.graph.lint()
        gm = fx.GraphModule({}, self.graph)
        gm.meta["fake_mode"] = self.mode
        return gm


def layers(
    num_layers: int = 2, container: str = "layers", tied: bool = False, samples: int = 4
) -> fx.GraphModule:
    """`x + down(relu(up(x)))` for each layer, then the sum of a head's results.

    tied: the head's weight scales the input as well, so the first and the last layer share it.
    """
    build = Forward()
    head = build.parameter("head.weight", 8, 8)
    weights = [
        (
            build.parameter(f"{container}.{i}.up.weight", 16, 8),
            build.parameter(f"{container}.{i}.down.weight", 8, 16),
        )
        for i in range(num_layers)
    ]
    x = build.input("x", samples, 8)
    if tied:
        x = build.linear(x, head, "embed")
    for i, (up, down) in enumerate(weights):
        path = f"{container}.{i}"
        hidden = build.linear(x, up, f"{path}.up")
        hidden = build.call(ATEN.relu.default, hidden, path=f"{path}.act")
        x = build.call(ATEN.add.Tensor, x, build.linear(hidden, down, f"{path}.down"), path=path)
    y = build.linear(x, head, "head")
    return build.done(build.call(ATEN.sum.default, y))


def compilation(
    gm: fx.GraphModule,
    mesh: str = "",
    micro_batches: int = 1,
    batch_dims: Mapping[str, int | None] | None = None,
    optimizer: Optimizer | None = None,
    **settings: Any,
) -> Compilation:
    """A compilation of a normalized forward graph; dim 0 of every input is its batch."""
    inputs = [node for node in placeholders(gm) if node.meta["kind"] == "input"]
    dims = {node.meta["name"]: 0 for node in inputs} | dict(batch_dims or {})
    chosen = Settings(
        Mesh.parse(mesh),
        micro_batches=micro_batches,
        optimizer=optimizer,
        batch_dims=dims,
        **settings,
    )
    unit = Compilation(gm, chosen, gm.meta["fake_mode"])
    unit.input_shapes = {node.meta["name"]: tuple(node.meta["val"].shape) for node in inputs}
    return unit


def through(name: str, unit: Compilation) -> Compilation:
    """The compilation after the pass `name`, run from `cut` on."""
    passes = TRAIN.passes[len(NORMALIZE) :]
    Pipeline(passes).run(unit, stop_after=name, skip=())
    return unit


def captured(
    model: torch.nn.Module, mesh: str, batch: Sequence[Tensor], **settings: Any
) -> Compilation:
    """A normalized compilation of a model that returns its loss last, or in a dict."""

    def loss_of(output: Any) -> Tensor:
        loss: Tensor = output["loss"] if isinstance(output, dict) else output[-1]
        return loss

    found = capture(model, tuple(batch), loss_fn=loss_of)
    unit = new_unit(found, Settings(Mesh.parse(mesh), **settings))
    Pipeline(NORMALIZE).run(unit, skip=())
    return unit


def evaluate(gm: fx.GraphModule, values: Sequence[Tensor]) -> tuple[Any, ...]:
    """Run a graph that communicates nothing on real tensors, given in placeholder order."""
    env: dict[fx.Node, Any] = dict(zip(placeholders(gm), values, strict=True))
    for node in gm.graph.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
    return tuple(env[node] for node in output_nodes(gm))


def random_values(gm: fx.GraphModule, seed: int = 0) -> list[Tensor]:
    """Random numbers for a graph's placeholders; integers are 0 or 1."""
    generator = torch.Generator().manual_seed(seed)

    def value(fake: Tensor) -> Tensor:
        if fake.dtype.is_floating_point:
            return torch.randn(fake.shape, dtype=fake.dtype, generator=generator)
        return torch.randint(0, 2, fake.shape, dtype=fake.dtype, generator=generator)

    return [value(node.meta["val"]) for node in placeholders(gm)]


def text(gm: fx.GraphModule) -> str:
    """The text of a graph between two newlines."""
    return "\n" + format_graph(gm) + "\n"


def assert_text(gm: fx.GraphModule, expected: str) -> None:
    """Compare a graph's text with a golden one."""
    found = text(gm)
    assert found == expected, found


def named_values(gm: fx.GraphModule, seed: int = 0) -> dict[str, Tensor]:
    """`random_values` by the names of the placeholders."""
    values = random_values(gm, seed)
    return {n.meta["name"]: v for n, v in zip(placeholders(gm), values, strict=True)}


def step(
    unit: Compilation, values: Mapping[str, Tensor], **network: Any
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One step of all ranks in this process: every rank's loss, and whole gradients.

    network: options of the virtual executor.
    """
    mesh = unit.settings.mesh

    def graph(rank: int) -> fx.GraphModule:
        return unit.rank_graphs[unit.class_of(rank)]

    layouts = {name: layout(unit, name, value) for name, value in values.items()}

    def local(node: fx.Node, rank: int) -> Tensor:
        value = values[node.meta["name"]]
        if node.meta["kind"] == "input":
            dim = unit.settings.batch_dims[node.meta["name"]]
            layout_of_input = InputLayout("", tuple(value.shape), value.dtype, dim)
            return layout_of_input.local(value, mesh, rank, unit.settings.micro_batches)
        assert node.meta["kind"] in ("parameter", "buffer")
        return layouts[node.meta["name"]].local(value, mesh, rank)

    ranks = range(mesh.size)
    arguments = [[local(node, rank) for node in placeholders(graph(rank))] for rank in ranks]
    results = VirtualExecutor(mesh, graph, **network).run(arguments)
    found: dict[str, Tensor] = {}
    for name in unit.parameter_states:
        owners = layouts[name].owners(mesh)
        by_rank = [
            dict(zip(graph(r).meta["gradients"], results[r]["gradients"], strict=True))
            for r in owners
        ]
        if all(name in part for part in by_rank):
            found[name] = layouts[name].whole([part[name] for part in by_rank], mesh)
    return [result["loss"] for result in results], found


def layout(unit: Compilation, name: str, value: Tensor) -> ParameterLayout:
    """Where a parameter's parts lie; a buffer or an input is whole."""
    states = unit.parameter_states.get(name, {})
    shards = {a: s.value for a, s in states.items() if isinstance(s.value, Shard)}
    stages = tuple(unit.stages_of.get(name, (0,)))
    data = unit.data_shards.get(name)
    return ParameterLayout(name, tuple(value.shape), value.dtype, True, (), shards, stages, data)


def single(
    gm: fx.GraphModule, values: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of a forward graph on one device."""
    leaves = [
        values[node.meta["name"]].clone().requires_grad_(bool(node.meta.get("requires_grad")))
        for node in placeholders(gm)
    ]
    (loss,) = evaluate(gm, leaves)
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    names = [n.meta["name"] for n in placeholders(gm) if n.meta.get("requires_grad")]
    return loss.detach(), dict(zip(names, grads, strict=True))


def assert_parity(
    gm: fx.GraphModule, mesh: str, micro_batches: int = 1, **changes: Any
) -> Compilation:
    """Compile a float64 graph; loss and gradients of all ranks are those of one device."""
    values = named_values(gm)
    loss, grads = single(gm, values)
    unit = through("check-communication", compilation(gm, mesh, micro_batches, **changes))
    losses, found = step(unit, values)
    for other in losses:
        torch.testing.assert_close(other, loss, rtol=1e-10, atol=1e-10)
    assert set(found) == {name for name, grad in grads.items() if grad is not None}
    for name, grad in found.items():
        torch.testing.assert_close(grad, grads[name], rtol=1e-10, atol=1e-10)
    return unit
