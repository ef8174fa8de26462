"""`msc.compile`: from an ordinary model to a parallel training program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn

from msc.capture.captured import Captured
from msc.capture.entry import capture
from msc.codegen.kernel_calls.device import asked_of_triton
from msc.cost import Cluster, CostModel
from msc.cost.measurements import Measurements
from msc.explanation import Explainer
from msc.initialization import Recipe, recipe_of
from msc.ir import flags
from msc.ir.errors import PlanError, UserError
from msc.ir.layout import BufferLayout, InputLayout, ParameterLayout
from msc.ir.mesh import Mesh
from msc.ir.optimizer import Optimizer
from msc.ir.passes import Pass
from msc.ir.placement import Shard
from msc.ir.plan import Plan
from msc.ir.recompute import MemoryBudget, as_recompute
from msc.ir.rewrites import Rewrite
from msc.ir.structure import output_nodes
from msc.passes.compilation import Compilation, Settings, StepSeconds
from msc.passes.pipelines import TRAIN
from msc.passes.schedules.rules import check_schedule
from msc.passes.sharding.batch import NotSeparableError
from msc.passes.sharding.pins import match_pins, parse_pins
from msc.passes.sharding.plan_of import plan_of
from msc.program import BACKENDS, Program
from msc.report import make_report
from msc.runtime.memory.predict import MemoryPredictor
from msc.runtime.simulate import simulate_program
from msc.torch_optimizers import as_optimizer
from msc.without_effect import without_effect
from msc.worlds import Worlds, worlds_of

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
MIXED = "bf16-mixed"
_NO_SUM = "its loss is not a sum over samples"


def compile(
    model: nn.Module,
    inputs: tuple[Any, ...] | dict[str, Any],
    *,
    mesh: str | Mapping[str, int | str] | Mesh = "",
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Optimizer | torch.optim.Optimizer | None = None,
    microbatches: int = 1,
    schedule: str = "1f1b",
    virtual_stages: int | None = None,
    cluster: Cluster | str | Path | Mapping[str, Any] | None = None,
    memory: int | None = None,
    precision: str | torch.dtype | None = None,
    passes: Mapping[str, Pass | Sequence[Pass]] | None = None,
    batch_dims: Mapping[str, int | None] | None = None,
    backend: str = "aten",
    pins: Mapping[str, Mapping[str, Any]] | None = None,
    plan: Plan | str | Path | None = None,
    rewrites: Sequence[Rewrite] = (),
    recompute: str | MemoryBudget = "none",
    zero: int = 0,
    shard_group: int | None = None,
    fuse_loss: bool = False,
    fuse_collectives: bool | str = "auto",
    tuned: Measurements | str | Path | None = None,
) -> Program:
    """Compile a single-device model into one program per rank of `mesh`.

    Args:
        model: any trainable module, with no distributed code in it; may be on `meta`, with
            `msc.init(model, seed)` to say how it starts.
        inputs: the global batch of one step, a tuple (positional) or dict (keywords); real, fake or
            meta tensors. The program takes batches of exactly these shapes.
        mesh: `"pp=2,dp=2,tp=2"`, a dict, or `msc.Mesh`; one rank if left out. `"dp=*,tp=2"` has as
            many dp ranks as the launcher has started processes; without one there is one process.
        loss_fn: maps the model's output to the scalar loss; without it the model returns the loss,
            or an object or dict with `.loss`.
        optimizer: `msc.AdamW`, `Adam`, `SGD` or `LAMB`, or torch's own of the first three on this
            model's parameters, before its first step; None for loss and gradients only.
        microbatches: parts of each dp rank's batch that run one after the other. With `dp=*` on
            fewer ranks than the job was started for there are as many more.
        schedule: "gpipe", "1f1b", "interleaved", "zb-h1" or "zb-v"; "auto" takes the one that ends
            first by the modelled costs and fits into `memory`, or else into what "1f1b" needs.
        virtual_stages: chunks of layers per rank of pp, for "gpipe", "interleaved" and "auto".
        cluster: an `msc.Cluster`, a mapping or a JSON file; costs are then seconds on it.
        memory: bytes per rank that parameters, gradients, optimizer state and activations may take;
            the placement search keeps the first three under it, and the whole program is checked.
        precision: "float32", "float64" or "bfloat16": the dtype of parameters, moments, gradients
            and floating inputs; None keeps the model's own. "bf16-mixed" computes in bfloat16 with
            parameters, moments, sums and reductions of gradients, and the optimizer in float32.
        passes: `{"before:cut": MyPass()}`: the user's own passes, with their place in the pipeline.
        batch_dims: input name -> batch dim or None, where dim 0 of equal length is not it.
        backend: "aten", or "inductor" to compile the chunk graphs with torch's Inductor.
        pins: `{"layers.*.q_proj.weight": {"tp": msc.Shard(0)}}`: placements, msc's or torch's, that
            the search must keep, by patterns of parameter names.
        plan: `program.plan` of an earlier compilation, or the file where it was saved: placements
            are taken from it, and nothing is searched.
        rewrites: changes of the model's mathematics, in order; `report.rewrites` lists each place.
        recompute: which activations the backward computes again instead of finding them saved:
            "none"; "selective": the inside of attention that is written out, and what was gathered
            from shards; "full": all but the inputs of each block, save that of the loss, on whose
            stage it can need as much memory as "selective"; or `msc.MemoryBudget(bytes)`: the
            cheapest choice found that keeps every rank within so many bytes. `memory` is checked
            after it.
        zero: what dp ranks split instead of each holding it (Rajbhandari et al., SC 2020): 1 the
            optimizer's state and, between steps, the parameters; 2 sums of gradients too; 3 also
            the parameters, which are gathered block by block for each use.
        shard_group: how many neighbours on dp split it, each group a replica of the others; a
            divisor of dp. None: all of dp.
        fuse_loss: whether a linear head becomes one op with its cross entropy, so that the logits
            of a micro-batch are never all in memory; the backward makes them again, which costs one
            more product of the head. `report.fused_losses` lists each head.
        fuse_collectives: whether gathers and reduce-scatters become one op with the GEMMs that read
            or make their values: "auto" where the cost model finds that it pays, which needs a
            `cluster`; True wherever that is possible; False nowhere.
            `report.fused_collectives` lists each place.
        tuned: the file that `msc tune` wrote: what was measured counts more than what the cost
            model says of fused collectives, and decides on that device which calls run in kernels.

    Raises:
        CaptureError: the model is not one graph; names the user's line.
        PlanError: mesh, batch, schedule, memory, pins or plan do not fit; says what to change.
    """
    check_schedule(schedule, virtual_stages)
    _require_count(microbatches)
    _check_zero(zero, shard_group)
    worlds = worlds_of(mesh, microbatches, shard_group)
    _check_shard_group(shard_group, worlds.here.mesh)
    _require_bytes(memory)
    _check_backend(backend)
    _check_fusing(fuse_collectives, fuse_loss)
    asked_of_triton()  # a wrong value is told of now, though compiling does not need it
    optimizer = as_optimizer(optimizer, model)
    dtype, master = _dtype(precision)
    pipeline = TRAIN.with_user_passes(passes or {})
    cost = CostModel(None if cluster is None else Cluster.load(cluster))
    settings = Settings(
        worlds.here.mesh,
        micro_batches=worlds.here.micro_batches,
        schedule=schedule,
        virtual_stages=virtual_stages,
        optimizer=optimizer,
        master=master,
        cost=cost,
        memory=memory,
        plan=None if plan is None else _plan_here(Plan.load(plan), worlds),
        rewrites=as_rewrites(rewrites),
        recompute=as_recompute(recompute),
        fuse_loss=fuse_loss,
        fuse_collectives=fuse_collectives,
        measured=None if tuned is None else Measurements.load(tuned),
        measure=MemoryPredictor().bytes,
        step_seconds=None if cost.cluster is None else _seconds_on(cost.cluster),
        zero=zero,
        shard_group=shard_group,
    )
    wanted = parse_pins(pins, settings.mesh)
    started = time.process_time()
    captured = capture(model, inputs, loss_fn=loss_fn, batch_dims=batch_dims, dtype=dtype)
    seconds = time.process_time() - started
    check_batch(captured, settings)
    aliases = {name: (name, *info.aliases) for name, info in captured.parameters.items()}
    settings = replace(settings, pinned=match_pins(wanted, aliases))
    if optimizer is not None:
        named = {n: (aliases[n], len(info.shape)) for n, info in captured.parameters.items()}
        settings = replace(settings, optimizers=optimizer.grouped(named))
    recipe = _recipe(model, captured)
    notes = [*captured.notes, *_buffers_without_values(captured, recipe)]
    notes += [*_written_buffers(captured), *without_effect(settings), *_fewer_ranks(worlds)]
    notes += [] if settings.measured is None else settings.measured.notes()
    if captured.graph.meta["buffers"]:
        worlds = worlds.only_here("each micro-batch updates its buffers")
    unit = new_unit(captured, settings)
    try:
        pipeline.run(unit)
    except NotSeparableError as error:
        worlds = worlds.only_here(_NO_SUM)
        notes.append(_not_separable(error))
        settings = replace(settings, separable=False)
        part = per_micro_batch(captured, inputs, settings.micro_batches)
        again = capture(model, part, loss_fn=loss_fn, batch_dims=batch_dims, dtype=dtype)
        unit = new_unit(again, settings, captured)
        scale_loss(unit.graphs["forward"], settings.micro_batches)
        pipeline.run(unit)
    if unit.joins_samples:
        worlds = worlds.only_here(_NO_SUM)
    if not unit.rank_graphs:
        raise UserError(
            f"Compilation stopped after pass '{unit.log[-1].name}', as {flags.STOP_AFTER.name} "
            f"asks: no program was made. {flags.DUMP.name}=<folder> writes what the passes made."
        )
    report = make_report(unit, seconds, notes)
    program = Program(
        mesh=settings.mesh,
        rank_graphs=unit.rank_graphs,
        chunk_graphs=unit.chunk_graphs,
        parameters=_parameters(captured, unit),
        buffers=_buffers(captured, unit),
        tp_bounds=unit.tp_bounds,
        inputs=tuple(InputLayout(i.name, i.shape, i.dtype, i.batch_dim) for i in captured.inputs),
        input_spec=captured.input_spec,
        dtype=dtype,
        master=master,
        optimizer=optimizer,
        micro_batches=settings.micro_batches,
        worlds=worlds.possible,
        separable=settings.separable,
        backend=backend,
        measured=settings.measured,
        report=report,
        source=captured,
        plan=plan_of(unit.structure, unit.placed, settings.mesh, settings.micro_batches),
        explainer=Explainer(unit, captured.module, report),
        recipe=recipe,
        pass_results=unit.dump,
    )
    if memory is not None:
        _check_memory(program, memory, "memory", settings)
    if isinstance(recompute, MemoryBudget):
        _check_memory(program, recompute.bytes_per_rank, "the budget of recompute", settings)
    _check_values(program)
    return program


def _require_count(microbatches: Any) -> None:
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise PlanError(f"microbatches is {microbatches!r}; it is a whole number of at least 1.")


def _check_zero(zero: Any, shard_group: Any) -> None:
    if zero not in (0, 1, 2, 3) or not isinstance(zero, int) or isinstance(zero, bool):
        raise PlanError(f"zero is {zero!r}; it is 0, 1, 2 or 3.")
    if shard_group is None:
        return
    if not isinstance(shard_group, int) or isinstance(shard_group, bool) or shard_group < 1:
        raise PlanError(f"shard_group is {shard_group!r}; it is a whole number of ranks of dp.")
    if zero == 0:
        raise PlanError(
            f"shard_group={shard_group} says how many dp ranks split what zero= names, and zero is "
            "0, so nothing is split. Give zero=1, 2 or 3, or leave shard_group out."
        )


def _check_shard_group(shard_group: int | None, mesh: Mesh) -> None:
    if shard_group is None:
        return
    dp = mesh.axis_size("dp")
    if dp == 1 and shard_group > 1:
        raise PlanError(
            f"shard_group={shard_group} makes groups of ranks of dp, and the mesh has none: leave "
            "shard_group out, or give the mesh a dp."
        )
    if dp % shard_group:
        raise PlanError(
            f"shard_group={shard_group} does not divide dp={dp}: groups of neighbours on dp must "
            f"be equal. Use one of {', '.join(str(n) for n in range(1, dp + 1) if dp % n == 0)}."
        )


def as_rewrites(given: Any) -> tuple[Rewrite, ...]:
    """The rewrites as a tuple; `UserError` for what is none."""
    if not isinstance(given, (list, tuple)):
        raise UserError(f"rewrites is a {type(given).__name__}; it is a list of rewrites.")
    for each in given:
        if not isinstance(each, Rewrite):
            raise UserError(f"rewrites has {each!r}; each is an instance of a rewrite.")
    return tuple(given)


def _require_bytes(memory: Any) -> None:
    if memory is None:
        return
    if not isinstance(memory, (int, float)) or isinstance(memory, bool) or not memory > 0:
        raise PlanError(f"memory is {memory!r}; it is a positive number of bytes per rank.")


def _check_backend(backend: str) -> None:
    if backend not in BACKENDS:
        raise UserError(f"Backend '{backend}' is unknown. The backends are {', '.join(BACKENDS)}.")


def _check_fusing(fuse_collectives: Any, fuse_loss: Any) -> None:
    if not isinstance(fuse_collectives, bool) and fuse_collectives != "auto":
        raise UserError(f"fuse_collectives is {fuse_collectives!r}; it is 'auto', True or False.")
    if not isinstance(fuse_loss, bool):
        raise UserError(f"fuse_loss is {fuse_loss!r}; it is True or False.")


def _dtype(precision: str | torch.dtype | None) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtype to compute in, and that of the parameters if it is another one."""
    if precision == MIXED:
        return torch.bfloat16, torch.float32
    if precision is None or precision in DTYPES.values():
        return precision, None  # type: ignore[return-value]
    if not isinstance(precision, str) or precision not in DTYPES:
        names = ", ".join([*DTYPES, MIXED])
        raise PlanError(f"precision is {precision!r}; it is one of {names}, or None.")
    return DTYPES[precision], None


def check_batch(captured: Captured, settings: Settings) -> None:
    """Raise `PlanError` unless the batch splits evenly over dp and the micro-batches."""
    dp = settings.mesh.axis_size("dp")
    parts = dp * settings.micro_batches
    if captured.batch_size % parts:
        raise PlanError(
            f"The global batch of {captured.batch_size} samples does not split evenly over "
            f"dp={dp} ranks times {settings.micro_batches} micro-batches = {parts} parts. "
            f"Use a batch that is a multiple of {parts}, or fewer micro-batches."
        )


def new_unit(captured: Captured, settings: Settings, whole: Captured | None = None) -> Compilation:
    """The compilation that starts from a capture; `whole` is the capture of the global batch."""
    for node in captured.graph.graph.find_nodes(op="placeholder"):
        if node.meta["kind"] == "parameter":
            node.meta["requires_grad"] = captured.parameters[node.meta["name"]].requires_grad
    dims = {info.name: info.batch_dim for info in captured.inputs}
    unit = Compilation(
        captured.graph,
        replace(settings, batch_dims=dims),
        captured.graph.meta["fake_mode"],
    )
    unit.input_shapes = {info.name: info.shape for info in (whole or captured).inputs}
    return unit


def per_micro_batch(captured: Captured, inputs: Any, microbatches: int) -> Any:
    """The first of `microbatches` equal parts of the example batch."""
    tensors = captured.input_spec.flatten(inputs)
    parts = []
    for info, tensor in zip(captured.inputs, tensors, strict=True):
        if info.batch_dim is not None:
            rows = tensor.shape[info.batch_dim] // microbatches
            tensor = tensor.narrow(info.batch_dim, 0, rows)
        parts.append(tensor)
    return captured.input_spec.rebuild(parts)


def scale_loss(gm: fx.GraphModule, microbatches: int) -> None:
    """Divide the loss by the number of micro-batches: their mean is the loss of the step."""
    loss, *buffers = output_nodes(gm)
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        scaled = gm.graph.call_function(torch.ops.aten.div.Tensor, (loss, microbatches))
    scaled.meta = dict(loss.meta)
    output.args = ((scaled, *buffers),)
    gm.recompile()


def _seconds_on(cluster: Cluster) -> StepSeconds:
    """What a step takes on a cluster, by the simulator."""

    def seconds(mesh: Mesh, tp_bounds: Sequence[int], graphs: Sequence[fx.GraphModule]) -> float:
        return simulate_program(mesh, tp_bounds, graphs, cluster).step_seconds

    return seconds


def _plan_here(plan: Plan, worlds: Worlds) -> Plan:
    """A plan of the job's full mesh holds on fewer dp ranks: what one of them runs is the same."""
    full, here = worlds.full, worlds.here
    if here != full and (plan.mesh, plan.micro_batches) == (full.mesh, full.micro_batches):
        return replace(plan, mesh=here.mesh, micro_batches=here.micro_batches)
    return plan


def _fewer_ranks(worlds: Worlds) -> list[str]:
    """The note on a job that goes on with fewer ranks."""
    if worlds.here == worlds.full:
        return []
    return [f"The job was started for {worlds.full}, and goes on as {worlds.here}."]


def _not_separable(error: NotSeparableError) -> str:
    node = error.node
    where = node.meta.get("module_path") or node.meta.get("source") or node.name
    return (
        f"The loss is not a sum over samples: {where} ({node.target}) {error.reason}. It is "
        "computed per micro-batch and averaged, as gradient accumulation on one device does."
    )


def _buffers(captured: Captured, unit: Compilation) -> dict[str, BufferLayout]:
    stages: dict[str, int] = {}
    for chunk in unit.variants[0].chunks:
        for name in chunk.written:
            stages.setdefault(name, chunk.stage)
    return {
        name: BufferLayout(name, info.shape, info.dtype, stages.get(name))
        for name, info in captured.buffers.items()
    }


def _written_buffers(captured: Captured) -> list[str]:
    """The note on buffers that the forward writes."""
    names = captured.graph.meta["buffers"]
    if not names:
        return []
    shown = ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
    return [
        f"The forward writes these buffers: {shown}. Each micro-batch updates them once, in order, "
        "from the rows of all dp ranks, as gradient accumulation on one device does."
    ]


def _parameters(captured: Captured, unit: Compilation) -> dict[str, ParameterLayout]:
    layouts: dict[str, ParameterLayout] = {}
    for name, info in captured.parameters.items():
        states = unit.parameter_states.get(name, {})
        shards = {a: s.value for a, s in states.items() if isinstance(s.value, Shard)}
        layouts[name] = ParameterLayout(
            name,
            tuple(info.shape),
            info.dtype,
            info.requires_grad,
            info.aliases,
            shards,
            tuple(unit.stages_of.get(name, ())),
            unit.data_shards.get(name),
        )
    return layouts


def _recipe(model: nn.Module, captured: Captured) -> Recipe | None:
    """What `msc.init` has attached to the model, of the tensors that a program can ask for."""
    recipe = recipe_of(model)
    if recipe is None:
        return None
    aliases = (n for info in captured.parameters.values() for n in (info.name, *info.aliases))
    return recipe.only({*aliases, *captured.buffers, *model.state_dict()})


def _buffers_without_values(captured: Captured, recipe: Recipe | None) -> list[str]:
    """The note on a model on 'meta' that nobody has said how to initialize."""
    names = [name for name in captured.buffers if captured.read_buffer(name) is None]
    if not names or recipe is not None:
        return []
    return [
        "These buffers have no values, since the model is on 'meta': "
        f"{', '.join(names)}. msc.init(model, seed) says what they and the parameters are."
    ]


def _check_values(program: Program) -> None:
    """Refuse a program whose recipe, if it has one, leaves out what the loss reads."""
    if program.recipe is None or program.has_values:
        return
    lines = [
        f"  {name}: {program.recipe.missing.get(name, 'it is a constant of the model, on meta')}"
        for name in program.without_values()
    ]
    raise UserError(
        "The loss reads these buffers, whose values are not known, since they were computed on "
        "'meta':\n" + "\n".join(lines) + "\n"
        "Give a function for each, msc.init(model, seed, init={name: lambda shape, dtype: ...}), "
        "or build the model with real buffers."
    )


def _check_memory(program: Program, bound: float, name: str, settings: Settings) -> None:
    needed = program.memory_bytes()
    worst = max(range(len(needed)), key=needed.__getitem__)
    if needed[worst] > bound:
        stage = program.class_names[worst].replace("stage", "stage ")
        raise PlanError(
            f"Pipeline {stage} needs {needed[worst]:,} bytes per rank "
            "(parameters, gradients, optimizer state and activations at their peak), but "
            f"{name} is {bound:,}. {_ways_to_less(settings)}"
        )


def _ways_to_less(settings: Settings) -> str:
    """What takes less memory, of what is not in use yet."""
    dp, zero = settings.mesh.axis_size("dp"), settings.zero
    ways = ["Use more tp or pp ranks, or more micro-batches"]
    if dp > 1 and zero < 3:
        ways.append(f"zero={zero + 1}{'' if zero == 2 else ' or more'} splits more over dp={dp}")
    elif zero:
        ways.append("more dp ranks, as zero splits all over them")
    if settings.mesh.axis_size("pp") > 1:
        ways.append("a schedule with fewer micro-batches in flight, as 'zb-v' or '1f1b'")
    if settings.recompute == "none":
        ways.append("recompute= takes less for more work")
    return "; ".join(ways) + "."
