"""Compute values of a block's forward again in its backward, so that they need not be saved.

    forward:   %h = msc.linear(%x, %w)                    %h = msc.linear(%x, %w)
               %y = aten.gelu(%h)                         %y = aten.gelu(%h)
               return (%y,), saved (%h,)            ->    return (%y,), saved ()
    backward:  %gh = aten.gelu_backward(%gy, %h)          %h = msc.linear(%x, %w)
                                                          %gh = aten.gelu_backward(%gy, %h)

Given is the set of forward calls that may run again. Of them those run that the backward needs,
each right before its first reader and in the order of the forward, collectives included; operands
from outside the set are saved, or are the block's inputs. Random numbers are keyed, so a mask comes
out the same. Outputs of the forward that are no gradient's concern, such as the new values of
buffers, are not touched. Numerics: kept bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from msc.ir.structure import output_nodes, placeholders
from msc.ir.walks import ancestors
from msc.passes.differentiate import Differentiated, Saved


def saved_nodes(programs: Differentiated) -> list[fx.Node]:
    """The nodes of the forward whose values the backward reads, in the order of `saved`."""
    inputs, results = placeholders(programs.forward), output_nodes(programs.forward)
    return [
        inputs[item.index] if item.is_input else results[programs.num_outputs + item.index]
        for item in programs.saved
    ]


def recompute(programs: Differentiated, again: Collection[fx.Node]) -> Differentiated:
    """The block with the calls `again` of its forward recomputed where the backward needs them.

    Returns `programs` itself if nothing that is saved is among them.
    """
    saved = saved_nodes(programs)
    if programs.backward is None or not any(node in again for node in saved):
        return programs
    return _Rewriter(programs, programs.backward, saved, again).run()


def recomputed(saved: Sequence[fx.Node], again: Collection[fx.Node]) -> set[fx.Node]:
    """The calls that run again for the values of `saved` that are in `again`.

    Tuples and collectives in flight cannot be saved, so the call behind an item or a wait runs
    again with it, also if it is not in `again`.
    """
    found: set[fx.Node] = set()
    stack = [node for node in saved if node in again]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        stack += [o for o in node.all_input_nodes if o in again or not can_be_saved(o)]
    return found


def kept_nodes(
    forward: fx.GraphModule, saved: Collection[fx.Node], again: Collection[fx.Node]
) -> list[fx.Node]:
    """What the new backward reads of the forward: what is left of `saved`, then the rest.

    again: the calls that run again, as `recomputed` finds them.
    """
    kept = dict.fromkeys(node for node in saved if node not in again)
    for node in forward.graph.nodes:
        if node in again:
            kept.update(dict.fromkeys(o for o in node.all_input_nodes if o not in again))
    return list(kept)


def can_be_saved(node: fx.Node) -> bool:
    """Whether a value outlives its graph: one tensor, not the token of a collective in flight."""
    waits = torch.ops._c10d_functional.wait_tensor.default
    in_flight = any(user.target is waits for user in node.users)
    return isinstance(node.meta.get("val"), torch.Tensor) and not in_flight


class _Rewriter:
    def __init__(
        self,
        programs: Differentiated,
        backward: fx.GraphModule,
        saved: list[fx.Node],
        again: Collection[fx.Node],
    ) -> None:
        self.programs = programs
        self.old_backward = backward
        self.saved = saved
        self.again = recomputed(saved, again)
        self.position = {node: n for n, node in enumerate(programs.forward.graph.nodes)}
        self.kept = kept_nodes(programs.forward, saved, self.again)
        self.graph = fx.Graph()
        self.values: dict[fx.Node, fx.Node] = {}  # of the forward -> in the new backward
        self.env: dict[fx.Node, fx.Node] = {}  # of the old backward -> in the new one

    def run(self) -> Differentiated:
        inputs = placeholders(self.programs.forward)
        results = [node for node in self.kept if node.op != "placeholder"]
        saved = tuple(
            Saved(True, inputs.index(node))
            if node.op == "placeholder"
            else Saved(False, results.index(node))
            for node in self.kept
        )
        backward = self._backward()
        old = self.programs
        forward = self._forward(results)
        return Differentiated(
            forward, backward, old.num_outputs, len(results), saved, old.tangents, old.gradients
        )

    def _forward(self, results: list[fx.Node]) -> fx.GraphModule:
        old = self.programs.forward
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in old.graph.nodes:
            if node.op != "output":
                env[node] = graph.node_copy(node, env.__getitem__)
                env[node].meta = dict(node.meta)
        outputs = output_nodes(old)[: self.programs.num_outputs]
        graph.output(tuple(env[node] for node in (*outputs, *results)))
        return _finish(graph)

    def _backward(self) -> fx.GraphModule:
        before = placeholders(self.old_backward)
        old = dict(zip(self.saved, before, strict=False))
        for node in self.kept:
            given = old.get(node)
            new = self.graph.placeholder(node.name if given is None else given.name)
            new.meta = _saved_meta(node) if given is None else dict(given.meta)
            self.values[node] = new
        for node, placeholder in zip(self.saved, before, strict=False):
            if node in self.values:
                self.env[placeholder] = self.values[node]
        for node in before[len(self.saved) :]:
            self.env[node] = self.graph.node_copy(node)
            self.env[node].meta = dict(node.meta)
        forward_of = dict(zip(before, self.saved, strict=False))
        for node in self.old_backward.graph.nodes:
            if node.op == "placeholder":
                continue
            for operand in node.all_input_nodes:
                if operand not in self.env:
                    self.env[operand] = self._compute(forward_of[operand])
            if node.op == "output":
                self.graph.output(fx.map_arg(node.args[0], self.env.__getitem__))
            else:
                self.env[node] = self.graph.node_copy(node, self.env.__getitem__)
                self.env[node].meta = dict(node.meta)
        return _finish(self.graph)

    def _compute(self, wanted: fx.Node) -> fx.Node:
        """Compute a value of the forward in the backward, with all that it needs."""
        needed = ancestors([wanted], lambda node: node not in self.values)
        for node in sorted(needed, key=self.position.__getitem__):
            new = self.graph.node_copy(node, self.values.__getitem__)
            new.meta = {**node.meta, "phase": "recompute"}
            self.values[node] = new
        return self.values[wanted]


def _saved_meta(node: fx.Node) -> dict[str, Any]:
    if node.op == "placeholder":
        return dict(node.meta)
    return {"val": node.meta["val"], "kind": "saved", "name": node.name}


def _finish(graph: fx.Graph) -> fx.GraphModule:
    for node in graph.find_nodes(op="placeholder"):
        node.target = node.name  # generated code names arguments by targets, which may be equal
    gm = fx.GraphModule({}, graph)
    gm.graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))
    gm.recompile()
    return gm
