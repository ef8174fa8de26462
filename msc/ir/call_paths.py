"""Module paths of a called graph's nodes, where they stand in place of the call.

The graph of equal layers carries the module paths of the first of them; a call says for which layer
it stands, and from which layer the nodes come that the call before left to it. A node of the layer
before it, as a residual sum may be, gets the path of the layer before the one that is called.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import fx

from msc.ir.structure import layer_of

Layer = tuple[str, int]
"""The path of a list of layers, and a number in it."""


@dataclass(frozen=True)
class CallPaths:
    """The layer that own nodes carry and the one that they get; before: of those left to it."""

    own: tuple[Layer, Layer] | None = None
    before: tuple[Layer, Layer] | None = None

    def of(self, call: fx.Node, callee: fx.GraphModule) -> CallPaths:
        """The paths of what a call of the graph runs whose paths these are."""
        path, before = self.path(call), _renamed(call.meta.get("module_path_before"), self.own)
        own = _layers(callee, False, path) if path else self.own
        return CallPaths(own, _layers(callee, True, before))

    def path(self, node: fx.Node) -> str:
        """The path of a node; empty if it has none."""
        layers = self.before if node.meta.get("of_call_before", False) else self.own
        return _renamed(node.meta.get("module_path"), layers)

    def meta(self, node: fx.Node) -> dict[str, Any]:
        """The metadata of a node's copy."""
        meta = dict(node.meta)
        meta.pop("of_call_before", None)
        if meta.get("module_path"):
            meta["module_path"] = self.path(node)
        return meta


def _layers(gm: fx.GraphModule, of_before: bool, path: str) -> tuple[Layer, Layer] | None:
    """The layer that most nodes of a graph are of, and the one at `path`, if that is one.

    of_before: of those nodes that come from the call before, or of the others. Of two layers in
    other lists than that at `path` none is taken.
    """
    new = layer_of(path)
    if new is None:
        return None
    found: Counter[Layer] = Counter()
    for node in gm.graph.nodes:
        old = layer_of(node.meta.get("module_path") or "")
        if old is not None and node.meta.get("of_call_before", False) == of_before:
            found[old] += 1
    same = Counter({old: count for old, count in found.items() if old[0] == new[0]})
    if not same and len(found) != 1:
        return None
    return (same or found).most_common(1)[0][0], new


def _renamed(path: str | None, layers: tuple[Layer, Layer] | None) -> str:
    layer = layer_of(path or "")
    if not path or layer is None or layers is None:
        return path or ""
    old, new = layers
    if layer[0] != old[0] or (layer != old and old[0] != new[0]):
        return path
    return _name(new[0], layer[1] - old[1] + new[1]) + path[len(_name(*layer)) :]


def _name(container: str, number: int) -> str:
    return f"{container}.{number}" if container else str(number)
