"""What holds for every op: fake results equal real ones in strides, nothing is aliased or written,
and the plain kernels have the schemas' arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from msc.ir.communication import FUSED
from msc.ir.ops import KERNELS, arguments
from msc.ir.ops.collectives import COMMUNICATING
from msc.ir.torch_private import FakeTensorMode, OpOverload, argument_names

_msc = torch.ops.msc


@dataclass(frozen=True)
class Sample:
    """One call; `make` gives fresh operands, the same ones each time."""

    op: OpOverload
    make: Callable[[], tuple[Any, ...]]
    differentiable: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.op).split(".")[1]


def _floats(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.linspace(-1.0, 1.0, max(1, int(torch.tensor(shape).prod()))).to(dtype).view(shape)


def _swapped(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A tensor of this shape whose last two dims are transposed in memory."""
    return _floats(*shape[:-2], shape[-1], shape[-2], dtype=dtype).transpose(-1, -2)


def _heads(b: int, h: int, s: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return _floats(b, s, h, d, dtype=dtype).transpose(1, 2)


def _attention(dtype: torch.dtype = torch.float64, value_size: int = 8) -> tuple[Any, ...]:
    q, k = _heads(2, 4, 5, 8, dtype), _floats(2, 2, 6, 8, dtype=dtype)
    return q, k, _heads(2, 2, 6, value_size, dtype), None, 0.3, True


def _attention_backward() -> tuple[Any, ...]:
    q, k, v, mask, scale, causal = _attention()
    out, lse = _msc.attention(q, k, v, mask, scale, causal)
    return _floats(2, 4, 5, 8), q, k, v, out, lse, mask, scale, causal, 3


def _loss(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    return _floats(2, 3, 7, dtype=dtype), torch.tensor([[0, 6, -100], [9, 2, 3]])


def _loss_backward(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    logits, target = _loss(dtype)
    lse, _ = _msc.nll_terms(logits, target)
    return _floats(2, 3).to(lse.dtype), _floats(2, 3).to(lse.dtype), logits, target, lse


def _head(dtype: torch.dtype = torch.float64, bias: bool = False) -> tuple[Any, ...]:
    w = _swapped(7, 4, dtype=dtype)
    return _swapped(2, 3, 4, dtype=dtype), w, _floats(7, dtype=dtype) if bias else None, _labels()


def _labels() -> Tensor:
    return torch.tensor([[0, 6, -100], [9, 2, 3]])


def _head_backward(dtype: torch.dtype, wanted: list[bool]) -> tuple[Any, ...]:
    operands = _head(dtype, bias=wanted[2])
    lse, _ = _msc.linear_nll_terms(*operands)
    g = _floats(2, 3).double()
    return *operands, lse, g, -g, None, False, 0.0, wanted


def _norm_backward(dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    x, weight = _swapped(2, 3, 4, dtype=dtype), _floats(4, dtype=dtype)
    _, rstd = _msc.rms_norm(x, weight, 1e-3)
    return _floats(2, 3, 4, dtype=dtype), x, weight, rstd


def _layer_norm_backward_add() -> tuple[Any, ...]:
    x, weight, bias = _swapped(2, 3, 4), _floats(4), _floats(4)
    _, mean, rstd = torch.native_layer_norm(x, [4], weight, bias, 1e-3)
    rest = (mean, rstd, weight, bias, False, True)
    return _floats(2, 3, 4), x, [4], *rest, _swapped(2, 3, 4)


def _key() -> Tensor:
    return torch.tensor(12345)


def _start() -> Tensor:
    return torch.tensor(2)


def _ids() -> Tensor:
    return torch.tensor([[0, 3, 1], [4, 4, 2]])


bf16 = torch.bfloat16
SAMPLES = [
    Sample(_msc.linear.default, lambda: (_floats(2, 3, 4), _floats(5, 4)), (0, 1)),
    Sample(_msc.linear.default, lambda: (_swapped(2, 3, 4), _floats(5, 4), _floats(5)), (0, 1, 2)),
    Sample(_msc.linear.default, lambda: (_swapped(3, 4), _swapped(5, 4), _floats(5)), (0, 1, 2)),
    Sample(_msc.linear.default, lambda: (_swapped(2, 3, 4), _floats(4, 5), None, True), (0, 1)),
    Sample(_msc.linear.default, lambda: (_floats(4), _floats(4, 5), _floats(5), True), (0, 1, 2)),
    Sample(_msc.linear_dgrad.default, lambda: (_swapped(2, 3, 5), _floats(5, 4))),
    Sample(_msc.linear_dgrad.default, lambda: (_floats(2, 3, 5), _floats(4, 5), True)),
    Sample(_msc.linear_dgrad.default, lambda: (_floats(3, 5), _floats(5, 4), False, _floats(3, 4))),
    Sample(_msc.linear_dgrad.default, lambda: (_floats(3, 5), _floats(4, 5), True, _swapped(3, 4))),
    Sample(
        _msc.linear_epilogue.default,
        lambda: (_swapped(2, 3, 4), _floats(5, 4), _floats(5), None, "gelu", True),
    ),
    Sample(
        _msc.linear_epilogue.default,
        lambda: (_floats(3, 4), _floats(4, 5), None, _swapped(3, 5), "", False, True),
    ),
    Sample(
        _msc.linear_epilogue.default,
        lambda: (_floats(3, 4), _floats(5, 4), _floats(5), _swapped(3, 5), "relu", False),
    ),
    Sample(_msc.gated.default, lambda: (_swapped(3, 4), _floats(3, 4), "silu"), (0, 1)),
    Sample(_msc.gated_backward.default, lambda: (*[_swapped(3, 4)] * 3, "gelu")),
    Sample(
        _msc.linear_gated.default,
        lambda: (_swapped(2, 3, 4), _floats(5, 4), _floats(5, 4), "gelu_tanh", True),
    ),
    Sample(
        _msc.linear_gated.default, lambda: (_floats(3, 4), _floats(4, 6), None, "silu", True, True)
    ),
    Sample(
        _msc.linear_gated.default,
        lambda: (_floats(3, 4), _floats(5, 4), _floats(5, 4), "relu", False),
    ),
    Sample(
        _msc.add_layer_norm.default,
        lambda: (_swapped(2, 3, 4), _floats(2, 3, 4), [4], _floats(4), _floats(4), 1e-3),
    ),
    Sample(_msc.layer_norm_backward_add.default, _layer_norm_backward_add),
    Sample(_msc.add_rms_norm.default, lambda: (_floats(3, 4), _swapped(3, 4), _floats(4), 1e-3)),
    Sample(
        _msc.add_rms_norm.default,
        lambda: (*[_floats(3, 4, dtype=bf16)] * 2, _floats(4, dtype=bf16), 1e-3),
    ),
    Sample(_msc.rms_norm_backward_add.default, lambda: (*_norm_backward(), _swapped(2, 3, 4))),
    Sample(_msc.repad.default, lambda: (_floats(3, 7), 1, [3, 0, 4], [2, 2, 5]), (0,)),
    Sample(_msc.repad.default, lambda: (_swapped(5, 3), 0, [5], [6]), (0,)),
    Sample(_msc.linear_wgrad.default, lambda: (_swapped(2, 3, 5), _floats(2, 3, 4))),
    Sample(_msc.linear_wgrad.default, lambda: (_floats(2, 3, 5), _swapped(2, 3, 4), True)),
    Sample(_msc.linear_bgrad.default, lambda: (_swapped(2, 3, 5),)),
    Sample(_msc.embedding.default, lambda: (_ids(), _floats(5, 4)), (1,)),
    Sample(_msc.embedding.default, lambda: (_ids(), _swapped(2, 4), _start(), 9), (1,)),
    Sample(_msc.embedding_wgrad.default, lambda: (_floats(2, 3, 4), _ids(), None, 5, 4)),
    Sample(_msc.embedding_wgrad.default, lambda: (_swapped(2, 3, 4), _ids(), _start(), 2, 3)),
    Sample(_msc.attention.default, _attention, (0, 1, 2)),
    Sample(_msc.attention.default, lambda: _attention(value_size=6), (0, 1, 2)),
    Sample(_msc.attention.default, lambda: _attention(bf16)),
    Sample(_msc.attention_backward.default, _attention_backward),
    Sample(_msc.nll_terms.default, _loss, (0,)),
    Sample(_msc.nll_terms.default, lambda: (*_loss(bf16), _start())),
    Sample(_msc.nll_terms_backward.default, _loss_backward),
    Sample(_msc.nll_terms_backward.default, lambda: (*_loss_backward(bf16), _start())),
    Sample(_msc.linear_nll_terms.default, _head, (0, 1)),
    Sample(_msc.linear_nll_terms.default, lambda: (*_head(bias=True), _start()), (0, 1, 2)),
    Sample(
        _msc.linear_nll_terms.default,
        lambda: (_floats(3, 4), _floats(4, 5), None, _labels()[0], None, True, 2.0),
        (0, 1),
    ),
    Sample(_msc.linear_nll_terms.default, lambda: _head(bf16)),
    Sample(
        _msc.linear_nll_terms_backward.default,
        lambda: _head_backward(torch.float64, [True, True, True]),
    ),
    Sample(
        _msc.linear_nll_terms_backward.default, lambda: _head_backward(bf16, [False, True, False])
    ),
    Sample(_msc.rms_norm.default, lambda: (_swapped(2, 3, 4), _floats(4), 1e-3), (0, 1)),
    Sample(_msc.rms_norm.default, lambda: (_floats(4, dtype=bf16), _floats(4, dtype=bf16), 1e-3)),
    Sample(_msc.rms_norm_backward.default, _norm_backward),
    Sample(_msc.rms_norm_backward.default, lambda: _norm_backward(bf16)),
    Sample(_msc.rng_key.default, lambda: (torch.tensor([7, 8]), 3)),
    Sample(_msc.training_value.default, lambda: (_floats(2, 3), _floats(2, 3)), (0,)),
    Sample(_msc.dropout.default, lambda: (_floats(2, 3), 0.5, _key(), [None, None], [2, 3]), (0,)),
    Sample(
        _msc.dropout.default,
        lambda: (_swapped(2, 3), 0.5, _key(), [torch.arange(2), None], [8, 3]),
        (0,),
    ),
    Sample(_msc.dropout.default, lambda: (_floats(), 1.0, _key(), [], []), (0,)),
    Sample(
        _msc.global_coordinates.default,
        lambda: (24, [torch.tensor(1), None, torch.tensor(2)], [2, 1, 3], [3, 1, 2]),
    ),
    Sample(
        _msc.shard.default,
        lambda: (_swapped(4, 3), 0, [1, 1], "tp", 2, torch.tensor(1), "all_gather"),
    ),
    Sample(_msc.shard_pad.default, lambda: (_swapped(4, 3), 0, [3, 1], "tp", 2, torch.tensor(1))),
    Sample(_msc.logsumexp_grad.default, lambda: (_floats(2, 3), _swapped(2, 3), _floats(2, 3))),
]

every_sample = pytest.mark.parametrize("sample", SAMPLES, ids=str)


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def significant(tensor: Tensor) -> list[tuple[int, int]]:
    """Lengths and strides of the dims that have more than one index."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(length, stride) for length, stride in pairs if length > 1]


def fake_arguments(mode: FakeTensorMode, args: tuple[Any, ...]) -> list[Any]:
    def fake(value: Any) -> Any:
        if isinstance(value, Tensor):
            return mode.from_tensor(value)
        return [fake(item) for item in value] if isinstance(value, list) else value

    return [fake(value) for value in args]


@every_sample
def test_fake_result_is_the_real_one_without_numbers(sample: Sample) -> None:
    real = tensors(sample.op(*sample.make()))
    fake = tensors(sample.op(*fake_arguments(FakeTensorMode(), sample.make())))
    assert len(real) == len(fake) > 0
    for got, want in zip(fake, real, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert significant(got) == significant(want)


@every_sample
def test_results_are_contiguous_or_laid_out_by_position(sample: Sample) -> None:
    for result in tensors(sample.op(*sample.make())):
        if sample.op in (_msc.attention.default, _msc.attention_backward.default):
            result = result.transpose(1, 2)
        assert result.is_contiguous()


@every_sample
def test_operands_are_neither_written_nor_returned(sample: Sample) -> None:
    args = sample.make()
    results = tensors(sample.op(*args))
    for operand, fresh in zip(tensors(args), tensors(sample.make()), strict=True):
        assert torch.equal(operand, fresh)
        for result in results:
            assert result.untyped_storage().data_ptr() != operand.untyped_storage().data_ptr()


@every_sample
def test_plain_kernel_is_the_op(sample: Sample) -> None:
    expected = tensors(sample.op(*sample.make()))
    found = tensors(KERNELS[sample.op](*sample.make()))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_sample
def test_opcheck(sample: Sample) -> None:
    args = list(sample.make())
    for position in sample.differentiable:
        args[position] = args[position].detach().requires_grad_()
    torch.library.opcheck(sample.op, tuple(args))


@pytest.mark.parametrize("sample", [sample for sample in SAMPLES if sample.differentiable], ids=str)
def test_gradients_are_those_of_finite_differences(sample: Sample) -> None:
    args = list(sample.make())
    for position in sample.differentiable:
        args[position] = args[position].detach().clone().requires_grad_()
    variables = [args[position] for position in sample.differentiable]

    def function(*values: Tensor) -> tuple[Tensor, ...]:
        call = list(args)
        for position, value in zip(sample.differentiable, values, strict=True):
            call[position] = value
        results = tensors(sample.op(*call))
        return tuple(result for result in results if result.requires_grad)

    # linspace repeats no value, so that no gradient is hidden by symmetry.
    assert torch.autograd.gradcheck(function, variables)


@pytest.mark.parametrize("op", KERNELS, ids=str)
def test_kernel_has_the_arguments_of_the_schema(op: OpOverload) -> None:
    parameters = inspect.signature(KERNELS[op]).parameters
    assert list(parameters) == list(argument_names(op))
    for argument in op._schema.arguments:
        default = (
            argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        )
        assert parameters[argument.name].default == default


def test_every_op_has_a_sample_or_communicates() -> None:
    assert {sample.op for sample in SAMPLES} | set(COMMUNICATING) | set(FUSED) == set(KERNELS)


def test_arguments_fill_in_defaults() -> None:
    assert arguments(_msc.linear.default, ("x", "w"), {}) == {
        "x": "x",
        "w": "w",
        "b": None,
        "transposed": False,
    }
    with pytest.raises(TypeError):
        arguments(_msc.linear.default, ("x",), {})


def test_largest_shapes_need_no_memory() -> None:
    """The layer of a 175B model at a batch of 1536 x 2048 tokens, forward and backward."""
    with FakeTensorMode():
        x = torch.empty(1536, 2048, 12288, dtype=bf16, requires_grad=True)
        w = torch.empty(3 * 12288, 12288, dtype=bf16, requires_grad=True)
        qkv = _msc.linear(x, w).view(1536, 2048, 3, 96, 128).transpose(1, 3)
        out, _ = _msc.attention(*qkv.unbind(2), None, 0.1, True, 512)
        key = _msc.rng_key(torch.zeros(2, dtype=torch.int64), 0)
        out = _msc.dropout(out.transpose(1, 2).reshape(x.shape), 0.1, key, [None] * 3, x.shape)
        head = torch.empty(50257, 12288, dtype=bf16, requires_grad=True)
        target = torch.zeros(1536, 2048, dtype=torch.int64)
        lse, target_logit = _msc.nll_terms(_msc.linear(out, head), target)
        (lse - target_logit).sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert head.grad is not None
    assert head.grad.shape == head.shape
