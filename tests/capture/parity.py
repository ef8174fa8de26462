"""Run a captured graph on real tensors, and compare it with the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from msc.capture.captured import Captured
from msc.ir.values import tensors_of

RNG = (7, 3)


class LiftFloat32(TorchFunctionMode):
    """Casts to float32 become casts to float64: what capture does with dtype=float64."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = pytree.tree_map(
            lambda leaf: torch.float64 if leaf is torch.float32 else leaf, (args, kwargs or {})
        )
        if function is torch.Tensor.float:
            function = torch.Tensor.double
        return function(*args, **kwargs)


def run(captured: Captured, batch: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradient of every parameter, by interpreting the graph node by node."""
    tensors = iter(captured.flatten(batch))
    values: list[Tensor] = []
    leaves: dict[str, Tensor] = {}
    for node in captured.graph.graph.nodes:
        if node.op != "placeholder":
            continue
        kind, name = node.meta["kind"], node.meta["name"]
        if kind == "parameter":
            value = captured.read_parameter(name)
            assert value is not None
            leaves[name] = value.clone().requires_grad_(captured.parameters[name].requires_grad)
            values.append(leaves[name])
        elif kind == "buffer":
            buffer = captured.read_buffer(name)
            assert buffer is not None
            values.append(buffer)
        else:
            values.append(torch.tensor(RNG) if kind == "rng" else next(tensors))
        assert values[-1].shape == node.meta["val"].shape
        assert values[-1].dtype == node.meta["val"].dtype
    loss, *_ = CheckedInterpreter(captured.graph).run(*values)
    loss.backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


class CheckedInterpreter(fx.Interpreter):
    """Checks that each node yields what its metadata says."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op == "call_function":
            real = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]
            said = tensors_of(n)
            assert [(x.shape, x.dtype) for x in real] == [(x.shape, x.dtype) for x in said], n
        return result


def run_eager(
    model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor]
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The loss and the gradient of every parameter of the model itself."""
    model.zero_grad(set_to_none=True)
    with LiftFloat32():
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss = loss_of(output)
    torch.autograd.backward(loss)
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_parity(
    captured: Captured, model: nn.Module, batch: Any, loss_of: Callable[[Any], Tensor]
) -> None:
    """Loss and all gradients agree to float64 rounding, and so does which of them are absent."""
    loss, gradients = run(captured, batch)
    expected_loss, expected = run_eager(model, batch, loss_of)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-12, atol=1e-14)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        ours = gradients[name]
        if gradient is None or ours is None:
            assert gradient is None, f"{name} has no gradient"
            assert ours is None, f"{name} has a gradient"
        else:
            torch.testing.assert_close(ours, gradient, rtol=1e-10, atol=1e-13, msg=name)
