"""Autograd functions as ops: `msc.wrap_function` keeps a user's backward in the captured graph.

torch.export would differentiate the forward of a `torch.autograd.Function` and lose its backward.
A wrapped one runs during capture as an op with that backward registered. Nothing changes outside.
"""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef  # type: ignore[attr-defined]  # public, not in __all__

from msc.ir.errors import CaptureError, UserError
from msc.passes.sharding.rules.custom import sharding_rule

_NAMESPACE = "msc_functions"


@dataclass(frozen=True)
class _Wrapped:
    """A function as it was when it was wrapped, and the op that stands for it."""

    function: type[Any]
    op: CustomOpDef


_WRAPPED: dict[type[Any], _Wrapped] = {}


def wrap_function(
    function: type[torch.autograd.Function],
    rule: str | None = None,
    *,
    schema: str | None = None,
    **options: Any,
) -> type[torch.autograd.Function]:
    """Let MSC compile models that call a `torch.autograd.Function`, with its own backward.

        msc.wrap_function(transformers.models.bloom.modeling_bloom.GeLUFunction, "... -> ...")

    Its forward becomes one op; its backward, which is captured as plain ops, runs forward again for
    what that leaves in `ctx` (what backward does not read costs nothing). The same function may
    be wrapped again, with another rule.

    Args:
        function: a subclass of `torch.autograd.Function`; returned unchanged.
        rule: how the op may be sharded, in the notation of `msc.sharding_rule`; None runs it whole.
        schema: `"(Tensor x, float eps) -> Tensor"`; None reads it off the annotations of forward,
            where what has none is a tensor.
        options: those of `msc.sharding_rule`: contracted, whole, linear, localize.

    Raises:
        UserError: it is no autograd function, its signature has no schema, or the rule is wrong.
    """
    if not (isinstance(function, type) and issubclass(function, torch.autograd.Function)):
        raise UserError(f"{function!r} is no subclass of torch.autograd.Function.")
    if schema is not None and not isinstance(schema, str):
        raise UserError(f"schema is {schema!r}; it is a string, such as '(Tensor x) -> Tensor'.")
    if rule is None and options:
        raise UserError(f"{', '.join(options)} are options of a rule, and there is none.")
    name = f"{_NAMESPACE}::{_identifier(function)}"
    known = _WRAPPED.get(function)
    if known is None or schema is not None:
        _WRAPPED[function] = _Wrapped(function, _define(function, name, schema))
    if rule is not None:
        try:
            sharding_rule(name, rule, **options)
        except UserError as error:
            if known is None:
                del _WRAPPED[function]
            raise UserError(
                f"{error} Its schema says which arguments are tensors; schema='(Tensor x, float "
                "eps) -> Tensor' gives it, where the annotations of forward do not."
            ) from error
    return function


def is_wrapped(function: type[Any]) -> bool:
    """Whether `wrap_function` has been told of a function."""
    return function in _WRAPPED


@contextmanager
def functions_as_ops() -> Iterator[None]:
    """Let the forward of every wrapped function call its op.

    Models keep `apply` under names of their own, and it looks up `forward` when it is called.
    """
    kept = {cls: _own_attributes(cls) for cls in _WRAPPED}
    try:
        for cls, wrapped in _WRAPPED.items():
            _redirect(cls, wrapped.op)
        yield
    finally:
        for cls, attributes in kept.items():
            for name in ("forward", "setup_context"):
                if name in attributes:
                    setattr(cls, name, attributes[name])
                elif name in vars(cls):
                    delattr(cls, name)


def _own_attributes(cls: type[Any]) -> dict[str, Any]:
    return {name: vars(cls)[name] for name in ("forward", "setup_context") if name in vars(cls)}


def _redirect(cls: type[Any], op: CustomOpDef) -> None:
    if _has_setup_context(cls):
        setattr(cls, "forward", staticmethod(lambda *args: op(*args)))  # noqa: B010  (mypy)
        setattr(cls, "setup_context", staticmethod(lambda ctx, inputs, output: None))  # noqa: B010
    else:
        setattr(cls, "forward", staticmethod(lambda ctx, *args: op(*args)))  # noqa: B010  (mypy)


def _has_setup_context(cls: type[Any]) -> bool:
    """Whether forward takes no ctx: a class of the user's defines `setup_context`."""
    own = [base for base in cls.__mro__ if not base.__module__.startswith("torch.")]
    return any("setup_context" in vars(base) for base in own)


def _identifier(function: type[Any]) -> str:
    return re.sub(r"\W", "_", f"{function.__module__}_{function.__qualname__}")


class _Context:
    """Stands in for the `ctx` of a function whose forward runs inside an op."""

    def __init__(self, needs_input_grad: Sequence[bool]) -> None:
        self.needs_input_grad = tuple(needs_input_grad)
        self.saved_tensors: tuple[Tensor, ...] = ()
        self.materialize = True

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Tensor) -> None:
        """Forward-mode differentiation is not captured."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Backward gets no gradient of them, or zeros."""

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize = value

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise CaptureError(
            "A wrapped torch.autograd.Function changes an operand in place (ctx.mark_dirty). "
            "Let its forward return a new tensor."
        )


def _define(function: type[Any], name: str, schema: str | None) -> CustomOpDef:
    """Register the op: its kernel is the function's forward, its gradient the function's."""
    forward, backward = function.forward, function.backward
    setup = function.setup_context if _has_setup_context(function) else None

    def run(ctx: _Context, args: Sequence[Any]) -> Any:
        if setup is None:
            return forward(ctx, *args)
        output = forward(*args)
        setup(ctx, tuple(args), output)
        return output

    def kernel(*args: Any) -> Any:
        held = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
        return _each(
            run(_Context([False] * len(args)), args),
            lambda x: x.clone() if x.untyped_storage().data_ptr() in held else x,
        )

    def fake(*args: Any) -> Any:
        return _each(run(_Context([False] * len(args)), args), torch.clone)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))
        ctx.rest = [None if isinstance(value, Tensor) else (value,) for value in inputs]

    def gradient(ctx: Any, *grads: Tensor | None) -> Any:
        tensors = iter(ctx.saved_tensors)
        inputs = [next(tensors) if held is None else held[0] for held in ctx.rest]
        inner = _Context(ctx.needs_input_grad)
        with torch.no_grad():
            output = run(inner, inputs)
            outputs = output if isinstance(output, (tuple, list)) else (output,)
            if inner.materialize:
                grads = tuple(
                    torch.zeros_like(made) if grad is None else grad
                    for made, grad in zip(outputs, grads, strict=True)
                )
            return backward(inner, *grads)

    found = schema if schema is not None else _schema(function, forward, setup is None)
    try:
        op = torch.library.custom_op(name, kernel, mutates_args=(), schema=found)
    except (RuntimeError, ValueError) as error:
        raise UserError(
            f"'{found}' is no schema that {function.__qualname__} can have: {error}"
        ) from error
    op.register_fake(fake)
    op.register_autograd(gradient, setup_context=save)
    return op


def _each(output: Any, change: Any) -> Any:
    """The output with every tensor changed; several outputs are a tuple, as ops return them."""
    if isinstance(output, (tuple, list)):
        return tuple(change(x) for x in output)
    return change(output)


def _schema(function: type[Any], forward: Any, takes_ctx: bool) -> str:
    """The schema that the annotations of forward give; what has none is a tensor."""
    signature = inspect.signature(forward)
    hints = typing.get_type_hints(forward)
    parameters = list(signature.parameters.values())[1 if takes_ctx else 0 :]

    def prototype() -> None: ...

    setattr(  # noqa: B010  (mypy)
        prototype,
        "__signature__",
        signature.replace(
            parameters=[p.replace(annotation=hints.get(p.name, Tensor)) for p in parameters],
            return_annotation=hints.get("return", Tensor),
        ),
    )
    try:
        return torch.library.infer_schema(prototype, mutates_args=())
    except ValueError as error:
        raise UserError(
            f"No schema can be read off {function.__qualname__}.forward{signature}: {error} Pass "
            "schema='(Tensor x, float eps) -> Tensor' to msc.wrap_function."
        ) from error
