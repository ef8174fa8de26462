"""Where the values of a forward graph come from: parameters, the batch, or both."""

from __future__ import annotations

from torch import fx


class Origins:
    """What each value of a forward graph depends on, and its place in the order of the graph."""

    def __init__(self, gm: fx.GraphModule) -> None:
        self.nodes = list(gm.graph.nodes)
        self.position = {node: index for index, node in enumerate(self.nodes)}
        self._parameters: set[fx.Node] = set()
        self._batch: set[fx.Node] = set()
        for node in self.nodes:
            if node.op == "placeholder":
                kind = node.meta["kind"]
                trained, fed = kind == "parameter", kind in ("input", "rng")
            else:
                trained = any(operand in self._parameters for operand in node.all_input_nodes)
                fed = any(operand in self._batch for operand in node.all_input_nodes)
            if trained:
                self._parameters.add(node)
            if fed:
                self._batch.add(node)

    def of_parameters(self, node: fx.Node) -> bool:
        """Whether the value depends on no input of the model: parameters, buffers, constants."""
        return node not in self._batch

    def is_activation(self, node: fx.Node) -> bool:
        """Whether the value depends on parameters and on the batch; masks and tables do not."""
        return node in self._batch and node in self._parameters

    def depending_on(self, source: fx.Node, end: fx.Node) -> set[fx.Node]:
        """`source` and what depends on it, up to `end` in the order of the graph."""
        found = {source}
        for node in self.nodes[self.position[source] + 1 : self.position[end] + 1]:
            if any(operand in found for operand in node.all_input_nodes):
                found.add(node)
        return found
