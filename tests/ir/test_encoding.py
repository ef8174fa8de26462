"""Values as JSON and back: nothing is lost, and what cannot be written is refused."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from msc.ir.encoding import Decoder, encode
from msc.ir.placement import Partial, Replicate, Shard
from msc.ir.torch_private import FakeTensor, FakeTensorMode, new_fake

MODE = FakeTensorMode()
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn)


def round_trip(value: Any, decoder: Decoder | None = None) -> Any:
    text = json.dumps(encode(value), allow_nan=False)
    return (decoder or Decoder()).decode(json.loads(text), {})


PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.sampled_from((Partial("sum"), Partial("max"), Partial("logsumexp"))),
    st.builds(
        Shard,
        st.integers(-1, 4),
        st.integers(1, 9) | st.lists(st.integers(1, 9), min_size=1).map(tuple),
    ),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.complex_numbers(),
    PLACEMENTS,
    st.sampled_from(DTYPES),
    st.sampled_from((torch.strided, torch.contiguous_format, torch.preserve_format)),
    st.sampled_from((torch.device("cpu"), torch.device("cuda", 3), torch.device("meta"))),
    st.builds(slice, st.none() | st.integers(), st.none() | st.integers()),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(st.text() | st.integers() | st.sampled_from(DTYPES), inner),
    ),
    max_leaves=12,
)


@given(VALUES)
def test_a_value_comes_back_the_same(value: Any) -> None:
    # The text tells 1 from True and 1.0, -0.0 from 0.0, (1,) from [1], and shows the order of keys.
    assert repr(round_trip(value)) == repr(value)


@given(
    st.lists(st.integers(0, 5), max_size=4),
    st.sampled_from(DTYPES),
    st.randoms(use_true_random=False),
)
def test_a_fake_tensor_keeps_shape_stride_and_dtype(
    shape: list[int], dtype: torch.dtype, random: Any
) -> None:
    order = list(range(len(shape)))
    random.shuffle(order)
    tensor = new_fake(MODE, shape, dtype).permute(order)
    decoder = Decoder()
    found = round_trip(tensor, decoder)
    assert isinstance(found, FakeTensor)
    assert (found.shape, found.stride(), found.dtype) == (tensor.shape, tensor.stride(), dtype)
    assert found.device == torch.device("cpu")
    assert found.fake_mode is decoder.mode


def test_a_size_comes_back_as_a_tuple() -> None:
    assert repr(round_trip(torch.Size([2, 3]))) == "(2, 3)"


def symbolic() -> torch.Tensor:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=False)
    return mode.from_tensor(torch.empty(4, 8))


REFUSED = {
    "a set": ({1}, "a value of type builtins.set cannot be saved"),
    "a function": (print, "a value of type builtins.builtin_function_or_method cannot be saved"),
    "a numpy number": (np.float64(1.0), "a value of type numpy.float64 cannot be saved"),
    "numbers": (torch.zeros(2, 3), "a tensor with numbers, of shape (2, 3), cannot be saved"),
    "deep inside": ([({"a": object()},)], "a value of type builtins.object cannot be saved"),
    "symbolic": (symbolic(), "a tensor of symbolic shape (s"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_written_is_refused(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(TypeError) as error:
        encode(value)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("data", [{"x": 1}, {"torch": "nn"}, {"T": "f32(2)"}])
def test_what_encode_never_writes_is_refused(data: Any) -> None:
    with pytest.raises(ValueError, match=r"is no value|is not the type of a tensor"):
        Decoder().decode(data, {})
