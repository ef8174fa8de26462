"""AdamW and LAMB of many tensors in one launch.

A table has the address of every tensor, another says which piece of which tensor a program works
on, so that neither the number nor the sizes of the tensors need a launch of their own. Numbers that
change from step to step are read from memory, so that a CUDA graph may hold the launch.

LAMB (You et al., ICLR 2020) needs norms of whole tensors. Its first kernel writes squared norms of
pieces, a second adds up those of a tensor in order, and after the ranks have summed them, the third
takes the step.
"""

from __future__ import annotations

from dataclasses import dataclass

from msc.codegen.kernels.description import Argument, Kernel, Target, check_dtype
from msc.codegen.kernels.product import short
from msc.codegen.kernels.source import fill, module

PIECE = 4096

# what a program works on, and the step's numbers
_PLACE = """
piece = tl.program_id(0)
tensor = tl.load(tensors + piece)
at = tl.load(starts + piece) + tl.arange(0, PIECE)
inside = at < tl.load(lengths + tensor)
rate = tl.load(scalars)
over_first = tl.load(scalars + 1)
over_second = tl.load(scalars + 2)
grown = tl.load(scalars + 3)
skip = tl.load(scalars + 4)
"""

_STATE = """
parameter_at = tl.load(parameters + tensor).to(tl.pointer_type(tl.$dtype)) + at
first_at = tl.load(firsts + tensor).to(tl.pointer_type(tl.float32)) + at
second_at = tl.load(seconds + tensor).to(tl.pointer_type(tl.float32)) + at
value = tl.load(parameter_at, mask=inside, other=0.0).to(tl.float32)
first = tl.load(first_at, mask=inside, other=0.0)
second = tl.load(second_at, mask=inside, other=0.0)
"""

_MOMENTS = """
gradient_at = tl.load(gradients + tensor).to(tl.pointer_type(tl.$gradient_dtype)) + at
gradient = tl.load(gradient_at, mask=inside, other=0.0).to(tl.float32) * grown
<<decay>>
first = BETA_1 * first + (1.0 - BETA_1) * gradient
second = BETA_2 * second + (1.0 - BETA_2) * gradient * gradient
tl.store(first_at, first, mask=inside)
tl.store(second_at, second, mask=inside)
"""

_UPDATE = "update = first * over_first / (tl.sqrt(second * over_second) + EPS)"

ADAM = """
@triton.jit
def adam(parameters, gradients, firsts, seconds, lengths, tensors, starts, scalars):
    <<place>>
    if skip == 0.0:
        <<state>>
        <<moments>>
        <<update>>
        <<shrink>>
        tl.store(parameter_at, (value - rate * update).to(tl.$dtype), mask=inside)
"""

LAMB_MOMENTS = """
@triton.jit
def lamb_moments(
    parameters, gradients, firsts, seconds, lengths, tensors, starts, scalars, squares
):
    <<place>>
    <<state>>
    if skip == 0.0:
        <<moments>>
    <<update>>
    update += DECAY * value
    update = tl.where(inside, update, 0.0)
    tl.store(squares + 2 * piece, tl.sum(value * value, axis=0))
    tl.store(squares + 2 * piece + 1, tl.sum(update * update, axis=0))
"""

LAMB_NORMS = """
@triton.jit
def lamb_norms(squares, ends, norms):
    # of tensor t: the squared norms of its pieces, in their order
    tensor = tl.program_id(0)
    side = tl.program_id(1)
    total = tl.zeros((1,), tl.float64)
    for piece in range(tl.load(ends + tensor), tl.load(ends + tensor + 1)):
        total += tl.load(squares + 2 * piece + side).to(tl.float64)
    tl.store(norms + side * tl.num_programs(0) + tensor + tl.arange(0, 1), total)
"""

LAMB_STEP = """
@triton.jit(do_not_specialize=["count"])
def lamb_step(parameters, firsts, seconds, lengths, tensors, starts, scalars, norms, count):
    <<place>>
    if skip == 0.0:
        <<state>>
        <<update>>
        update += DECAY * value
        of_value = tl.sqrt(tl.load(norms + tensor))
        of_update = tl.sqrt(tl.load(norms + count + tensor))
        exist = (of_value > 0.0) & (of_update > 0.0)
        trust = tl.where(exist, of_value / tl.where(exist, of_update, 1.0), 1.0).to(tl.float32)
        tl.store(parameter_at, (value - rate * trust * update).to(tl.$dtype), mask=inside)
"""


@dataclass(frozen=True)
class Moments:
    """What Adam and LAMB share. Moments are float32; gradients may have another dtype.

    pieces: over all tensors. decoupled: weight decay is not part of the gradient (AdamW).
    scalars: float32 [5]: learning rate, 1 / (1 - beta1^step), 1 / (1 - beta2^step), a factor of the
    gradients, and 1 to skip the step, else 0.
    """

    tensors: int
    pieces: int
    dtype: str
    gradient_dtype: str
    target: Target
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool = True

    def __post_init__(self) -> None:
        for dtype in (self.dtype, self.gradient_dtype):
            check_dtype("optimizer", dtype)

    @property
    def label(self) -> str:
        """Its part of a kernel's name."""
        return f"{self.tensors}_{short(self.dtype)}_{short(self.gradient_dtype)}"

    @property
    def constants(self) -> dict[str, int | float]:
        """Named constants of all kernels."""
        return {
            "PIECE": PIECE,
            "BETA_1": self.betas[0],
            "BETA_2": self.betas[1],
            "EPS": self.eps,
            "DECAY": self.weight_decay,
        }


def emit_adam(moments: Moments) -> Kernel:
    """AdamW, or Adam where the decay is not decoupled."""
    decay = "" if moments.decoupled else "gradient += DECAY * value"
    shrink = "value = value * (1.0 - rate * DECAY)" if moments.decoupled else ""
    text = _filled(ADAM, moments, decay=decay, shrink=shrink)
    tables = ("parameters", "gradients", "firsts", "seconds")
    return _kernel(moments, "adam", text, tables, ())


def emit_lamb_moments(moments: Moments) -> Kernel:
    """Moves the moments; squares: float32 [pieces, 2] of parameters and updates."""
    tables = ("parameters", "gradients", "firsts", "seconds")
    squares = Argument("squares", "pointer", "float32")
    return _kernel(moments, "lamb_moments", _filled(LAMB_MOMENTS, moments), tables, (squares,))


def emit_lamb_norms(moments: Moments) -> Kernel:
    """norms: float64 [2, tensors]; ends: int32 [tensors + 1], where each tensor's pieces begin."""
    return Kernel(
        f"lamb_norms_{moments.tensors}",
        module("Squared norms of tensors from those of their pieces.", {}, LAMB_NORMS),
        "lamb_norms",
        (
            Argument("squares", "pointer", "float32"),
            Argument("ends", "pointer", "int32"),
            Argument("norms", "pointer", "float64"),
        ),
        (moments.tensors, 2),
        moments.target,
        1,
        1,
    )


def emit_lamb_step(moments: Moments) -> Kernel:
    """The step, from the squared norms of whole tensors."""
    rest = (Argument("norms", "pointer", "float64"), Argument("count", "int32"))
    tables = ("parameters", "firsts", "seconds")
    return _kernel(moments, "lamb_step", _filled(LAMB_STEP, moments), tables, rest)


def _filled(template: str, moments: Moments, decay: str = "", shrink: str = "") -> str:
    return fill(
        template,
        dtype=moments.dtype,
        place=_PLACE,
        state=fill(_STATE, dtype=moments.dtype),
        moments=fill(_MOMENTS, gradient_dtype=moments.gradient_dtype, decay=decay),
        update=_UPDATE,
        shrink=shrink,
    )


def _kernel(
    moments: Moments,
    entry: str,
    text: str,
    tables: tuple[str, ...],
    rest: tuple[Argument, ...],
) -> Kernel:
    return Kernel(
        f"{entry}_{moments.label}",
        module(f"{entry} of {moments.tensors} tensors.", moments.constants, text),
        entry,
        (
            *(Argument(name, "table") for name in tables),
            Argument("lengths", "pointer", "int64"),
            Argument("tensors", "pointer", "int32"),
            Argument("starts", "pointer", "int64"),
            Argument("scalars", "pointer", "float32"),
            *rest,
        ),
        (moments.pieces,),
        moments.target,
        8,
        1,
    )
