"""The result as text, whole."""

from __future__ import annotations

import dataclasses

from torch import fx

from msc.ir.mesh import Mesh
from msc.runtime.simulate import RankClass, simulate
from tests.runtime.build import C10D, Builder, all_reduce
from tests.runtime.simulate.build import SECONDS, value, work


def program(seconds: int) -> fx.GraphModule:
    build = Builder()
    x = value(build)
    token = build.call(C10D.all_reduce.default, x, "sum", "tp")
    token.meta["module_path"] = "layers.0.mlp"
    y = work(build, x, seconds)
    return build.done(build.wait(token), all_reduce(build, y, "tp"))


def test_totals_classes_and_communication() -> None:
    classes = [RankClass("stage0.tp0", 0, 1, program(3)), RankClass("stage0.tp1", 1, 1, program(1))]
    result = simulate(Mesh.parse("tp=2"), SECONDS, classes, lambda rank: rank, model_flops=3 * 1024)
    assert (
        str(result)
        == """\
2 ranks on mesh tp=2, cluster 'seconds'
step 4000.000 ms, MFU 37.5%, HFU 50.0%, bubble 0.0%

class       ranks  compute ms  bubble      skew  exposed tp  peak memory
stage0.tp0      1    3000.000   0.000     0.000    1000.000     0.00 MiB
stage0.tp1      1    1000.000   0.000  2000.000    1000.000     0.00 MiB

communication of one rank, mean over ranks
over  kind        calls    MB  total ms   exposed    hidden
tp    all_reduce    2.0  0.00  2000.000  1000.000  1000.000

most exposed
over  kind        calls  exposed ms  in
tp    all_reduce    1.0    1000.000  the step"""
    )


def test_a_device_that_is_too_small_is_named() -> None:
    build = Builder()
    classes = [RankClass("stage0", 0, 1, build.done(work(build, value(build))))]
    small = dataclasses.replace(SECONDS, memory_bytes=1000)
    text = str(simulate(Mesh.parse(""), small, classes, lambda rank: 0))
    assert text.splitlines() == [
        "1 rank on mesh one rank, cluster 'seconds'",
        "step 1000.000 ms, MFU unknown, HFU 100.0%, bubble 0.0%",
        "",
        "class   ranks  compute ms  bubble   skew  peak memory",
        "stage0      1    1000.000   0.000  0.000     0.00 MiB",
        "a device has 0.00 MiB: too little for stage0",
    ]
