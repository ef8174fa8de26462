"""Imports between the layers point one way: ir, cost, passes and codegen, runtime, front end."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

MAY_IMPORT = {
    "msc/ir": ("msc.ir",),
    "msc/cost": ("msc.ir", "msc.cost"),
    "passes": ("msc.ir", "msc.cost", "msc.passes"),
    "codegen": ("msc.ir", "msc.cost", "msc.codegen"),
    "runtime": ("msc.ir", "msc.cost", "msc.codegen", "msc.runtime"),
}


def imported(tree: ast.AST) -> Iterator[str]:
    """Full names of what a module imports anywhere in it: `msc.ir.mesh.Mesh`, `torch`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def offences(folder: str, name: str, text: str) -> list[str]:
    allowed = MAY_IMPORT[folder]
    return [
        f"{name} imports {module}; {folder} may import {', '.join(allowed)}"
        for module in imported(ast.parse(text))
        if module.split(".")[0] == "msc"
        and not any(module == layer or module.startswith(f"{layer}.") for layer in allowed)
    ]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_layers_point_one_way(folder: str) -> None:
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [
        line
        for file in files
        for line in offences(folder, str(file.relative_to(ROOT)), file.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import msc",
        "import msc.runtime.worker as worker",
        "from msc import Mesh",
        "from msc import runtime",
        "def f() -> None:\n    from msc.runtime import worker",
        "from msc.irregular import name",
    ],
)
def test_an_import_upwards_is_found(text: str) -> None:
    assert len(offences("passes", "passes/x.py", text)) == 1


@pytest.mark.parametrize(
    "text", ["import torch", "from msc import ir", "from msc.ir.mesh import Mesh", "import msc.ir"]
)
def test_an_import_downwards_is_allowed(text: str) -> None:
    assert offences("passes", "passes/x.py", text) == []
