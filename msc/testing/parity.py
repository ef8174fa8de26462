"""Check that a pass keeps what a program computes: on one device, and on a mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from msc.ir.errors import UserError
from msc.ir.layout import InputLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.passes import Pass
from msc.ir.placement import Shard
from msc.ir.structure import placeholders
from msc.ir.values import tensor_of
from msc.passes.compilation import Compilation, Settings
from msc.passes.normalize import NORMALIZE
from msc.passes.pipelines import TRAIN
from msc.passes.sharding.batch import NotSeparableError
from msc.runtime.state import RankState
from msc.runtime.virtual import VirtualExecutor
from msc.testing.graphs import copy_graph, random_values
from msc.verification import TOLERANCE, largest, relative_error


@dataclass
class _Run:
    """Outputs by position, gradients by the name of their placeholder."""

    outputs: list[Tensor]
    grads: dict[str, Tensor]


def assert_pass_parity(
    pass_: Pass,
    graph: fx.GraphModule,
    mesh: str | Mapping[str, int] | Mesh = "",
    *,
    microbatches: int = 1,
    tolerance: float | None = None,
    seed: int = 0,
) -> fx.GraphModule:
    """Assert that `pass_` keeps the outputs and all gradients of a forward graph.

    The pass runs on a copy of `graph` (see `forward_graph`) in its place behind normalization, with
    all checks of the pipeline. Both graphs are run on the same random values, and so is the
    parallel program that the pipeline makes of the rewritten graph for `mesh`. Returns the
    rewritten graph, for assertions about its form.

        graph = msc.testing.forward_graph(model, batch)
        rewritten = msc.testing.assert_pass_parity(FuseGates(), graph, mesh="dp=2,tp=2")
        assert count(rewritten, torch.ops.aten.mul.Tensor) == 1

    Errors are those of `msc.verify`; `tolerance` is 1e-10 in float64 and 1e-5 in float32 unless
    given. Raises `AssertionError` with the first value that differs, `VerifyError` if the pass
    breaks an invariant or miscounts its changes, `UserError` if the mesh does not fit the graph.
    """
    if not isinstance(graph, fx.GraphModule):
        raise UserError(
            f"graph is a {type(graph).__name__}; pass a forward graph, such as "
            "msc.testing.forward_graph(model, batch)."
        )
    settings = _settings(graph, Mesh.parse(mesh), microbatches)
    place = f"after:{NORMALIZE[-1].name}"
    pipeline = TRAIN.with_user_passes({place: pass_})
    before = _compilation(graph, settings)
    pipeline.run(before, stop_after=NORMALIZE[-1].name)
    after = _compilation(graph, settings)
    pipeline.run(after, stop_after=pass_.name)
    normalized, rewritten = before.graphs["forward"], after.graphs["forward"]
    _check_placeholders(normalized, rewritten, pass_)
    limit = tolerance if tolerance is not None else _tolerance(normalized)
    names = {_name(node): value for node, value in random_values(normalized, seed).items()}
    expected = _run(normalized, names, seed)
    found = _run(rewritten, names, seed)
    _compare(expected, found, limit, f"Pass '{pass_.name}' changes what the graph computes")
    if settings.mesh.size * microbatches > 1:
        parallel = _compilation(graph, settings)
        try:
            pipeline.run(parallel)
        except NotSeparableError as error:
            raise UserError(
                f"The loss is no sum over samples at {error.node.format_node()}: its parity over "
                "micro-batches is not defined. Use microbatches=1."
            ) from error
        found = _run_parallel(parallel, names, seed)
        _compare(
            expected,
            found,
            limit,
            f"After pass '{pass_.name}', the program on mesh {settings.mesh} with {microbatches} "
            "micro-batches differs from the graph before the pass",
        )
    return rewritten


def _settings(graph: fx.GraphModule, mesh: Mesh, microbatches: int) -> Settings:
    dims: dict[str, int | None] = {}
    parts = mesh.axis_size("dp") * microbatches
    for node in placeholders(graph):
        if node.meta.get("kind") != "input":
            continue
        dim = dims[node.meta["name"]] = node.meta.get("batch_dim")
        if dim is not None and tensor_of(node).shape[dim] % parts:
            raise UserError(
                f"Input '{node.meta['name']}' has {tensor_of(node).shape[dim]} samples, which do "
                f"not split over {parts} parts (dp times microbatches)."
            )
    return Settings(mesh, micro_batches=microbatches, batch_dims=dims)


def _compilation(graph: fx.GraphModule, settings: Settings) -> Compilation:
    copied = copy_graph(graph)
    for node in placeholders(copied):
        if node.meta["kind"] == "parameter":
            node.meta.setdefault("requires_grad", True)
    unit = Compilation(copied, settings, graph.meta["fake_mode"])
    unit.input_shapes = {
        node.meta["name"]: tuple(tensor_of(node).shape)
        for node in placeholders(copied)
        if node.meta["kind"] == "input"
    }
    return unit


def _name(node: fx.Node) -> str:
    return f"{node.meta['kind']} {node.meta.get('name', node.name)}"


def _check_placeholders(before: fx.GraphModule, after: fx.GraphModule, pass_: Pass) -> None:
    names = [[_name(node) for node in placeholders(gm)] for gm in (before, after)]
    if new := sorted(set(names[1]) - set(names[0])):
        raise AssertionError(
            f"Pass '{pass_.name}' adds the placeholders {new}; a forward graph keeps its own."
        )


def _tolerance(gm: fx.GraphModule) -> float:
    dtypes = [tensor_of(node).dtype for node in placeholders(gm)]
    return max(TOLERANCE.get(dtype, 0.0) for dtype in dtypes)


def _run(gm: fx.GraphModule, values: Mapping[str, Tensor], seed: int) -> _Run:
    """Run a forward graph and differentiate a random weighting of its outputs.

    The single output of a loss gets the weight one, as in training.
    """
    nodes = placeholders(gm)
    arguments = [values[_name(node)].clone() for node in nodes]
    wanted = {}
    for node, argument in zip(nodes, arguments, strict=True):
        if node.meta["kind"] == "parameter" and node.meta.get("requires_grad", True):
            wanted[node.meta["name"]] = argument.requires_grad_()
    outputs = list(fx.Interpreter(gm).run(*arguments))
    generator = torch.Generator().manual_seed(seed)
    total: Tensor | None = None
    for output in outputs:
        if output.requires_grad:
            weight = torch.ones((), dtype=output.dtype)
            if output.dim():
                weight = torch.randn(output.shape, generator=generator, dtype=output.dtype)
            term = (output * weight).sum()
            total = term if total is None else total + term
    grads: dict[str, Tensor] = {}
    if total is not None:
        found = torch.autograd.grad(total, list(wanted.values()), allow_unused=True)
        grads = {n: g for n, g in zip(wanted, found, strict=True) if g is not None}
    return _Run([output.detach() for output in outputs], grads)


def _run_parallel(unit: Compilation, values: Mapping[str, Tensor], seed: int) -> _Run:
    mesh = unit.settings.mesh
    layouts = _layouts(unit, values)

    def graph(rank: int) -> fx.GraphModule:
        return unit.rank_graphs[unit.class_of(rank)]

    def arguments(rank: int) -> list[Tensor]:
        inputs, parameters, buffers = {}, {}, {}
        for node in graph(rank).graph.find_nodes(op="placeholder"):
            kind, name = node.meta["kind"], node.meta["name"]
            if kind == "parameter":
                parameters[name] = layouts[name].local(values[f"parameter {name}"], mesh, rank)
            elif kind == "buffer":
                buffers[name] = values[f"buffer {name}"]
            elif kind == "input":
                whole = values[f"input {name}"]
                dim = unit.settings.batch_dims[name]
                layout = InputLayout(name, tuple(whole.shape), whole.dtype, dim)
                inputs[name] = layout.local(whole, mesh, rank, unit.settings.micro_batches)
        return RankState(parameters, buffers, seed=seed).arguments(graph(rank), inputs)

    results = VirtualExecutor(mesh, graph).run([arguments(rank) for rank in range(mesh.size)])
    grads = {}
    for name, layout in layouts.items():
        owners = layout.owners(mesh)
        names = [graph(rank).meta["gradients"] for rank in owners]
        if all(name in each for each in names):
            parts = [
                results[rank]["gradients"][each.index(name)]
                for rank, each in zip(owners, names, strict=True)
            ]
            grads[name] = layout.whole(parts, mesh)
    return _Run([results[0]["loss"]], grads)


def _layouts(unit: Compilation, values: Mapping[str, Tensor]) -> dict[str, ParameterLayout]:
    layouts = {}
    for name, stages in unit.stages_of.items():
        states = unit.parameter_states.get(name, {})
        shards = {a: s.value for a, s in states.items() if isinstance(s.value, Shard)}
        value = values[f"parameter {name}"]
        layouts[name] = ParameterLayout(
            name,
            tuple(value.shape),
            value.dtype,
            True,
            (),
            shards,
            tuple(stages),
            unit.data_shards.get(name),
        )
    return layouts


def _compare(expected: _Run, found: _Run, tolerance: float, what: str) -> None:
    scale = largest(expected.grads.values())
    if len(expected.outputs) != len(found.outputs):
        raise AssertionError(
            f"{what}: {len(expected.outputs)} outputs became {len(found.outputs)}."
        )
    for index, (old, new) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        error = relative_error(new, old, scale)
        if not error <= tolerance:
            raise AssertionError(f"{what}: output {index} has an error of {error:.3g}.")
    for name in sorted(expected.grads | found.grads):
        error = relative_error(found.grads.get(name), expected.grads.get(name), scale)
        if not error <= tolerance:
            raise AssertionError(f"{what}: the gradient of {name} has an error of {error:.3g}.")
