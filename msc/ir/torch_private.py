"""Every private name of torch that MSC uses; no other module may touch one.

Private names change without notice. Each stands here with the reason why no public name will do;
`tests/test_torch_private.py` holds the rest of the source to this. Tested with torch 2.13.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any

import torch
from torch import fx, nn

# Key-value stores. torch.distributed has these names too, but its type stubs do not.
from torch._C._distributed_c10d import HashStore as HashStore
from torch._C._distributed_c10d import PrefixStore as PrefixStore
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore as TCPStore

# An op that runs a graph, such as a region under no_grad: how torch.export keeps such regions.
from torch._ops import HigherOrderOperator as HigherOrderOperator

# One overload of a torch op: what `torch.ops.msc.linear.default` is. Public only as a value.
from torch._ops import OpOverload as OpOverload

# Tensors with shape and dtype but no numbers, and the mode that makes them. torch.export takes
# them, and no public constructor exists.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode

# The store of a process group that MSC has not made; groups with a name of one's own, and where
# torch keeps what it knows of groups.
from torch.distributed.distributed_c10d import (
    Backend,
    _get_default_store,
    _get_default_timeout,
    _new_process_group_helper,
    _world,
)

# A GraphModule that generates its code when it is first run or read, and not when it is made.
from torch.fx._lazy_graph_module import _LazyGraphModule

# A mode that sees every op: what a module's initialization does to its parameters.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

LATE_IMPORTS = ("torch._functorch.aot_autograd", "torch.distributed._symmetric_memory")
"""Modules that are imported when something is compiled, which takes seconds."""


def named_group(
    members: Sequence[int], name: str, timeout: timedelta | None
) -> torch.distributed.ProcessGroup:
    """A group that its members make, under a name that they agree on; see `member_groups`.

    `torch.distributed.new_group` takes no name.
    """
    rank = torch.distributed.get_rank()
    whole: Any = torch.distributed.group.WORLD
    backend, store = _world.pg_map[whole]
    named: Any = name  # some versions have a type for it
    group, _ = _new_process_group_helper(
        len(members),
        members.index(rank),
        list(members),
        Backend(backend),
        store,
        named,
        timeout=timeout or _get_default_timeout(Backend(backend)),
        device_id=whole.bound_device_id,
    )
    assert isinstance(group, torch.distributed.ProcessGroup)  # this rank is a member
    _world.pg_group_ranks[group] = {member: place for place, member in enumerate(members)}
    return group


def symmetric_memory(
    size: int, device: torch.device, group: torch.distributed.ProcessGroup
) -> list[torch.Tensor]:
    """So many zeroed bytes of each rank of a group, in order, which all of its ranks reach.

    Collective, and for CUDA devices of one host. RuntimeError where they cannot reach each other.
    torch.distributed has no public name for it; torch 2.11 and 2.13 have the same one.
    """
    from torch.distributed import _symmetric_memory

    own = _symmetric_memory.empty(size, dtype=torch.uint8, device=device)
    handle: Any = _symmetric_memory.rendezvous(own, group)
    own.zero_()
    handle.barrier()  # on the device: nobody writes to memory that is not zeroed yet
    others = range(handle.world_size)
    return [own if r == handle.rank else handle.get_buffer(r, (size,), own.dtype) for r in others]


def is_mutable(op: OpOverload) -> bool:
    """Whether the op writes to an operand. The schema has no public accessor."""
    return bool(op._schema.is_mutable)


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tensors share if and only if they share their memory, for as long as they live.

    Tensors on meta have no address, and their storages no public identity.
    """
    return int(tensor.untyped_storage()._cdata)


@contextlib.contextmanager
def replace_truncated_normal(function: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Let `torch.nn.init.trunc_normal_` call `function(tensor, mean, std, a, b, generator=)`.

    It rejects samples, which cannot be followed without values, and does nothing on meta. Other
    modules keep `trunc_normal_` under names of their own; what it calls can be replaced for all.
    """
    module: Any = torch.nn.init
    original = module._no_grad_trunc_normal_
    module._no_grad_trunc_normal_ = function
    try:
        yield
    finally:
        module._no_grad_trunc_normal_ = original


def num_returns(op: OpOverload) -> int:
    """The number of results in the op's schema."""
    return len(op._schema.returns)


def new_fake(
    mode: FakeTensorMode,
    shape: Sequence[int],
    dtype: torch.dtype,
    stride: Sequence[int] | None = None,
) -> FakeTensor:
    """A fake tensor on the CPU, contiguous unless `stride` is given.

    Ten times cheaper than `torch.empty` under the mode, which matters at one per node.
    """
    if stride is None:
        meta = torch.empty(shape, dtype=dtype, device="meta")
    else:
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, meta, torch.device("cpu"))


def lazy_graph_module(modules: Mapping[str, nn.Module], graph: fx.Graph) -> fx.GraphModule:
    """A GraphModule whose Python code is generated when it is first run or read.

    Executors emit code of their own, so that of most graphs is never wanted, and making it would be
    a third of the time of all passes on a large model.
    """
    return _LazyGraphModule(dict[str, Any](modules), graph)


def tensor_registries(
    module: nn.Module,
) -> tuple[dict[str, nn.Parameter | None], dict[str, torch.Tensor | None]]:
    """A module's own registries of parameters and buffers: assigning to them skips every check."""
    return module._parameters, module._buffers


def is_persistent(module: nn.Module, buffer: str) -> bool:
    """Whether a module's own buffer is part of its state_dict."""
    return buffer not in module._non_persistent_buffers_set


def argument_names(op: OpOverload) -> dict[str, bool]:
    """The names of an op's arguments, each with whether it is keyword-only. Schemas are private."""
    return {argument.name: argument.kwarg_only for argument in op._schema.arguments}


def add_each(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """`left[i] + right[i]`, in one call. The foreach functions are documented but underscored."""
    return list(torch._foreach_add(list(left), list(right)))


def add_each_(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> None:
    """`left[i] += right[i]`, in one call."""
    torch._foreach_add_(list(left), list(right))


def copy_each_(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy `sources[i]` into `targets[i]`, in one call that holds no Python lock."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def version(tensor: torch.Tensor) -> int:
    """A number that every in-place write to the tensor's memory raises."""
    return int(tensor._version)


def fused_adam_(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    first_moments: list[torch.Tensor],
    second_moments: list[torch.Tensor],
    step: torch.Tensor,
    *,
    lr: float | torch.Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    decoupled: bool,
    skip: torch.Tensor | None,
) -> None:
    """One Adam (AdamW if `decoupled`) step in place by torch's fused kernel.

    `step` and `skip` are 0-dim float32 tensors; where `skip` is 1, nothing changes. All tensors
    have one device and dtype. The public `torch.optim.AdamW(fused=True)` keeps its own step
    counters and moments, so it cannot run on ours.
    """
    kernel: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    kernel(
        parameters,
        gradients,
        first_moments,
        second_moments,
        [],
        [step] * len(parameters),
        lr=lr,
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
        found_inf=skip,
    )


def fused_sgd_(
    parameters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    sums: list[torch.Tensor],
    *,
    lr: float | torch.Tensor,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    skip: torch.Tensor | None,
) -> None:
    """One SGD step in place by torch's fused kernel; `sums` are empty without momentum.

    As in `fused_adam_`, tensors have one device and dtype, and `skip` is 0-dim float32.
    """
    kernel: Any = torch._fused_sgd_
    kernel(
        parameters,
        gradients,
        sums,
        lr=lr,
        momentum=momentum,
        dampening=dampening,
        weight_decay=weight_decay,
        nesterov=nesterov,
        maximize=False,
        is_first_step=False,
        found_inf=skip,
    )


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks around `step()` are registered on an optimizer of torch."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def joint_graph(gm: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> fx.GraphModule:
    """The joint forward and backward graph of `gm`, by AOTAutograd's joint export.

    Placeholders and the output carry `meta["desc"]`; see `joint_inputs` and `joint_outputs`. The
    public torch.export has no joint form that keeps ops whole. Imported where it is used, as are
    what its inputs and outputs stand for: a rank that loads a program compiles nothing, and the
    import takes as long as that of torch.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        exported = aot_export_joint_with_descriptors(stack, gm, tuple(inputs))
    graph_module = exported.graph_module
    assert isinstance(graph_module, fx.GraphModule)
    return graph_module


def _number(desc: Any) -> int:
    """Which input or output it is: a field of all descriptors here, but not of their base class."""
    return int(desc.idx)


def joint_inputs(joint: fx.GraphModule) -> tuple[dict[int, fx.Node], dict[int, fx.Node]]:
    """Placeholders of a joint graph: by input number, and tangents by output number."""
    from torch._functorch._aot_autograd.descriptors import TangentAOTInput

    primals: dict[int, fx.Node] = {}
    tangents: dict[int, fx.Node] = {}
    for node in joint.graph.nodes:
        if node.op != "placeholder":
            continue
        desc = node.meta["desc"]
        if isinstance(desc, TangentAOTInput):
            tangents[_number(desc.output)] = node
        else:
            primals[_number(desc)] = node
    return primals, tangents


def joint_outputs(joint: fx.GraphModule) -> tuple[dict[int, Any], dict[int, Any]]:
    """Outputs of a joint graph: by output number, and gradients by input number."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTOutput

    node = joint.graph.output_node()
    outputs: dict[int, Any] = {}
    gradients: dict[int, Any] = {}
    for value, desc in zip(node.args[0], node.meta["desc"], strict=True):  # type: ignore[arg-type]
        if isinstance(desc, GradAOTOutput):
            gradients[_number(desc.grad_of)] = value
        elif isinstance(desc, PlainAOTOutput):
            outputs[desc.idx] = value
        elif desc is not None:
            raise NotImplementedError(f"a joint graph's output {desc}: a mutated input")
    return outputs, gradients


@dataclass(frozen=True)
class Argument:
    """One argument of an op's schema; `type` as the schema prints it: `Optional[Tensor]`."""

    name: str
    type: str
    default: Any


@cache
def schema_arguments(op: OpOverload) -> tuple[Argument, ...]:
    """The arguments of an op, in order. An op's schema has no public name."""
    return tuple(Argument(a.name, str(a.type), a.default_value) for a in op._schema.arguments)


def gradient_hooks(owner: nn.Module | torch.Tensor) -> bool:
    """Whether hooks on gradients are registered on a module or a tensor."""
    names = (
        "_backward_hooks",
        "_backward_pre_hooks",
        "_post_accumulate_grad_hooks",
    )
    return any(getattr(owner, name, None) for name in names)


def may_alias(op: OpOverload) -> bool:
    """Whether a result of an op may share the memory of an operand that it does not write to."""
    return any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in op._schema.returns
    )


@contextlib.contextmanager
def observe_autograd_functions(observer: Callable[[type[Any]], None]) -> Iterator[None]:
    """Call `observer(cls)` whenever a torch.autograd.Function is applied.

    `Function.apply` itself cannot be replaced: models keep it under a name of their own
    (`swish = Swish.apply`). It asks this function of its module first, with the class at hand.
    """
    module: Any = torch.autograd.function
    original = module._is_setup_context_defined

    def observed(function: Any) -> Any:
        cls = sys._getframe(1).f_locals.get("cls")
        if isinstance(cls, type):
            observer(cls)
        return original(function)

    module._is_setup_context_defined = observed
    try:
        yield
    finally:
        module._is_setup_context_defined = original


def default_store() -> Store:
    """The key-value store of the default process group, which no public function gives back."""
    return _get_default_store()


def dcp_storage_info(file: str, start: int, length: int) -> Any:
    """Where torch.distributed.checkpoint finds an item in a file. No public class says it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, start, length)
