"""From torch.export's program to MSC's forward graph.

    %p_head_weight = placeholder                        %head_weight: f32[64,16] = placeholder
    %sym_size      = aten.sym_size.int(%ids, 0)    ->   %ids: i64[8,16] = placeholder
    %view          = aten.view(%x, [%sym_size, 8])      %view: f32[8,8] = aten.view(%x, [8, 8])

Parameters, buffers and inputs become placeholders in this order, tied parameters one; symbolic
sizes become those of the global batch; no_grad regions are inlined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from msc.capture.sizes import DataDependentSize, Sizes, has_tensor
from msc.capture.source import source_of
from msc.ir.errors import CaptureError
from msc.ir.torch_private import FakeTensorMode, HigherOrderOperator, OpOverload, argument_names
from msc.ir.values import where
from msc.passes.normalize.input_free import SIZES_AT_BATCH_TWO

SET_GRAD = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"
_DEVICE_ARGUMENTS = ("device", "pin_memory", "layout")
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional")
_PREFIX = "model."


@dataclass
class Placeholders:
    """The placeholders to make: (name, kind, tensor); `sources` maps exported names to them.

    `scalars` are constants of at most one number, by exported name; they become `aten.full`.
    """

    values: list[tuple[str, str, torch.Tensor]]
    sources: dict[str, str]
    scalars: dict[str, torch.Tensor]


@dataclass
class Builder:
    """Copies an exported graph node by node into a new one."""

    mode: FakeTensorMode
    sizes: Sizes
    at_two: Sizes
    lift_float32: bool
    graph: fx.Graph = field(default_factory=fx.Graph)
    env: dict[fx.Node, Any] = field(default_factory=dict)

    def build(self, program: ExportedProgram, placeholders: Placeholders) -> fx.GraphModule:
        """The forward graph; `CaptureError` for what a graph cannot hold."""
        nodes: dict[str, fx.Node] = {}
        for name, kind, tensor in placeholders.values:
            node = self.graph.placeholder(fx_name(name))
            node.meta.update(kind=kind, name=name, val=self.sizes.fake(self.mode, tensor))
            nodes[f"{kind}:{name}"] = node
        for exported_name, scalar in placeholders.scalars.items():
            nodes[exported_name] = self._scalar(scalar)
        exported = program.graph_module
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                self.env[node] = nodes.get(
                    placeholders.sources.get(node.name, node.name)
                )  # None: unread
            elif node.op == "output":
                (loss,) = self._map(node.args[0])
                self.graph.output((loss,))
            else:
                self._copy(node, exported)
        gm = fx.GraphModule({}, self.graph, "Forward")
        gm.meta["fake_mode"] = self.mode
        return gm

    def _scalar(self, scalar: torch.Tensor) -> fx.Node:
        dtype = torch.float64 if self.lift_float32 and scalar.is_floating_point() else scalar.dtype
        arguments = (list(scalar.shape), scalar.item() if scalar.numel() else 0)
        node = self.graph.call_function(torch.ops.aten.full.default, arguments, {"dtype": dtype})
        node.meta = {
            "phase": "forward",
            "module_path": "",
            "val": self.sizes.fake(self.mode, scalar.to(dtype)),
        }
        return node

    def _map(self, value: Any) -> Any:
        return fx.map_arg(value, self.env.__getitem__)

    def _copy(self, node: fx.Node, owner: fx.GraphModule) -> None:
        if node.op == "get_attr":
            self.env[node] = getattr(owner, str(node.target))
            return
        if isinstance(node.target, HigherOrderOperator):
            self._inline(node)
            return
        self._refuse_collective(node)
        meta = self._metadata(node)
        value = node.meta.get("val")
        if not has_tensor(value):
            self.env[node] = self._number(node, value)
            return
        if node.target is operator.getitem:
            container, index = node.args
            region = self.env[container]  # type: ignore[index]
            if not isinstance(region, fx.Node):  # the results of an inlined region
                self.env[node] = region[index]
                return
        fake = self._fake(node, value)
        args, kwargs = self._arguments(node, fake, self.sizes)
        new = self.graph.create_node("call_function", node.target, args, kwargs, node.name)
        new.meta = meta
        new.meta["val"] = self._run(new) if self.lift_float32 else fake
        if not all(has_tensor(source.meta.get("val")) for source in node.all_input_nodes):
            _remember_sizes(new, self._arguments(node, fake, self.at_two))
        self.env[node] = new

    def _arguments(self, node: fx.Node, fake: Any, sizes: Sizes) -> tuple[Any, Any]:
        """The arguments of a node's copy, with the sizes of one batch size."""

        def argument(source: fx.Node) -> Any:
            value = source.meta.get("val")
            if value is None or has_tensor(value):
                return self.env[source]
            return pytree.tree_map(sizes.number, value)

        args, kwargs = fx.map_arg((node.args, node.kwargs), argument)
        if isinstance(node.target, OpOverload):
            kwargs = _without_devices(node.target, args, kwargs, fake)
        return (_lift(args), _lift(kwargs)) if self.lift_float32 else (args, kwargs)

    def _refuse_collective(self, node: fx.Node) -> None:
        if isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES:
            raise CaptureError(
                f"The model communicates by itself at {where_exported(node)} ({node.target}). MSC "
                "captures what one device computes, and adds all communication: remove it."
            )

    def _inline(self, node: fx.Node) -> None:
        name = str(node.target)
        if name != SET_GRAD:
            place = where_exported(self._first_call(node))
            if name == AUTOCAST:
                raise CaptureError(
                    f"The model enters torch.autocast at {place}. A captured program computes in "
                    "the dtypes of its tensors: remove autocast, and convert the model instead "
                    "(model.to(torch.bfloat16))."
                )
            raise CaptureError(f"The model uses {name} at {place}, which MSC cannot parallelize.")
        arguments: list[Any] = [self.env[a] if isinstance(a, fx.Node) else a for a in node.args]
        enabled, body, *operands = arguments
        values = iter(operands)
        for inner in body.graph.nodes:
            if inner.op == "placeholder":
                self.env[inner] = next(values)
            elif inner.op == "output":
                results = self._map(inner.args[0])
            elif not enabled and str(inner.target) == SET_GRAD and inner.args[0]:
                raise CaptureError(
                    f"torch.enable_grad inside torch.no_grad, at {where_exported(node)}, cannot be "
                    "captured. Write the two regions one after the other."
                )
            else:
                self._copy(inner, body)
        self.env[node] = results if enabled else [self._detached(result) for result in results]

    def _first_call(self, region: fx.Node) -> fx.Node:
        """The first call inside a region, which itself has no source line."""
        for operand in region.args:
            body = self.env.get(operand) if isinstance(operand, fx.Node) else None
            if isinstance(body, fx.GraphModule):
                return next((n for n in body.graph.nodes if n.op == "call_function"), region)
        return region

    def _detached(self, value: Any) -> Any:
        if not isinstance(value, fx.Node) or not isinstance(value.meta["val"], torch.Tensor):
            return value
        new = self.graph.call_function(torch.ops.aten.detach.default, (value,))
        new.meta = dict(value.meta)
        new.meta.pop(SIZES_AT_BATCH_TWO, None)
        return new

    def _metadata(self, node: fx.Node) -> dict[str, Any]:
        meta: dict[str, Any] = {"phase": "forward", "module_path": module_path(node)}
        source = source_of(node.meta.get("stack_trace"))
        if source:
            meta["source"] = source
        return meta

    def _number(self, node: fx.Node, value: Any) -> Any:
        try:
            return pytree.tree_map(self.sizes.number, value)
        except DataDependentSize as error:
            raise _data_dependent(node, error) from None

    def _fake(self, node: fx.Node, value: Any) -> Any:
        try:
            return self.sizes.fake(self.mode, value)
        except DataDependentSize as error:
            raise _data_dependent(node, error) from None

    def _run(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        with self.mode:
            return target(*args, **kwargs)


def fx_name(name: str) -> str:
    """A placeholder's name in the program text: an identifier, also for `0.weight`."""
    text = "".join(letter if letter.isalnum() else "_" for letter in name)
    return text if text.isidentifier() else f"_{text}"


def module_path(node: fx.Node) -> str:
    """The user's path of the module that ran a node: "" for the model itself."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return path[len(_PREFIX) :] if path.startswith(_PREFIX) else ""


def where_exported(node: fx.Node) -> str:
    """Module path and line of a node of the exported program."""
    bare = fx.Graph().placeholder("x")
    bare.meta = {
        "module_path": module_path(node),
        "source": source_of(node.meta.get("stack_trace")),
    }
    return where(bare) if bare.meta["module_path"] or bare.meta["source"] else "an unknown place"


def _data_dependent(node: fx.Node, error: DataDependentSize) -> CaptureError:
    return CaptureError(
        f"The program depends on the numbers in a tensor at {where_exported(node)} ({node.target} "
        f"yields {error}). One graph must serve every batch: use torch.where or a mask in place of "
        ".item(), nonzero or boolean indexing."
    )


def _without_devices(
    op: OpOverload, args: Any, kwargs: Mapping[str, Any], value: Any
) -> dict[str, Any]:
    """Keyword arguments without device, layout and pinning: a graph is tied to no device.

    What makes a tensor out of nothing gets its dtype spelled out, since the default dtype may be
    another one when the program runs.
    """
    names = argument_names(op)
    result = {
        name: item
        for name, item in kwargs.items()
        if not (name in _DEVICE_ARGUMENTS and names.get(name, False))
    }
    creates = not any(isinstance(leaf, fx.Node) for leaf in pytree.tree_leaves((args, kwargs)))
    if creates and names.get("dtype") and isinstance(value, torch.Tensor):
        result["dtype"] = value.dtype
    return result


def _remember_sizes(node: fx.Node, at_two: tuple[Any, Any]) -> None:
    sizes = dict(enumerate(pytree.tree_leaves(at_two)))
    node.meta[SIZES_AT_BATCH_TWO] = {
        index: sizes[index]
        for index, leaf in enumerate(pytree.tree_leaves((node.args, node.kwargs)))
        if not isinstance(leaf, fx.Node) and leaf != sizes[index]
    }


def _lift(value: Any) -> Any:
    return pytree.tree_map(lambda leaf: torch.float64 if leaf is torch.float32 else leaf, value)
