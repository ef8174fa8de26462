"""The dtypes that kernels compute on, and their names."""

from __future__ import annotations

from msc.ir.errors import PlanError

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
"""Triton's names of the dtypes that kernels compute on, as they stand in signatures."""


def check_dtype(op: str, dtype: str) -> None:
    """PlanError if kernels do not compute on `dtype`."""
    if dtype not in BYTES:
        raise PlanError(
            f"{op}: no kernel computes on {dtype}; there are kernels for {', '.join(BYTES)}. "
            "ATen's own op takes every dtype."
        )


def short(dtype: str) -> str:
    """The dtype as it is named in a kernel's name: `bf16`."""
    return _SHORT[dtype]


def on_tensor_cores(dtype: str) -> bool:
    """Whether products of this dtype belong on tensor cores, which would round float32."""
    return dtype != "float32"
