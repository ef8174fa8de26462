"""Rank graphs as JSON, and back: what a saved program consists of.

    {"format": "msc graphs", "version": 1,
     "roots": [["rank.pp0", 2]],
     "graphs": [
       {"name": "block0", "meta": [], "modules": {}, "nodes": [
         ["placeholder", "x", "x", [], [], {"val": {"T": "f32[4,8]"}}],
         ["call_function", "mm", "aten.mm.default", [{"n": "x"}, {"n": "w"}], [], {..}],
         ["output", "output", "output", [{"t": [{"n": "mm"}]}], [], {}]]},
       ..

A graph stands before those that call it, and once however many do: they name it by its index. A
node is a list of op, name, target, arguments, keyword arguments and metadata, in the encoding of
`msc.ir.encoding`. Targets are written by name: `aten.add.Tensor`, `operator.getitem`, `send`.
Equal graphs give equal texts in every process: there is no hash order, address or path in them.
"""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed  # registers torch.ops._c10d_functional
from torch import fx

import msc.ir.ops  # noqa: F401  registers torch.ops.msc
from msc.ir import actions
from msc.ir.communication import subgraph
from msc.ir.encoding import Decoder, encode
from msc.ir.errors import UserError, VerifyError
from msc.ir.torch_private import OpOverload

FORMAT = "msc graphs"
VERSION = 1

_GETITEM = "operator.getitem"
_ACTIONS = {action.__name__: action for action in actions.ACTIONS}


def graphs_to_json(graphs: Mapping[str, fx.GraphModule]) -> dict[str, Any]:
    """Named graphs, with all graphs that they call, as plain JSON values.

    Raises `VerifyError` naming the node for what has no JSON: a node that is no placeholder, output
    or call of an op, action or graph; an argument or a metadata entry that `msc.ir.encoding` does
    not know. Ops of users are written by their names.
    """
    writer = _Writer()
    roots = [[name, writer.add(name, gm)] for name, gm in graphs.items()]
    return {"format": FORMAT, "version": VERSION, "roots": roots, "graphs": writer.graphs}


def graphs_from_json(data: Mapping[str, Any]) -> dict[str, fx.GraphModule]:
    """The graphs that `graphs_to_json` wrote; their fake tensors are of one new mode.

    Raises `UserError` for another format or version, and for an op that is not there.
    """
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise UserError(
            f"These graphs have format {data.get('format')!r}, version {data.get('version')!r}; "
            f"this MSC reads '{FORMAT}', version {VERSION}. Compile and save the program again."
        )
    decoder = Decoder()
    modules: list[fx.GraphModule] = []
    for record in data["graphs"]:
        modules.append(_read_graph(record, modules, decoder))
    return {name: modules[index] for name, index in data["roots"]}


def to_text(data: Mapping[str, Any]) -> str:
    """The JSON text of serialized graphs, one line for each node; `json.loads` reads it."""
    head = {key: value for key, value in data.items() if key != "graphs"}
    graphs = []
    for graph in data["graphs"]:
        rest = {key: value for key, value in graph.items() if key != "nodes"}
        nodes = ",\n".join(map(_dumps, graph["nodes"]))
        graphs.append(f'{_dumps(rest)[:-1]}, "nodes": [\n{nodes}]}}')
    return f'{_dumps(head)[:-1]}, "graphs": [\n' + ",\n".join(graphs) + "]}\n"


def fingerprint(data: Mapping[str, Any]) -> str:
    """SHA-256 of serialized graphs, as hex digits: equal for equal graphs, on every rank."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _dumps(value: Any) -> str:
    return json.dumps(value, allow_nan=False)


class _Writer:
    def __init__(self) -> None:
        self.graphs: list[dict[str, Any]] = []
        self._indices: dict[int, int] = {}

    def add(self, name: str, gm: fx.GraphModule) -> int:
        """The index of a graph, which is written when it is first met."""
        known = self._indices.get(id(gm))
        if known is not None:
            return known
        called: dict[str, int] = {}
        for node in gm.graph.nodes:
            target = str(node.target)
            if node.op == "call_module" and target not in called:
                called[target] = self.add(target, subgraph(gm, node))
        record = {
            "name": name,
            "meta": _items(gm.meta, f"the metadata of graph '{name}'"),
            "modules": called,
            "nodes": [_node(node, name) for node in gm.graph.nodes],
        }
        self.graphs.append(record)
        self._indices[id(gm)] = len(self.graphs) - 1
        return self._indices[id(gm)]


def _node(node: fx.Node, graph: str) -> list[Any]:
    where = f"%{node.name} in graph '{graph}'"
    return [
        node.op,
        node.name,
        _target_name(node, where),
        [_encode(value, where, "an argument") for value in node.args],
        _items(node.kwargs, where),
        dict(_items(dict(sorted(node.meta.items())), where)),
    ]


def _items(values: Mapping[str, Any], where: str) -> list[list[Any]]:
    return [[key, _encode(value, where, f"'{key}'")] for key, value in values.items()]


def _encode(value: Any, where: str, role: str) -> Any:
    try:
        return encode(value)
    except TypeError as error:
        raise VerifyError(f"{where}: {role} cannot be written to a file: {error}.") from error


def _target_name(node: fx.Node, where: str) -> str:
    target: Any = node.target
    if node.op in ("placeholder", "call_module", "output"):
        return str(target)
    if node.op == "call_function":
        if target is operator.getitem:
            return _GETITEM
        if target in actions.ACTIONS:
            return str(target.__name__)
        if isinstance(target, OpOverload):
            return str(target)
    raise VerifyError(
        f"{where} is {node.op} {target}, which cannot be written to a file: a graph calls "
        "registered ops, operator.getitem, actions and graphs."
    )


def _target(op: str, name: str) -> Any:
    if op != "call_function":
        return name
    if name == _GETITEM:
        return operator.getitem
    if name in _ACTIONS:
        return _ACTIONS[name]
    namespace, _, rest = name.partition(".")
    found: Any = getattr(torch.ops, namespace)
    for part in rest.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise UserError(
            f"The saved program calls {name}, which is not registered in this process (torch "
            f"{torch.__version__}). Import the module that defines the op, or call "
            "msc.wrap_function as before the program was compiled; or compile and save it again."
        )
    return found


def _read_graph(
    record: Mapping[str, Any], modules: list[fx.GraphModule], decoder: Decoder
) -> fx.GraphModule:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for op, name, target, args, kwargs, meta in record["nodes"]:
        node = graph.create_node(
            op,
            _target(op, target),
            tuple(decoder.decode(value, nodes) for value in args),
            {key: decoder.decode(value, nodes) for key, value in kwargs},
            name,
        )
        if node.name != name:
            node.name = name  # a name that fx would not give; the graph may have been renamed
        node.meta = {key: decoder.decode(value, nodes) for key, value in meta.items()}
        nodes[name] = node
    called = {target: modules[index] for target, index in record["modules"].items()}
    gm = fx.GraphModule(dict[str, Any](called), graph)
    gm.meta = {key: decoder.decode(value, nodes) for key, value in record["meta"]}
    return gm
