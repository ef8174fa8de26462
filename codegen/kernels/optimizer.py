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

from msc.codegen.kernels.description import Argument, Kernel, Target, signature
from msc.codegen.kernels.dtypes import check_dtype, short
from msc.codegen.kernels.source import fill, module

PIECE = 2048

# What a program works on, and the step's numbers. Whole pieces need no mask, and without one loads
# and stores are as wide as the hardware has them; the last piece of a tensor goes the other way.
_PLACE = """
piece = tl.program_id(0)
tensor = tl.load(tensors + piece)
start = tl.multiple_of(tl.load(starts + piece), 16)
at = start + tl.arange(0, PIECE)
length = tl.load(lengths + tensor)
rate = tl.load(scalars)
over_first = tl.load(scalars + 1)
over_second = tl.load(scalars + 2)
grown = tl.load(scalars + 3)
skip = tl.load(scalars + 4)
<<addresses>>
if start + PIECE <= length:
    <<whole>>
else:
    inside = at < length
    <<rest>>
"""

_ADDRESS = """
$name = tl.load($table + tensor).to(tl.pointer_type(tl.$dtype))
$name = tl.multiple_of($name, 16) + at
"""

_STATE = """
value = tl.load(parameter_at$load).to(tl.float32)
first = tl.load(first_at$load)
second = tl.load(second_at$load)
"""

_MOMENTS = """
gradient = tl.load(gradient_at$load).to(tl.float32) * grown
<<decay>>
first = BETA_1 * first + (1.0 - BETA_1) * gradient
second = BETA_2 * second + (1.0 - BETA_2) * gradient * gradient
tl.store(first_at, first$store)
tl.store(second_at, second$store)
"""

_UPDATE = "update = first * over_first / (tl.sqrt(second * over_second) + EPS)"

_HEAD = """
@triton.jit$options
def $name($arguments):
    <<body>>
"""

_ADAM = """
if skip == 0.0:
    <<state>>
    <<moments>>
    <<update>>
    <<shrink>>
    tl.store(parameter_at, (value - rate * update).to(tl.$dtype)$store)
"""

_LAMB_MOMENTS = """
<<state>>
if skip == 0.0:
    <<moments>>
<<update>>
update += DECAY * value
<<clear>>
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

_LAMB_STEP = """
if skip == 0.0:
    <<state>>
    <<update>>
    update += DECAY * value
    of_value = tl.sqrt(tl.load(norms + tensor))
    of_update = tl.sqrt(tl.load(norms + count + tensor))
    exist = (of_value > 0.0) & (of_update > 0.0)
    trust = tl.where(exist, of_value / tl.where(exist, of_update, 1.0), 1.0).to(tl.float32)
    tl.store(parameter_at, (value - rate * trust * update).to(tl.$dtype)$store)
"""


@dataclass(frozen=True)
class Moments:
    """What Adam and LAMB share. Moments are float32; gradients may have another dtype.

    pieces: over all tensors. decoupled: weight decay is not part of the gradient (AdamW).
    Addresses are multiples of 16 bytes. scalars: float32 [5]: learning rate,
    1 / (1 - beta1^step), 1 / (1 - beta2^step), a factor of the gradients, and 1 to skip the step,
    else 0.
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
    return _kernel(moments, "adam", _ADAM, (), decay=decay, shrink=shrink)


def emit_lamb_moments(moments: Moments) -> Kernel:
    """Moves the moments; squares: float32 [pieces, 2] of parameters and updates."""
    squares = Argument("squares", "pointer", "float32")
    return _kernel(moments, "lamb_moments", _LAMB_MOMENTS, (squares,))


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
    return _kernel(moments, "lamb_step", _LAMB_STEP, rest)


def _kernel(
    moments: Moments,
    entry: str,
    template: str,
    rest: tuple[Argument, ...],
    decay: str = "",
    shrink: str = "",
) -> Kernel:
    addresses = {
        "parameters": ("parameter_at", moments.dtype),
        "gradients": ("gradient_at", moments.gradient_dtype),
        "firsts": ("first_at", "float32"),
        "seconds": ("second_at", "float32"),
    }
    if "<<moments>>" not in template:
        del addresses["gradients"]
    arguments = (
        *(Argument(name, "table") for name in addresses),
        Argument("lengths", "pointer", "int64"),
        Argument("tensors", "pointer", "int32"),
        Argument("starts", "pointer", "int64"),
        Argument("scalars", "pointer", "float32"),
        *rest,
    )
    found = [
        fill(_ADDRESS, name=name, table=table, dtype=dtype)
        for table, (name, dtype) in addresses.items()
    ]
    body = fill(
        _PLACE,
        addresses="\n".join(found),
        whole=_body(template, moments, False, decay, shrink),
        rest=_body(template, moments, True, decay, shrink),
    )
    text = fill(
        _HEAD,
        options='(do_not_specialize=["count"])' if entry == "lamb_step" else "",
        name=entry,
        arguments=signature(arguments),
        body=body,
    )
    return Kernel(
        f"{entry}_{moments.label}",
        module(f"{entry} of {moments.tensors} tensors.", moments.constants, text),
        entry,
        arguments,
        (moments.pieces,),
        moments.target,
        8,
        1,
    )


def _body(template: str, moments: Moments, masked: bool, decay: str, shrink: str) -> str:
    load, store = (", mask=inside, other=0.0", ", mask=inside") if masked else ("", "")
    return fill(
        template,
        dtype=moments.dtype,
        store=store,
        state=fill(_STATE, load=load),
        moments=fill(_MOMENTS, load=load, store=store, decay=decay),
        update=_UPDATE,
        clear="update = tl.where(inside, update, 0.0)" if masked else "",
        shrink=shrink,
    )
