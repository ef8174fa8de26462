"""`msc.Program`: a compiled model, a rank graph per class of ranks, and how to run and save it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from msc.capture.captured import has_values
from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.device import kernels_for
from msc.cost import Cluster
from msc.cost.measurements import Measurements
from msc.ir.dump import Dump
from msc.ir.errors import InputError, UserError
from msc.ir.inline import inline
from msc.ir.layout import BufferLayout, InputLayout, ParameterLayout, class_names, rank_class
from msc.ir.mesh import Mesh
from msc.ir.optimizer import Optimizer
from msc.ir.plan import Plan
from msc.ir.serialize import fingerprint, graphs_to_json
from msc.program_dump import write_dump
from msc.report import CompileReport
from msc.runtime.memory.predict import MemoryPredictor
from msc.runtime.simulate import SimulationResult, simulate_program
from msc.runtime.state import RankState
from msc.saved_tensors import SavedTensors
from msc.step_result import StepResult, put_together
from msc.virtual_runs import VirtualRuns
from msc.worlds import World

if TYPE_CHECKING:
    from msc.capture.captured import Captured
    from msc.capture.inputs import InputSpec
    from msc.explanation import Explainer, Explanation
    from msc.initialization import Recipe

BACKENDS = ("aten", "inductor")


class Program:
    """A compiled program for every rank of a mesh.

    `rank_graph(rank)` is the step of a rank, `graphs(rank)` its flat forward and backward graphs,
    `run_virtual(batch)` one step of all ranks in this process, `simulate(cluster)` its time on a
    cluster, `save(dir)` what `msc.load` reads. `worlds`, the largest first, are the meshes for
    which the same call compiles it, with their micro-batches: several with `dp=*`.
    """

    def __init__(
        self,
        *,
        mesh: Mesh,
        rank_graphs: Sequence[fx.GraphModule],
        chunk_graphs: Callable[[int], Mapping[str, fx.GraphModule]],
        parameters: Mapping[str, ParameterLayout],
        buffers: Mapping[str, BufferLayout],
        tp_bounds: Sequence[int],
        inputs: Sequence[InputLayout],
        input_spec: InputSpec,
        dtype: torch.dtype | None,
        optimizer: Optimizer | None,
        master: torch.dtype | None = None,
        micro_batches: int,
        worlds: Sequence[World] = (),
        separable: bool,
        backend: str,
        measured: Measurements | None = None,
        report: CompileReport,
        source: Captured | Mapping[str, Tensor] | None,
        plan: Plan,
        explainer: Explainer | None = None,
        recipe: Recipe | None = None,
        digests: Sequence[str] | None = None,
        pass_results: Dump | None = None,
    ) -> None:
        self.mesh = mesh
        self.rank_graphs = rank_graphs
        self._chunk_graphs = chunk_graphs
        self.parameters = dict(parameters)
        self.buffers = dict(buffers)
        self.tp_bounds = tuple(tp_bounds)
        self.inputs = tuple(inputs)
        self.input_spec = input_spec
        self.dtype = dtype
        self.master = master
        self.optimizer = optimizer
        self.micro_batches = micro_batches
        self.worlds = tuple(worlds) or (World(mesh, micro_batches),)
        self.separable = separable
        self.backend = backend
        self.measured = measured
        self.report = report
        self.plan = plan
        self._explainer = explainer
        self._source = source
        self.recipe = recipe
        self._digests = digests
        self.pass_results = pass_results
        self.virtual_runs = VirtualRuns(mesh, rank_graphs, self.class_of, measured)

    # -- graphs

    def class_of(self, rank: int) -> int:
        """The index in `rank_graphs` of the rank's graph: ranks of one class run the same graph."""
        if not isinstance(rank, int) or not 0 <= rank < self.mesh.size:
            raise UserError(
                f"Rank {rank} is not in the mesh {self.mesh}, which has ranks 0 to "
                f"{self.mesh.size - 1}."
            )
        return rank_class(self.mesh, self.tp_bounds, rank)

    @property
    def class_names(self) -> list[str]:
        """`stage0`, and `stage0.tp2` where the ranks from tp coordinate 2 on have other shapes."""
        return class_names(self.mesh.axis_size("pp"), self.tp_bounds)

    def rank_graph(self, rank: int) -> fx.GraphModule:
        """One training step of `rank`, in schedule order: actions, and calls of chunk graphs."""
        return self.rank_graphs[self.class_of(rank)]

    def graphs(self, rank: int) -> dict[str, fx.GraphModule]:
        """The rank's `"forward"` and `"backward"` of one micro-batch, flat, every layer present.

        Also the `"prologue"`, where something is computed once per step for all micro-batches. With
        virtual stages `"chunk3.forward"` and so on; `"weight_backward"` is the later half of a
        backward that the schedule splits.
        """
        return {
            name: inline(graph) for name, graph in self._chunk_graphs(self.class_of(rank)).items()
        }

    def dump(self, folder: str | Path) -> None:
        """Write the graphs of every rank and the result of every pass as text.

        `index.txt` says which file is whose; equal ranks share one. `passes/` has the whole program
        after each pass that changed it; a program that was loaded has its graphs only. `kernels/`
        has the text of every Triton kernel that runs on the device of this process.
        """
        write_dump(self, Path(folder))

    def kernels(self, target: str | None = None) -> KernelChoice:
        """Which calls run in Triton kernels on the device of this process, and why; their texts.

        With `target` ("sm_80", "sm_90"): on that device, which need not be here. `UserError` for a
        target that there is not, or a wrong `MSC_TRITON`.
        """
        if target is not None:
            return KernelChoice(kernels_for(target)).look_at(self.rank_graphs)
        return self.virtual_runs.choice("cuda" if torch.cuda.is_available() else "cpu")

    def memory_bytes(self) -> list[int]:
        """Predicted peak of live bytes of one rank of each class: state, gradients, activations.

        As generated code runs op by op; with `backend="inductor"` fused graphs need less.
        """
        predictor = MemoryPredictor()
        return [predictor.bytes(graph) for graph in self.rank_graphs]

    def simulate(self, cluster: Cluster | str | Path | Mapping[str, Any]) -> SimulationResult:
        """What one step would take on a cluster: time, utilization, bubble, exposed communication.

        `cluster` is what `msc.Cluster.load` takes: a cluster, a JSON file, or "a100" or "h100".
        Nothing runs and no device is asked. Raises `PlanError` for what is no cluster.
        """
        return simulate_program(
            self.mesh,
            self.tp_bounds,
            self.rank_graphs,
            Cluster.load(cluster),
            self.report.model_flops,
        )

    def explain(self, module: str | None = None, *, html: str | Path | None = None) -> Explanation:
        """Say where everything lies and what is sent; of a module, layer or parameter: why.

        Print the result; `html` writes it as one page. Why: the modelled cost of the best plan for
        each other choice. A loaded program knows parameters and totals only, and says so.
        `UserError` for a module that the model does not have.
        """
        from msc.explanation import explain

        found = explain(self, self._explainer, module)
        if html is not None:
            found.save_html(html)
        return found

    # -- values

    def local_inputs(self, batch: Any, rank: int) -> dict[str, Tensor]:
        """A rank's rows of a global batch, checked against what was compiled."""
        tensors = self.flatten(batch)
        return {
            layout.name: layout.local(tensor, self.mesh, rank, self.micro_batches)
            for layout, tensor in zip(self.inputs, tensors, strict=True)
        }

    def flatten(self, batch: Any) -> list[Tensor]:
        """The tensors of a global batch; `InputError` if it is not what was compiled."""
        tensors = self.input_spec.flatten(batch)
        for layout, tensor in zip(self.inputs, tensors, strict=True):
            if not has_values(tensor):
                raise InputError(
                    f"Input '{layout.name}' has no values (a meta or fake tensor). Such a batch is "
                    "enough to compile for; to run, pass real tensors."
                )
        return self.cast(tensors)

    def cast(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Floating tensors in the program's precision."""
        return [self._cast(tensor) for tensor in tensors]

    def dtype_of(self, layout: ParameterLayout) -> torch.dtype:
        """The dtype in which the program holds a parameter."""
        dtype = self.master or self.dtype
        return dtype if dtype and layout.dtype.is_floating_point else layout.dtype

    def optimizer_states(self) -> dict[str, list[str]]:
        """The states that the optimizer keeps ("first_moment"), each with the parameters' names."""
        if self.optimizer is None:
            return {}
        named = {n: ((n, *p.aliases), len(p.shape)) for n, p in self.parameters.items()}
        grouped = self.optimizer.grouped(named)
        found: dict[str, list[str]] = {}
        for name, layout in self.parameters.items():
            spec = grouped.get(name, self.optimizer)
            for state in spec.state_names if layout.trainable else ():
                found.setdefault(state, []).append(name)
        return found

    def initial_state(self, rank: int, seed: int = 0) -> RankState:
        """A rank's shards of the model's parameters. `seed` keys all random numbers of training."""
        names = {
            (node.meta["kind"], node.meta["name"])
            for node in self.rank_graph(rank).graph.find_nodes(op="placeholder")
        }
        parameters = {
            name: self._shard(layout, rank)
            for name, layout in self.parameters.items()
            if ("parameter", name) in names
        }
        buffers = {n: self.read_buffer(n) for n in self.buffers if ("buffer", n) in names}
        return RankState(parameters, buffers, seed=seed)

    def read_parameter(self, name: str) -> Tensor:
        """The whole initial value of a parameter; `UserError` if the model has none (meta)."""
        return self._read("parameter", name)

    def read_buffer(self, name: str) -> Tensor:
        """The value of a buffer; `UserError` if the model has none (meta)."""
        return self._read("buffer", name)

    def _read(self, kind: str, name: str) -> Tensor:
        value = self.stored(kind, name)
        if value is None and self.recipe is not None:
            value = self.recipe.whole(name)
        if value is None:
            raise UserError(
                f"The {kind} '{name}' has no values: the model was compiled on the meta device. "
                "Call msc.init(model, seed) before msc.compile to say how it starts, or compile a "
                "model with real parameters."
            )
        return self._cast(value, kind).detach()

    def stored(self, kind: str, name: str) -> Tensor | None:
        """The value that the model, or a saved program, has of a "parameter" or "buffer"."""
        if self._source is None:
            return None
        if isinstance(self._source, Mapping):
            return self._source.get(name)
        if kind == "parameter":
            return self._source.read_parameter(name, self.master)
        return self._source.read_buffer(name)

    def _cast(self, value: Tensor, kind: str = "") -> Tensor:
        """A floating value in the program's dtype, which of a "parameter" may be another one."""
        dtype = self.master if kind == "parameter" and self.master else self.dtype
        return value.to(dtype) if dtype and value.is_floating_point() else value

    def _shard(self, layout: ParameterLayout, rank: int) -> Tensor:
        if isinstance(self._source, SavedTensors) and layout.name in self._source:
            return self._cast(self._source.shard(layout, self.mesh, rank), "parameter")
        if self._is_drawn("parameter", layout.name):
            assert self.recipe is not None
            part = self.recipe.part(layout.name, layout.held_indices(self.mesh, rank))
            return self._cast(layout.padded(part, self.mesh, rank), "parameter")
        return layout.local(self.read_parameter(layout.name), self.mesh, rank)

    def _is_drawn(self, kind: str, name: str) -> bool:
        """Whether a value is there only by the recipe of `msc.init`."""
        drawn = self.recipe is not None and name in self.recipe
        return drawn and self.stored(kind, name) is None

    @cached_property
    def has_values(self) -> bool:
        """Whether every parameter and buffer has numbers, so that the program can run."""
        return not self.without_values()

    def without_values(self) -> list[str]:
        """Names of the parameters and buffers that have no numbers and no recipe."""
        read = [("parameter", n) for n in self.parameters] + [("buffer", n) for n in self.buffers]
        known = self.recipe if self.recipe is not None else ()
        if isinstance(self._source, SavedTensors):
            return [n for _, n in read if n not in self._source and n not in known]
        return [n for kind, n in read if n not in known and self.stored(kind, n) is None]

    def start_from(self, source: Mapping[str, Tensor]) -> None:
        """Take the initial values from `source` instead."""
        self._source = source
        for derived in ("has_values", "values_digest"):
            self.__dict__.pop(derived, None)

    def extra_state(self) -> dict[str, Tensor]:
        """What the plain module's `state_dict` holds besides the parameters that are trained."""
        if self._source is None:
            return {}
        if isinstance(self._source, SavedTensors):
            return {name: self._source[name] for name in self._source.state_names}
        if isinstance(self._source, Mapping):
            return {}
        module: nn.Module = self._source.module
        found = {n: v for n, v in module.state_dict().items() if n not in self._parameter_names}
        for name, value in found.items():
            drawn = None if has_values(value) or self.recipe is None else self.recipe.whole(name)
            found[name] = value if drawn is None else drawn
        return found

    @cached_property
    def _parameter_names(self) -> frozenset[str]:
        return frozenset(n for p in self.parameters.values() for n in (p.name, *p.aliases))

    # -- running

    def run_virtual(
        self, batch: Any, state: list[RankState] | None = None, seed: int = 0
    ) -> StepResult:
        """Run one step of all ranks in this process, in lock-step, with exact numerics.

        `state` continues from an earlier result's; without it the step starts from the model's
        parameters. The given states advance in place. All ranks run where their parameters are: on
        the CPU, or on one CUDA device.
        """
        ranks = range(self.mesh.size)
        if state is None:
            state = [self.initial_state(rank, seed) for rank in ranks]
        if not isinstance(state, list) or not all(isinstance(each, RankState) for each in state):
            raise InputError("state is what an earlier result's `.state` holds, or None.")
        if len(state) != self.mesh.size:
            raise InputError(f"state has {len(state)} ranks; the mesh has {self.mesh.size}.")
        arguments = [
            state[rank].arguments(self.rank_graph(rank), self.local_inputs(batch, rank))
            for rank in ranks
        ]
        held = (value.device for each in state for value in each.parameters.values())
        outputs = self.virtual_runs.executor(next(held, torch.device("cpu"))).run(arguments)
        for rank in ranks:
            state[rank].advance(self.rank_graph(rank), outputs[rank])
        result = put_together(
            self.mesh, self.rank_graph, self.parameters, self.buffers, state, outputs
        )
        unread = [name for name, layout in self.parameters.items() if not layout.stages]
        result.params.update({name: self.read_parameter(name).clone() for name in unread})
        return result

    def state_dict(
        self, values: Mapping[str, Tensor] | StepResult | None = None
    ) -> dict[str, Tensor]:
        """Whole parameters under every name that the plain module has, for its `load_state_dict`.

        `values`: a step's result, or parameters and written buffers by name; without it the initial
        ones.
        """
        if isinstance(values, StepResult):
            values = values.params | values.buffers
        missing = [name for name in self.parameters if values is not None and name not in values]
        if missing:
            raise InputError(f"values lacks {len(missing)} parameters, such as '{missing[0]}'.")
        found: dict[str, Tensor] = {}
        for name, layout in self.parameters.items():
            value = values[name] if values is not None else self.read_parameter(name)
            for alias in dict.fromkeys((name, *layout.aliases)):
                found[alias] = value
        extra = self.extra_state()
        written = extra.keys() & (values or {}).keys() & self.buffers.keys()
        return {**extra, **{name: (values or {})[name] for name in written}, **found}

    # -- identity

    def serialized(self, index: int) -> dict[str, Any]:
        """The graphs of a class of ranks as plain data; equal programs have equal data."""
        return graphs_to_json({"step": self.rank_graphs[index], **self._chunk_graphs(index)})

    @cached_property
    def class_digests(self) -> tuple[str, ...]:
        """A digest of the graphs of every class of ranks."""
        if self._digests is not None:
            return tuple(self._digests)
        return tuple(fingerprint(self.serialized(i)) for i in range(len(self.rank_graphs)))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of all that ranks must agree on before the first step, values left out."""
        return fingerprint(
            {
                "mesh": [list(axis) for axis in self.mesh],
                "inputs": [[i.name, list(i.shape), str(i.dtype), i.batch_dim] for i in self.inputs],
                "micro_batches": self.micro_batches,
                "classes": list(self.class_digests),
                "tp_bounds": list(self.tp_bounds),
                "measured": "" if self.measured is None else self.measured.digest,
            }
        )

    @cached_property
    def values_digest(self) -> str:
        """A digest of the initial values of all parameters; "" if there are none."""
        if isinstance(self._source, SavedTensors):
            return self._source.digest
        if not self.has_values:
            return ""
        digest = hashlib.blake2b(digest_size=16)
        if self.recipe is not None:
            digest.update(self.recipe.digest.encode())
        for name in sorted(self.parameters):
            if self._is_drawn("parameter", name):
                continue
            value = self.read_parameter(name).contiguous().reshape(-1).view(torch.uint8)
            digest.update(name.encode())
            digest.update(value.cpu().numpy().data)
        return digest.hexdigest()

    def save(self, folder: str | Path) -> None:
        """Write the program, and the model's parameters if it has values, for `msc.load`."""
        from msc.saving import save_program

        save_program(self, folder)


def load(folder: str | Path, rank: int | None = None) -> Program:
    """Read a program that `Program.save` wrote.

    With `rank`, only that rank's graph and shards are read when they are needed.
    """
    from msc.saving import load_program

    return load_program(folder, rank)
