"""Private names of torch are used in msc/ir/torch_private.py alone, and those it offers exist."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from msc.ir import torch_private

ROOT = Path(__file__).parents[1]
OWNER = ROOT / "msc" / "ir" / "torch_private.py"
FOLDERS = ("msc", "passes", "codegen", "runtime", "benchmarks", "examples")

# Nested containers of tensors: torch.fx flattens arguments with it, torch.export's public
# specifications are made of it, and it has no public name up to torch 2.13.
ALLOWED = ("torch.utils._pytree",)

# In generated code a private name stands in a string. Ops such as torch.ops.aten._softmax are no
# private names: the underscore is part of the op's name.
IN_TEXT = re.compile(r"\b(?:import|from) torch(?:\.\w+)*\._\w+|\btorch(?!\.ops\b)(?:\.\w+)*\._\w+")


def files() -> list[Path]:
    found = {
        file.resolve() for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")
    }  # resolved: msc/passes is a link to passes
    return sorted(found - {OWNER})


def is_private(name: str) -> bool:
    if name.startswith("torch.ops.") or any(
        name == allowed or name.startswith(f"{allowed}.") for allowed in ALLOWED
    ):
        return False
    parts = name.split(".")
    return parts[0] == "torch" and any(
        part.startswith("_") and not part.endswith("__") for part in parts
    )


def private_names(text: str) -> list[str]:
    """The private names of torch that a source text imports, reads as attributes, or emits."""
    tree = ast.parse(text)
    bound = dict(_bound_names(tree))
    found = [name for name in bound.values() if is_private(name)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = _dotted(node, bound)
            if name is not None and is_private(name):
                found.append(name)
    return list(dict.fromkeys([*found, *_in_strings(tree)]))


def _bound_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Local name -> full name, of everything imported anywhere in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname:
                    yield alias.asname, alias.name
                else:
                    yield alias.name.split(".")[0], alias.name.split(".")[0]
                    yield f"import {alias.name}", alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _dotted(node: ast.expr, bound: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return bound.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value, bound)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def _in_strings(tree: ast.AST) -> Iterator[str]:
    """Private names in string literals, docstrings left out."""
    docs = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            yield from IN_TEXT.findall(node.value)


def test_no_other_module_touches_a_private_name() -> None:
    found = {
        str(file.relative_to(ROOT)): names
        for file in files()
        if (names := private_names(file.read_text()))
    }
    assert found == {}


def test_every_name_that_is_used_exists() -> None:
    used = {
        (str(file.relative_to(ROOT)), name.removeprefix("msc.ir.torch_private."))
        for file in [*files(), *(ROOT / "tests").rglob("*.py")]
        for name in names_of_owner(file.read_text())
    }
    assert used
    assert [(file, name) for file, name in sorted(used) if not hasattr(torch_private, name)] == []


def names_of_owner(text: str) -> list[str]:
    tree = ast.parse(text)
    bound = dict(_bound_names(tree))
    dotted = [_dotted(node, bound) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    prefix = "msc.ir.torch_private."
    return [name for name in [*bound.values(), *dotted] if name and name.startswith(prefix)]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch._ops import OpOverload", "torch._ops.OpOverload"),
        ("from torch.fx import _pytree", "torch.fx._pytree"),
        ("from torch import fx\nfx._symbolic_trace.f()", "torch.fx._symbolic_trace"),
        ("import torch\ntorch._C.f()", "torch._C"),
        ("import torch.distributed as dist\ndist._make()", "torch.distributed._make"),
        ("line = 'from torch._inductor import x'", "from torch._inductor"),
        ("line = f'{x} = torch._foreach_add({y})'", "torch._foreach_add"),
    ],
)
def test_a_private_name_is_found(text: str, name: str) -> None:
    assert name in private_names(text)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ntorch.ops.aten._log_softmax.default",
        "import torch\ntorch.ops._c10d_functional.wait_tensor",
        "from torch.utils import _pytree as pytree\npytree.tree_leaves(x)",
        "import torch\ntorch.__version__",
        "line = 'torch.ops.aten._softmax.default(x)'",
        "'''Like torch._foreach_add.'''",
        "from msc.ir.torch_private import OpOverload",
    ],
)
def test_a_public_name_is_allowed(text: str) -> None:
    assert private_names(text) == []
