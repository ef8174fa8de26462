"""`msc.nll_terms` and its gradient: the terms of cross entropy on a part of the vocabulary.

What the forward keeps is the op's own result: the logsumexp in float64.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from msc.codegen.kernel_calls.call import Launches, Plan, dense, name_of, rows
from msc.codegen.kernels import cross_entropy
from msc.codegen.kernels.cross_entropy import CrossEntropy
from msc.codegen.kernels.description import Target
from msc.ir.errors import PlanError


def nll_terms(target: Target, logits: Tensor, labels: Tensor, start: Tensor | None = None) -> Plan:
    """lse and target_logit, float64 `[...]`."""
    kernel = cross_entropy.emit_terms(_loss(target, logits))

    def run(
        logits: Tensor, labels: Tensor, start: Tensor | None = None
    ) -> tuple[Launches, tuple[Tensor, Tensor]]:
        lse, found = (logits.new_empty(labels.shape, dtype=torch.float64) for _ in range(2))
        values = _operands(logits, labels, start) | {"lse": lse, "target_logit": found}
        return [(kernel, values)], (lse, found)

    return Plan((kernel,), run)


def nll_terms_backward(
    target: Target,
    glse: Tensor,
    gtarget: Tensor,
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    start: Tensor | None = None,
) -> Plan:
    """The gradient of the logits."""
    kernel = cross_entropy.emit_gradient(_loss(target, logits))

    def run(
        glse: Tensor,
        gtarget: Tensor,
        logits: Tensor,
        labels: Tensor,
        lse: Tensor,
        start: Tensor | None = None,
    ) -> tuple[Launches, Tensor]:
        gradient = logits.new_empty(logits.shape)
        values = _operands(logits, labels, start)
        values |= {"lse": dense(lse), "g_lse": dense(glse), "g_target": dense(gtarget)}
        return [(kernel, values | {"gradient": gradient})], gradient

    return Plan((kernel,), run)


def _loss(target: Target, logits: Tensor) -> CrossEntropy:
    if not logits.numel():
        raise PlanError("cross entropy: there are no logits")
    width = logits.shape[-1]
    return CrossEntropy(logits.numel() // width, width, name_of(logits.dtype), target)


def _operands(logits: Tensor, labels: Tensor, start: Tensor | None) -> dict[str, Any]:
    # `start` follows from a rank's coordinate, which is on the CPU: to read it waits for nothing
    first = 0 if start is None else int(start)
    return {"logits": rows(logits), "target": dense(labels), "start": first}
