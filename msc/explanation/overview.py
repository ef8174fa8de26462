"""Read an explanation's facts off a finished compilation: its plan, and the graphs made of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import fx, nn

from msc.cost import CostModel
from msc.explanation.communication import collective_cost, payload_bytes
from msc.explanation.facts import Communication, Module, Part, Value
from msc.ir.communication import collective_kind
from msc.ir.placement import REPLICATED, Partial, Replicate, State
from msc.ir.structure import layer_names, layer_of, output_nodes
from msc.ir.values import describe, tensors_of
from msc.passes.compilation import Compilation
from msc.passes.sharding.calls import Value as Tensor
from msc.passes.sharding.calls import is_call, operands_of, value_of
from msc.passes.sharding.plan_of import op_name

Readers = dict[Tensor, list[fx.Node]]


@dataclass
class Overview:
    """The parts of a compilation; `module` is the user's, for the names of classes."""

    unit: Compilation
    module: nn.Module

    def parts(self) -> tuple[Part, ...]:
        """Every distinct block, in the order in which the model runs them."""
        return tuple(self._part(name) for name in self.unit.structure.blocks)

    def title(self, name: str) -> str:
        """The layers that a block stands for; for what is no layer, the modules in it."""
        paths = [i.path for i in self.unit.structure.instances if i.block == name]
        if all(layer_of(path) is not None for path in paths):
            return layer_names(paths)
        nodes = self.unit.structure.blocks[name].graph.nodes
        return top_modules(module_of(node) for node in nodes if is_call(node))

    def base(self, name: str) -> str:
        """The layer that the first instance of a block is; "" for what is no layer."""
        path = next(i.path for i in self.unit.structure.instances if i.block == name)
        return path if layer_of(path) is not None else ""

    def _part(self, name: str) -> Part:
        structure = self.unit.structure
        gm = structure.blocks[name]
        readers = readers_of(gm)
        values: dict[str, list[Value]] = {}
        for node in gm.graph.nodes:
            if node.op == "placeholder" and node.meta["kind"] == "parameter":
                home = parameter_home(node)
                values.setdefault(home, []).append(self._parameter(node, home))
        for node in gm.graph.nodes:
            if is_call(node):
                values.setdefault(module_of(node), []).extend(self._results(name, node, readers))
        sent: dict[str, list[Communication]] = {}
        for home, communication in self.communications(name):
            sent.setdefault(home, []).append(communication)
        paths = _in_order([*(module_of(n) for n in gm.graph.nodes if is_call(n)), *values, *sent])
        base = self.base(name)
        modules = [
            Module(
                relative(path, base),
                depth(path, paths, base),
                self._class(path),
                tuple(values.get(path, ())),
                tuple(sent.get(path, ())),
            )
            for path in paths
        ]
        return Part(self.title(name), structure.counts[name], tuple(modules))

    def _class(self, path: str) -> str:
        try:
            return type(self.module.get_submodule(path)).__name__
        except AttributeError:
            return ""

    def _parameter(self, node: fx.Node, home: str) -> Value:
        state = self._placed(node)
        axes = [axis.name for axis in self.unit.settings.batch_axes if axis.name != "mb"]
        trainable = bool(node.meta.get("differentiable"))
        partial = [*axes, *(["tp"] if isinstance(state.grad, Partial) else [])] if trainable else []
        placements = {} if isinstance(state.value, Replicate) else {"tp": str(state)}
        data = self.unit.data_shards.get(node.meta["name"])
        if data is not None:  # as a rank keeps it from step to step
            placements = {"dp": f"S{data.dim}", **placements}
        return Value(
            relative(node.meta["name"], home),
            "parameter",
            "",
            describe(node.meta["val"]),
            placements,
            tuple(partial),
        )

    def _placed(self, node: fx.Node) -> State:
        return self.unit.placed.placeholders[node] if self.unit.placed else REPLICATED

    def _results(self, name: str, node: fx.Node, readers: Readers) -> Iterator[Value]:
        batch = self.unit.batch[name].states
        for index, tensor in enumerate(tensors_of(node)):
            placements = {}
            for axis in self.unit.settings.batch_axes:
                placements[axis.name] = batch[node, index]
            if self.unit.placed is not None:
                placements["tp"] = self.unit.placed.strategies[node].results[index]
            shown = {
                axis: str(state.value)
                for axis, state in placements.items()
                if not isinstance(state.value, Replicate)
            }
            several = len(tensors_of(node)) > 1
            yield Value(
                f"{node.name}[{index}]" if several else node.name,
                "result" if _leaves(node, readers.get((node, index), [])) else "inner",
                op_name(node),
                describe(tensor),
                shown,
            )

    # -- communication

    def communications(self, name: str) -> Iterator[tuple[str, Communication]]:
        """The collectives of a block, forward and backward, and the module where each is shown."""
        gm = self.unit.structure.blocks[name]
        nodes = {node.name: node for node in gm.graph.nodes}
        readers, base = readers_of(gm), self.base(name)
        programs = self.unit.variants[0].differentiated[name]
        layers = self.unit.structure.counts[name]
        calls = self.unit.settings.micro_batches
        for phase, graph in (("forward", programs.forward), ("backward", programs.backward)):
            for node in graph.graph.nodes if graph is not None else ():
                kind = collective_kind(node)
                if kind is None:
                    continue
                producer, index, axis, have, want = node.meta["conversion"]
                value = (nodes[producer], index)
                reading = [
                    reader
                    for reader in readers.get(value, ())
                    if is_call(reader) and self._reads(name, reader, value, axis, want)
                ]
                home, why = _disagreement(nodes[producer], reading, have, want, base)
                size = payload_bytes(node)
                group = str(node.args[-1])
                cost = collective_cost(kind, size, group, self.cost, self.unit.settings.mesh)
                yield home, Communication(kind, group, phase, size, cost, calls, layers, why)

    @property
    def cost(self) -> CostModel:
        """The cost model of the search, if there was one."""
        placing = self.unit.placing
        return self.unit.settings.cost if placing is None else placing.model

    def _reads(self, name: str, reader: fx.Node, value: Tensor, axis: str, want: str) -> bool:
        """Whether a call reads a value in the state `want`."""
        placed, batch = self.unit.placed, self.unit.batch[name]
        strategies = placed.strategies if axis == "tp" and placed else batch.strategies
        states = zip(operands_of(reader), strategies[reader].operands, strict=True)
        # of a value without gradient, R and R~ are one
        return any(v == value and want in (str(s), str(s.value)) for v, s in states)


def _disagreement(
    node: fx.Node, readers: Sequence[fx.Node], have: str, want: str, base: str
) -> tuple[str, str]:
    """The module where a conversion is shown, and the two ops that disagree."""
    given = node.op == "placeholder"
    producer = f"{node.meta['name']} comes in" if given else f"{named(node, base)} is computed"
    reader = named(readers[0], base) if readers else "the next block"
    more = f", as do {len(readers) - 1} more" if len(readers) > 1 else ""
    at_producer = not given and (have.startswith("P") or not readers)
    home = module_of(node if at_producer or not readers else readers[0])
    return home, f"{producer} as {have}, {reader} reads {want}{more}"


def module_of(node: fx.Node) -> str:
    """The path of the module that a call belongs to; "" for the model itself."""
    return node.meta.get("module_path") or ""


def parameter_home(node: fx.Node) -> str:
    """The module under which a parameter is shown: its own, or the one that reads it (tied)."""
    own = str(node.meta["name"]).rpartition(".")[0]
    readers = [module_of(user) for user in node.users]
    return own if own in readers or not readers else readers[0]


def named(node: fx.Node, base: str) -> str:
    """A call by its module, as it is inside the layer at `base`, and its op."""
    path = relative(module_of(node), base)
    return f"{path} ({op_name(node)})" if path else op_name(node)


def readers_of(gm: fx.GraphModule) -> Readers:
    """The calls that read each value of a graph, and its output node."""
    found: Readers = {}
    for node in gm.graph.nodes:
        if is_call(node):
            for value in dict.fromkeys(operands_of(node)):
                found.setdefault(value, []).append(node)
    for value in dict.fromkeys(map(value_of, output_nodes(gm))):
        found.setdefault(value, []).append(gm.graph.output_node())
    return found


def _leaves(node: fx.Node, readers: Sequence[fx.Node]) -> bool:
    """Whether another module, or another block, reads a result of `node`."""
    return any(r.op == "output" or module_of(r) != module_of(node) for r in readers)


def _in_order(paths: Sequence[str]) -> list[str]:
    """Paths so that each module stands behind the one that it belongs to, as they first occur."""
    first: dict[str, int] = {}
    for path in paths:
        parts = path.split(".") if path else []
        for length in range(len(parts) + 1):
            first.setdefault(".".join(parts[:length]), len(first))

    def key(path: str) -> tuple[int, ...]:
        parts = path.split(".") if path else []
        return tuple(first[".".join(parts[:length])] for length in range(len(parts) + 1))

    return sorted(dict.fromkeys(paths), key=key)


def relative(path: str, base: str) -> str:
    """A path as it is inside the module at `base`, "" for that module itself."""
    if not base:
        return path
    return "" if path == base else path.removeprefix(f"{base}.")


def depth(path: str, paths: Sequence[str], base: str) -> int:
    """How deep a module is shown: 0 for the layer itself, then one more inside each shown one."""
    inner = relative(path, base)
    if not inner:
        return 0
    others = (relative(other, base) for other in paths)
    return 1 + sum(bool(other) and inner.startswith(f"{other}.") for other in others)


def top_modules(paths: Iterable[str]) -> str:
    """The outermost modules among paths, as the name of what is no layer."""
    split = [path.split(".") for path in dict.fromkeys(paths) if path]
    if not split:
        return "(model)"
    shared = 0
    while all(parts[:shared] == split[0][:shared] for parts in split):
        if any(len(parts) == shared for parts in split):
            return ".".join(split[0][:shared])
        shared += 1
    return ", ".join(dict.fromkeys(".".join(parts[:shared]) for parts in split))
