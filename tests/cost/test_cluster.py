"""A cluster as data: files, mappings, and refusals that name the field."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from msc.cost import Cluster
from msc.cost.clusters import presets
from msc.ir.errors import PlanError

VALUES: dict[str, Any] = {
    "name": "two nodes",
    "flops_per_s": 1e15,
    "memory_bytes_per_s": 3e12,
    "memory_bytes": 8e10,
    "devices_per_node": 8,
    "node_bytes_per_s": 4e11,
    "network_bytes_per_s": 5e10,
}


def test_what_is_saved_can_be_loaded(tmp_path: Path) -> None:
    cluster = Cluster(**VALUES, launch_s=1e-6)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster
    assert Cluster.load(str(tmp_path / "cluster.json")) == cluster
    assert Cluster.load(cluster) is cluster


def test_latencies_have_defaults() -> None:
    cluster = Cluster.load(VALUES)
    assert (cluster.node_latency_s, cluster.network_latency_s) == (5e-6, 2e-5)
    assert cluster.launch_s == 5e-6


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        *((value, "positive") for value in (0, -1.0, math.nan)),
        *((value, "a number") for value in ("100GB", None, True)),
    ],
)
def test_a_rate_is_positive(value: Any, reason: str) -> None:
    with pytest.raises(PlanError) as error:
        Cluster.load({**VALUES, "flops_per_s": value})
    assert str(error.value) == (
        f"Cluster 'two nodes': flops_per_s is {value!r}; it must be {reason}."
    )


def test_a_name_is_text() -> None:
    with pytest.raises(PlanError, match=r"^Cluster '5': name is 5; it is text"):
        Cluster.load({**VALUES, "name": 5})


def test_latencies_may_be_zero() -> None:
    zero = {"node_latency_s": 0, "network_latency_s": 0.0, "launch_s": 0}
    assert Cluster.load({**VALUES, **zero}).launch_s == 0
    with pytest.raises(PlanError, match="launch_s is -1; it must be 0 or positive"):
        Cluster.load({**VALUES, "launch_s": -1})


def test_a_dtype_may_have_a_rate_of_its_own() -> None:
    cluster = Cluster.load({**VALUES, "dtype_flops_per_s": {"float32": 1e13}})
    assert cluster.peak(torch.float32) == 1e13
    assert cluster.peak(torch.bfloat16) == 1e15
    assert hash(cluster) == hash(Cluster.load(VALUES))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype_flops_per_s": {"float33": 1e13}}, "dtype_flops_per_s names 'float33', which is"),
        ({"dtype_flops_per_s": {"float32": 0}}, "dtype_flops_per_s of float32 is 0; it must be"),
        ({"dtype_flops_per_s": 3}, "dtype_flops_per_s is 3; it maps dtypes to rates"),
        ({"gemm_efficiency": 1.5}, "gemm_efficiency is 1.5; it is a fraction of another rate"),
        ({"fused_gemm_rate": 1.5}, "fused_gemm_rate is 1.5; it is a fraction of another rate"),
        ({"multiprocessors": 1.5}, "multiprocessors is 1.5; it is a whole number"),
        ({"multiprocessors": 0}, "multiprocessors is 0; it must be positive"),
        ({"devices_per_node": 1.5}, "devices_per_node is 1.5; it is a whole number"),
    ],
)
def test_rates_that_cannot_be(values: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError) as error:
        Cluster.load({**VALUES, **values})
    assert str(error.value).startswith(f"Cluster 'two nodes': {message}")


@pytest.mark.parametrize("name", ["a100", "h100"])
def test_a_shipped_cluster_is_read_by_its_name(name: str) -> None:
    cluster = Cluster.load(name)
    assert cluster == Cluster.load(presets()[name])
    assert cluster.name.startswith(f"8x {name.upper()}")
    assert "datasheet" in cluster.sources
    assert cluster.peak(torch.bfloat16) > cluster.peak(torch.float32)


def test_unknown_and_missing_fields_are_named() -> None:
    with pytest.raises(
        PlanError, match=r"^Cluster 'two nodes' has unknown fields \['flops'\]\. Known: \["
    ):
        Cluster.load({**VALUES, "flops": 1})
    less = {key: value for key, value in VALUES.items() if not key.startswith("memory")}
    with pytest.raises(PlanError) as error:
        Cluster.load(less)
    lacks = "lacks the fields ['memory_bytes', 'memory_bytes_per_s']."
    assert str(error.value) == f"Cluster 'two nodes' {lacks}"


@pytest.mark.parametrize("text", [None, "{", "not json"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(PlanError) as error:
        Cluster.load(path)
    assert str(error.value).startswith(f"Cluster file '{path}' cannot be read: ")
    assert str(error.value).endswith("Clusters that need no file: a100, h100.")


def test_a_file_holds_an_object(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text("[1, 2]")
    with pytest.raises(PlanError, match=r"holds no JSON object with a cluster's fields"):
        Cluster.load(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe\x00", "cannot be read"),
        (b'{"name": "a", "name": "b"}', "it has the fields ['name'] more than once"),
        (b'{"name": "a"}', "lacks the fields ['devices_per_node', "),
    ],
)
def test_a_file_that_holds_no_cluster_is_named(
    content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "own.json"
    file.write_bytes(content)
    with pytest.raises(PlanError) as error:
        Cluster.load(file)
    assert f"Cluster file '{file}'" in str(error.value)
    assert message in str(error.value)
