"""Invariants of graphs, as named functions.

A check returns the first offending node and one sentence, or None. `structure` holds for every
graph at all times; the others a pass declares in `requires` and `ensures`, and once ensured they
stay checked (`msc.ir.pipeline`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from msc.ir import actions
from msc.ir.errors import VerifyError
from msc.ir.printer import format_neighbourhood, format_target
from msc.ir.torch_private import OpOverload, is_mutable, num_returns


@dataclass(frozen=True)
class Violation:
    """What is wrong, as a sentence without the full stop, and at which node.

    `node` is None where no single node is to blame.
    """

    node: fx.Node | None
    reason: str


Check = Callable[[fx.GraphModule], Violation | None]

_WAIT = torch.ops._c10d_functional.wait_tensor.default


def verify(gm: fx.GraphModule, checks: Sequence[Check], after: str) -> None:
    """Raise `VerifyError` for the first of `checks` that `gm` fails.

    `after` says what was done last: "pass 2 of 6, close-partials".
    """
    for check in checks:
        violation = check(gm)
        if violation is not None:
            raise VerifyError(explain(check.__name__, violation, after))


def explain(check: str, violation: Violation, after: str) -> str:
    """The message of a `VerifyError`: the check, what was done last, the program at the node."""
    parts = [f"{check} fails after {after}:\n  {violation.reason}"]
    node = violation.node
    if node is not None and node.graph.owning_module is not None:
        parts.append(format_neighbourhood(node.graph.owning_module, node))
    parts.append(
        "This is a bug in the pass. MSC_DUMP=<folder> writes the program before and after it."
    )
    return "\n\n".join(parts)


def structure(gm: fx.GraphModule) -> Violation | None:
    """Well formed, every value known, no op that writes to an operand, every start waited for."""
    for check in (well_formed, values_known, functional, starts_are_waited):
        violation = check(gm)
        if violation is not None:
            return violation
    return None


def well_formed(gm: fx.GraphModule) -> Violation | None:
    """Values are computed before they are read, targets exist, and an output ends the graph."""
    seen: set[fx.Node] = set()
    nodes = list(gm.graph.nodes)
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand not in seen:
                return Violation(node, f"%{node.name} reads %{operand.name} before it is computed")
        seen.add(node)
    if not nodes or nodes[-1].op != "output":
        return Violation(nodes[-1] if nodes else None, "the last node is not an output")
    try:
        gm.graph.lint()
    except (RuntimeError, ValueError) as error:
        return Violation(None, f"torch.fx finds the graph broken: {error}")
    return None


def values_known(gm: fx.GraphModule) -> Violation | None:
    """Every node that yields a value has it as `meta['val']`: a fake tensor, or a tuple of them."""
    for node in gm.graph.nodes:
        if "val" not in node.meta and _yields_value(gm, node):
            return Violation(node, f"%{node.name} has no meta['val'], so its shape is not known")
    return None


def functional(gm: fx.GraphModule) -> Violation | None:
    """No op writes to an operand."""
    for node in gm.graph.nodes:
        if isinstance(node.target, OpOverload) and is_mutable(node.target):
            return Violation(
                node, f"%{node.name} calls {format_target(node.target)}, which writes to an operand"
            )
    return None


def starts_are_waited(gm: fx.GraphModule) -> Violation | None:
    """Each result of a collective start, and each send or receive, is read by exactly one wait."""
    for node in gm.graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (actions.send, actions.recv):
            violation = _waited_once(node, actions.wait)
        elif _is_collective_start(node):
            violation = _collective_waited(node)
        else:
            continue
        if violation is not None:
            return violation
    return None


def _yields_value(gm: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "output":
        return False
    if node.op == "get_attr":
        return not isinstance(operator.attrgetter(str(node.target))(gm), torch.nn.Module)
    if node.target in (actions.send, actions.recv):
        return False  # a token
    if node.target is actions.wait:
        token = node.args[0]
        return not (isinstance(token, fx.Node) and token.target is actions.send)
    return not (isinstance(node.target, OpOverload) and num_returns(node.target) == 0)


def _is_collective_start(node: fx.Node) -> bool:
    target = node.target
    return (
        isinstance(target, OpOverload)
        and target.namespace == "_c10d_functional"
        and target is not _WAIT
        and num_returns(target) > 0
    )


def _collective_waited(node: fx.Node) -> Violation | None:
    if not isinstance(node.meta.get("val"), (tuple, list)):
        return _waited_once(node, _WAIT)
    taken: dict[object, fx.Node] = {}
    for user in node.users:
        if user.target is not operator.getitem:
            return Violation(user, f"%{user.name} reads the results of %{node.name} without a wait")
        if user.args[1] in taken:
            return Violation(user, f"%{user.name} takes a result of %{node.name} a second time")
        taken[user.args[1]] = user
        violation = _waited_once(user, _WAIT)
        if violation is not None:
            return violation
    if len(taken) != len(node.meta["val"]):
        return Violation(
            node,
            f"only {len(taken)} of {len(node.meta['val'])} results of %{node.name} are waited for",
        )
    return None


def _waited_once(node: fx.Node, wait: object) -> Violation | None:
    waits = [user for user in node.users if user.target is wait]
    for user in node.users:
        if user.target is not wait:
            return Violation(user, f"{_reader(user)} reads %{node.name} without a wait")
    if len(waits) == 1:
        return None
    if not waits:
        return Violation(node, f"%{node.name} is started and never waited for")
    return Violation(waits[1], f"%{node.name} is waited for {len(waits)} times")


def _reader(node: fx.Node) -> str:
    return "the output" if node.op == "output" else f"%{node.name}"
