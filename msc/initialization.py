"""`msc.init`: initial values for a model on `meta`, drawn by each rank for its own shards.

The modules' own initialization runs on the meta tensors, which costs nothing, and what it does to
them is recorded: `weight.uniform_(-0.1, 0.1)`, `weight[0].zero_()`. A rank repeats that for the
elements that it holds, with random numbers keyed by seed, name and element.
"""

from __future__ import annotations

import fnmatch
import hashlib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from msc.capture.captured import has_values
from msc.initialization_recorder import Recorder, Target, recording
from msc.initializers import Initializer, Values
from msc.ir.draws import Draw, Step
from msc.ir.encoding import Decoder, encode
from msc.ir.errors import UserError
from msc.ir.torch_private import storage_key

_ATTRIBUTE = "_msc_recipe"
_RESETS = ("reset_parameters", "_reset_parameters")
_CUSTOM = "_init_weights"
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Recipe:
    """Initial values of a model on `meta`; it holds no random number, so it takes no memory.

    draws: by every name of a tensor; constants: values that the initialization has computed, such
    as rotary frequencies; missing: buffers of which nothing is known, and why.
    """

    seed: int
    draws: Mapping[str, Draw]
    constants: Mapping[str, Tensor] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Recipe(seed={self.seed}, {len(self.draws)} drawn, {len(self.constants)} constant)"

    def __contains__(self, name: object) -> bool:
        return name in self.draws or name in self.constants

    def whole(self, name: str) -> Tensor | None:
        """The whole tensor of a name; None if the recipe does not have it."""
        if name in self.constants:
            return self.constants[name].clone()
        return self.draws[name].whole(self.seed) if name in self.draws else None

    def part(self, name: str, held: Sequence[Tensor]) -> Tensor:
        """The elements with the indices `held[d]` of each dim; memory for those alone."""
        if name in self.draws:
            return self.draws[name].part(self.seed, held)
        value = self.constants[name]
        for dim, indices in enumerate(held):
            value = value.index_select(dim, indices)
        return value.clone()

    def only(self, names: Collection[str]) -> Recipe:
        """The recipe of some names; what is missing stays known."""
        draws = {name: self.draws[name] for name in sorted(names) if name in self.draws}
        constants = {name: self.constants[name] for name in names if name in self.constants}
        return Recipe(self.seed, draws, constants, self.missing)

    @property
    def digest(self) -> str:
        """A digest of seed, steps and constants: equal for ranks that will draw equal values."""
        digest = hashlib.blake2b(json.dumps(self.to_json()).encode(), digest_size=16)
        for name, value in sorted(self.constants.items()):
            digest.update(name.encode())
            digest.update(value.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def to_json(self) -> dict[str, Any]:
        """Seed and draws as plain data; the constants are tensors, and stay out."""
        draws = {
            name: {
                "name": draw.name,
                "shape": list(draw.shape),
                "dtype": encode(draw.dtype),
                "steps": [
                    [encode(value) for value in asdict(step).values()] for step in draw.steps
                ],
            }
            for name, draw in self.draws.items()
        }
        return {"seed": self.seed, "draws": draws}


def recipe_from_json(data: Mapping[str, Any]) -> Recipe:
    """What `Recipe.to_json` wrote, without constants."""
    decoder = Decoder()

    def decode(value: Any) -> Any:
        return decoder.decode(value, {})

    draws = {
        name: Draw(
            draw["name"],
            tuple(draw["shape"]),
            decode(draw["dtype"]),
            tuple(Step(*map(decode, step)) for step in draw["steps"]),
        )
        for name, draw in data["draws"].items()
    }
    return Recipe(data["seed"], draws)


def recipe_of(model: nn.Module) -> Recipe | None:
    """The recipe that `init` has attached to a model."""
    found = vars(model).get(_ATTRIBUTE)
    return found if isinstance(found, Recipe) else None


def init(
    model: nn.Module,
    seed: int = 0,
    *,
    init: Mapping[str, Initializer | Values] | None = None,
) -> Recipe:
    """Say how the tensors of a model on `meta` get their initial values; attached to the model.

    `msc.compile` picks it up: every rank then draws its own shards, the same numbers on every mesh,
    and no rank holds the whole model. Tensors that have values keep them.

    What is drawn is found by running every module's `reset_parameters`, and then the model's
    `_init_weights`, the convention of Hugging Face and many others, on every module. What else a
    model's `__init__` does to its parameters cannot be seen: say it in `init`, which comes last.

    Args:
        model: built under `torch.device("meta")`.
        seed: keys all numbers.
        init: pattern of names ("layers.*.weight") -> `msc.Normal(0.02)`, `Uniform`, `Zeros`,
            `Ones`, `Constant`, or a function `(shape, dtype) -> tensor` for values that must be
            computed, such as a buffer; the first pattern that fits a name counts.

    Raises:
        UserError: a parameter is not covered, or a pattern fits nothing. A buffer that is not
            covered is refused by `msc.compile` if the loss reads it.
    """
    _check(model, seed)
    targets = _targets(model)
    given = dict(init or {})
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed % 2**63)  # for a module that computes with random numbers of its own
        with recording(targets, _protected(model)) as recorder:
            _run_modules(model, recorder)
            _override(targets, given)
    draws, constants, missing = _collect(targets)
    recipe = Recipe(seed, draws, constants, missing)
    vars(model)[_ATTRIBUTE] = recipe
    return recipe


def _check(model: Any, seed: Any) -> None:
    if not isinstance(model, nn.Module):
        raise UserError(f"The model is a {type(model).__name__}, not a torch.nn.Module.")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed not in _SEEDS:
        raise UserError(f"seed is {seed!r}; it is a whole number of 64 bits.")


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor, bool]]:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield name, parameter, True
    for name, buffer in model.named_buffers(remove_duplicate=False):
        yield name, buffer, False


def _targets(model: nn.Module) -> dict[int, Target]:
    """The tensors without values by their storage; tied ones are one."""
    found: dict[int, Target] = {}
    for name, tensor, is_parameter in _named(model):
        if not has_values(tensor):
            key = storage_key(tensor)
            if key not in found:
                found[key] = Target(tensor, [], is_parameter)
            elif found[key].tensor is not tensor:
                raise UserError(
                    f"'{name}' and '{found[key].names[0]}' are different views of one memory. Make "
                    "them one parameter, or two."
                )
            found[key].names.append(name)
    return found


def _protected(model: nn.Module) -> frozenset[int]:
    return frozenset(storage_key(tensor) for _, tensor, _ in _named(model) if has_values(tensor))


def _run_modules(model: nn.Module, recorder: Recorder) -> None:
    """The initialization of every module, inner modules first, as building the model runs it."""
    for module in _inner_first(model):
        for name in _RESETS:
            method = getattr(module, name, None)
            if callable(method) and _takes(method, 0):
                recorder.run(method, module)

    def custom(module: nn.Module, outer: Callable[..., Any] | None) -> None:
        own = getattr(module, _CUSTOM, None)
        if callable(own) and _takes(own, 1):
            outer = own
        for child in module.children():
            custom(child, outer)
        if callable(own) and _takes(own, 0):
            recorder.run(own, module)
        elif outer is not None:
            recorder.run(outer, module, module)

    custom(model, None)


def _inner_first(model: nn.Module) -> list[nn.Module]:
    return list(reversed(list(model.modules())))


def _takes(method: Any, count: int) -> bool:
    """Whether a method can be called with `count` positional arguments and needs as many."""
    parameters = inspect.signature(method).parameters.values()
    needed = [
        p
        for p in parameters
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    return len(needed) == count


def _override(targets: Mapping[int, Target], given: Mapping[str, Initializer | Values]) -> None:
    used: set[str] = set()
    for target in targets.values():
        for pattern, initializer in given.items():
            if not any(fnmatch.fnmatchcase(name, pattern) for name in target.names):
                continue
            used.add(pattern)
            if isinstance(initializer, Initializer):
                initializer.fill(target.tensor)
            elif callable(initializer):
                target.set(_computed(initializer, target))
            else:
                raise UserError(
                    f"init['{pattern}'] is a {type(initializer).__name__}; it is msc.Normal(std) "
                    "or another initializer, or a function (shape, dtype) -> tensor."
                )
            break
    unused = [pattern for pattern in given if pattern not in used]
    if unused:
        raise UserError(
            f"These patterns of init fit no parameter or buffer without values, or none that an "
            f"earlier pattern does not fit: {', '.join(unused)}. Names are those of "
            "model.named_parameters() and named_buffers(); * stands for anything."
        )


def _computed(function: Values, target: Target) -> Tensor:
    shape, dtype = tuple(target.tensor.shape), target.tensor.dtype
    value: Any = function(shape, dtype)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or not has_values(value):
        got = f"{type(value).__name__} {list(getattr(value, 'shape', []))}"
        raise UserError(
            f"The function that init gives for '{target.names[0]}' returned {got}; it must return "
            f"a tensor of shape {list(shape)} with values (device='cpu')."
        )
    return value


def _collect(
    targets: Mapping[int, Target],
) -> tuple[dict[str, Draw], dict[str, Tensor], dict[str, str]]:
    draws: dict[str, Draw] = {}
    constants: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    refused: list[str] = []
    for target in targets.values():
        reason = target.missing()
        if reason and target.is_parameter:
            refused.append(f"  {target.names[0]}: {reason}")
        for name in target.names:
            if reason:
                missing[name] = reason
            elif target.values is not None:
                constants[name] = target.values
            else:
                tensor = target.tensor
                draws[name] = Draw(
                    target.names[0], tuple(tensor.shape), tensor.dtype, tuple(target.steps)
                )
    if refused:
        raise UserError(
            "How these parameters are initialized is not known:\n" + "\n".join(refused) + "\n"
            'Say it: msc.init(model, seed, init={"' + refused[0].split(":")[0].strip() + '": '
            "msc.Normal(0.02)}); patterns such as *.weight are possible."
        )
    return draws, constants, missing
