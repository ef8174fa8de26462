"""What gets installed: every package, nothing but `msc`, and versions that fit the project file."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import msc
from msc.cost.clusters import presets

ROOT = Path(__file__).parents[1]
FOLDERS = {"msc": "msc", "passes": "msc.passes", "codegen": "msc.codegen", "runtime": "msc.runtime"}
LINKED = ("passes", "codegen", "runtime")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def sources(pattern: str = "*.py") -> dict[str, Path]:
    """Files of the packages by the path they have when installed; links are not followed."""
    return {
        "/".join([*package.split("."), *found.relative_to(ROOT / folder).parts]): found
        for folder, package in FOLDERS.items()
        for found in (ROOT / folder).rglob(pattern)
        if not any((ROOT / "msc" / link) in found.parents for link in LINKED)
    }


def test_every_package_is_listed(project: dict[str, Any]) -> None:
    on_disk = {name.removesuffix("/__init__.py") for name in sources("__init__.py")}
    listed = project["tool"]["setuptools"]["packages"]
    assert {name.replace("/", ".") for name in on_disk} == set(listed)
    assert listed == sorted(listed)


def test_every_module_is_in_a_package() -> None:
    found = sources()
    stray = [name for name in found if f"{name.rpartition('/')[0]}/__init__.py" not in found]
    assert stray == []


def test_links_lead_to_the_folders() -> None:
    for folder in LINKED:
        assert (ROOT / "msc" / folder).resolve() == (ROOT / folder).resolve()


@pytest.mark.parametrize("folder", LINKED)
def test_a_folder_cannot_be_imported_by_its_own_name(folder: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", f"import {folder}"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 1
    assert f"ImportError: import this package as msc.{folder}, not {folder}" in result.stderr


def test_the_wheel_holds_msc_and_nothing_else(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    # A copy, because a stale build/ in the tree would put deleted modules into the wheel.
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder,
            tree / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    shutil.copy(ROOT / "pyproject.toml", tree)
    command = "-m pip wheel --quiet --no-deps --no-build-isolation --no-index --wheel-dir"
    subprocess.run([sys.executable, *command.split(), str(tmp_path), str(tree)], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name == f"megascale_compiler-{msc.__version__}-py3-none-any.whl"
    installed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    clusters = {f"msc/cost/clusters/{path.name}" for path in presets().values()}
    assert installed == {*sources(), "msc/py.typed", *clusters}


def pins() -> dict[str, str]:
    lines = (ROOT / "requirements.lock").read_text().splitlines()
    exact = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in exact}


def test_the_lock_satisfies_the_project_file(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"].values()
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for text in [*wanted, *(each for extra in extras for each in extra)]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins()[requirement.name]), text


def test_the_lock_names_releases_only() -> None:
    """No local builds, files or hosts: whoever installs it chooses where packages come from."""
    for name, version in pins().items():
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)*(\.post[0-9]+)?", version), f"{name}=={version}"


def test_importing_msc_is_light() -> None:
    code = "import msc, sys; print([name for name in ('torch', 'msc.ir') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("[]\n", "")


def test_a_ranks_process_does_not_import_what_compiles() -> None:
    code = (
        "import msc, sys; msc.Trainer, msc.load, msc.Checkpoint, msc.Guard; "
        "print([n for n in ('sympy', 'scipy', 'msc.capture.entry') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"  # each costs every new rank, and who waits for it, time


@pytest.mark.parametrize("name", msc.PUBLIC)
def test_every_public_name_resolves(name: str) -> None:
    target = msc.PUBLIC[name]
    value = getattr(msc, name)
    assert name in dir(msc)
    if ":" in target:
        assert value.__name__ == target.partition(":")[2]
    else:
        assert value is sys.modules[target]


def test_no_module_hides_a_public_name() -> None:
    """Importing msc.verify, if there were such a module, would replace the function msc.verify."""
    modules = {name for name, target in msc.PUBLIC.items() if ":" not in target}
    hidden = [
        name
        for name in msc.PUBLIC.keys() - modules
        if (ROOT / "msc" / f"{name}.py").exists() or (ROOT / "msc" / name).exists()
    ]
    assert hidden == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'msc' has no attribute 'compil'"):
        _ = msc.compil
