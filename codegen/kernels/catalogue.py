"""Every kernel at the shapes that matter: one layer of GPT-3 175B, Llama 3 70B and 405B at tp 8.

`make kernels` compiles all of them for each target. The tiles (`tiles.py`) are such as pass: no
spills, within shared memory, on Hopper with wgmma. Which are fast only a device can tell.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from msc.codegen.kernels import (
    attention_backward,
    attention_forward,
    column_sums,
    cross_entropy,
    dropout,
    gate,
    gather_gemm,
    gather_weight_gradient,
    gemm,
    gemm_scatter,
    linear_cross_entropy,
    norm,
    optimizer,
)
from msc.codegen.kernels.attention import Attention
from msc.codegen.kernels.cross_entropy import CrossEntropy
from msc.codegen.kernels.description import Kernel, Target, Tiles, ceil_div
from msc.codegen.kernels.dropout import Dropout
from msc.codegen.kernels.epilogue import Epilogue
from msc.codegen.kernels.gate import Gate
from msc.codegen.kernels.gather_gemm import GatherGemm
from msc.codegen.kernels.gather_weight_gradient import GatherWeightGradient
from msc.codegen.kernels.gemm import Gemm
from msc.codegen.kernels.gemm_scatter import GemmScatter
from msc.codegen.kernels.linear_cross_entropy import LinearCrossEntropy
from msc.codegen.kernels.norm import Norm
from msc.codegen.kernels.optimizer import PIECE, Moments
from msc.codegen.kernels.protocol import splits_for
from msc.codegen.kernels.tiles import (
    attention_tiles,
    epilogue_tiles,
    gated_tiles,
    gemm_tiles,
    scatter_tiles,
    several_tiles,
)

TP = 8
TOKENS = 8192
DTYPE = "bfloat16"


@dataclass(frozen=True)
class Model:
    """Sizes of one layer, whole; gated: the MLP has a gate (SwiGLU)."""

    name: str
    hidden: int
    wide: int
    heads: int
    groups: int
    vocabulary: int
    gated: bool
    norm: str

    @property
    def head_size(self) -> int:
        """Elements of a head."""
        return self.hidden // self.heads

    @property
    def qkv(self) -> int:
        """Columns of query, key and value on one rank."""
        return (self.heads + 2 * self.groups) * self.head_size // TP


GPT3_175B = Model("gpt3-175b", 12288, 4 * 12288, 96, 96, 51200, False, "layer")
LLAMA3_70B = Model("llama3-70b", 8192, 28672, 64, 8, 128256, True, "rms")
LLAMA3_405B = Model("llama3-405b", 16384, 53248, 128, 8, 128256, True, "rms")
MODELS = (GPT3_175B, LLAMA3_70B, LLAMA3_405B)


def kernels(target: Target) -> list[Kernel]:
    """All of them, each name once."""
    found: dict[str, Kernel] = {}
    for model in MODELS:
        for kernel in (
            *products(model, target),
            *fused(model, target),
            *attentions(model, target),
            *row_kernels(model, target),
        ):
            found.setdefault(kernel.name, kernel)
    for kernel in optimizers(target):
        found.setdefault(kernel.name, kernel)
    return list(found.values())


def products(model: Model, target: Target) -> Iterator[Kernel]:
    """Forward, input gradient and weight gradient of the first linear of the MLP, unfused."""
    wide, hidden = model.wide // TP, model.hidden
    plain = gemm_tiles(target)
    activation, tiles = _activation(model, target)
    yield gemm.emit(Gemm(TOKENS, wide, hidden, DTYPE, target, plain))
    yield gemm.emit(Gemm(TOKENS, wide, hidden, DTYPE, target, tiles, epilogue=activation))
    if model.gated:
        apart = replace(activation, apart=True)
        yield gemm.emit(Gemm(TOKENS, wide, hidden, DTYPE, target, tiles, epilogue=apart))
    residual = Epilogue(bias=True, residual=True)
    tiles = epilogue_tiles(target)
    yield gemm.emit(Gemm(TOKENS, hidden, wide, DTYPE, target, tiles, epilogue=residual))
    yield gemm.emit(Gemm(TOKENS, hidden, wide, DTYPE, target, plain, b_layout="kn"))
    yield gemm.emit(Gemm(wide, hidden, TOKENS, DTYPE, target, plain, "km", "kn"))


def fused(model: Model, target: Target) -> Iterator[Kernel]:
    """Both linears of the MLP and of attention, each in its three directions."""
    wide, hidden, heads = model.wide // TP, model.hidden, model.hidden // TP
    plain, many = gemm_tiles(target), scatter_tiles(target)
    several = (heads, model.groups * model.head_size // TP, model.groups * model.head_size // TP)
    yield gather_gemm.emit(_gather(hidden, (model.qkv,), target, plain))
    yield gather_gemm.emit(_gather(hidden, several, target, several_tiles(target)))
    activation, tiles = _activation(model, target)
    yield gather_gemm.emit(_gather(hidden, (wide,), target, plain))
    yield gather_gemm.emit(_gather(hidden, (wide,), target, tiles, epilogue=activation))
    # input gradient of the row-parallel linears: the gradient is gathered
    yield gather_gemm.emit(_gather(hidden, (wide,), target, plain, b_layout="kn"))
    yield gather_gemm.emit(_gather(hidden, (heads,), target, plain, b_layout="kn"))
    # forward of the row-parallel linears, input gradient of the column-parallel ones
    for k, layout in ((wide, "nk"), (heads, "nk"), (wide, "kn"), (model.qkv, "kn")):
        scatter = GemmScatter(TOKENS, hidden, k, TP, DTYPE, target, many, b_layout=layout)
        yield gemm_scatter.emit(scatter)
        yield gemm_scatter.emit_sum(scatter)
    for gathered, n, k in (("x", wide, hidden), ("dy", hidden, wide), ("x", model.qkv, hidden)):
        yield gather_weight_gradient.emit(
            GatherWeightGradient(TOKENS, n, k, gathered, TP, DTYPE, target, plain)
        )


def _activation(model: Model, target: Target) -> tuple[Epilogue, Tiles]:
    """What follows the first linear of the MLP, and its tiles."""
    if model.gated:
        return Epilogue(activation="swiglu", keep=True), gated_tiles(target)
    return Epilogue(bias=True, activation="gelu_tanh", keep=True), epilogue_tiles(target)


def _gather(
    k: int,
    widths: tuple[int, ...],
    target: Target,
    tiles: Tiles,
    b_layout: str = "nk",
    epilogue: Epilogue | None = None,
) -> GatherGemm:
    chunk = TOKENS // TP
    count = TP * ceil_div(chunk, tiles.m) * sum(ceil_div(width, tiles.n) for width in widths)
    splits = splits_for(count, target.processors, chunk)
    own = epilogue or Epilogue()
    return GatherGemm(TOKENS, k, widths, TP, DTYPE, target, tiles, b_layout, splits, own)


def attentions(model: Model, target: Target) -> Iterator[Kernel]:
    """Causal, with a window, with a soft cap and with documents; forward and backward."""
    heads, groups = model.heads // TP, model.groups // TP
    size = (1, TOKENS, heads, groups, model.head_size, DTYPE, target, model.head_size**-0.5)
    variants = [Attention(*size)]
    if model is GPT3_175B:
        variants += [
            Attention(*size, causal=False),
            Attention(*size, window=1024),
            Attention(*size, soft_cap=50.0),
            Attention(*size, documents=True),
        ]
    for attention in variants:
        tiles = attention_tiles(attention)
        yield attention_forward.emit(attention, tiles.forward)
        yield attention_backward.emit_delta(attention, tiles.delta)
        yield attention_backward.emit_keys(attention, tiles.keys)
        yield attention_backward.emit_queries(attention, tiles.queries)


def row_kernels(model: Model, target: Target) -> Iterator[Kernel]:
    """Norms, gates, cross entropy (alone and with the head before it) and dropout."""
    for residual in (False, True):
        own = Norm(model.norm, TOKENS, model.hidden, DTYPE, target, residual=residual)
        yield norm.emit_forward(own)
        yield norm.emit_backward(own)
        if not own.sums_in_backward:
            yield norm.emit_weight_gradient(own)
        yield column_sums.emit(own.programs, model.hidden, DTYPE, target)
    loss = CrossEntropy(TOKENS, model.vocabulary // TP, DTYPE, target)
    yield cross_entropy.emit_terms(loss)
    yield cross_entropy.emit_gradient(loss)
    yield from heads(model, loss.width, target)
    if model.gated:
        own_gate = Gate(TOKENS, model.wide // TP, "silu", DTYPE, target)
        yield gate.emit_forward(own_gate)
        yield gate.emit_backward(own_gate)
    for whole in (True, False):
        yield dropout.emit(Dropout(TOKENS, model.hidden, 0.1, DTYPE, target, whole))


def heads(model: Model, width: int, target: Target) -> Iterator[Kernel]:
    """The head with its loss: terms, gradient of logits, and the sum of parts of that of x."""
    size = (TOKENS, width, model.hidden, DTYPE, target, scatter_tiles(target))
    head = LinearCrossEntropy(*size)
    yield linear_cross_entropy.emit_terms(head)
    yield linear_cross_entropy.emit_combine(head)
    yield linear_cross_entropy.emit_gradient(head)
    added, tiles = Epilogue(residual=True), epilogue_tiles(target)
    total = Gemm(TOKENS, model.hidden, width, DTYPE, target, tiles, "mk", "kn", added, "float32")
    yield gemm.emit(total)
    if model is LLAMA3_70B:
        capped = LinearCrossEntropy(*size, soft_cap=30.0)
        yield linear_cross_entropy.emit_terms(capped)
        yield linear_cross_entropy.emit_gradient(capped)


def optimizers(target: Target) -> Iterator[Kernel]:
    """AdamW and LAMB of a layer's tensors."""
    size = GPT3_175B.hidden * GPT3_175B.wide // TP
    for dtype, gradients in ((DTYPE, DTYPE), ("float32", "float32"), (DTYPE, "float32")):
        pieces = 4 * ceil_div(size, PIECE)
        moments = Moments(4, pieces, dtype, gradients, target, (0.9, 0.95), 1e-8, 0.1)
        yield optimizer.emit_adam(moments)
        yield optimizer.emit_lamb_moments(moments)
        yield optimizer.emit_lamb_norms(moments)
        yield optimizer.emit_lamb_step(moments)
