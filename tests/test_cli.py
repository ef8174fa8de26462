"""The command `msc`: exit codes, one clear error each, and what it prints."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import msc
from msc import cli
from msc.program import Program
from msc.summary import verify_json
from msc.verification import VerifyReport

MODELS = """
import torch
from torch import nn


class Regressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class Branches(Regressor):
    def forward(self, x):
        if x.sum() > 0:
            x = -x
        return super().forward(x).sum()


class Reinterprets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Custom(Regressor):
    def forward(self, x):
        return super().forward(Reinterprets.apply(x)).sum()


def build():
    print("building")
    torch.manual_seed(0)
    return Regressor(), (torch.randn(8, 8),), torch.sum


def on_meta():
    with torch.device("meta"):
        return Regressor(), (torch.zeros(8, 8),), torch.sum


def branches():
    return Branches(), (torch.randn(8, 8),)


def custom():
    return Custom(), (torch.randn(8, 8),)


def no_loss():
    return Regressor(), (torch.randn(8, 8),)


def raises():
    raise RuntimeError("no [red]data[/red] today")


def inside_torch():
    return nn.Linear(3, 4)(torch.zeros(5)), (torch.zeros(5),)


def one():
    return Regressor()


def no_model():
    return 3, (torch.zeros(8, 8),)


def bad_inputs():
    return Regressor(), torch.zeros(8, 8)


def bad_loss():
    return Regressor(), (torch.zeros(8, 8),), 7


not_a_function = 3
"""

# torch's log handlers keep the stderr of its import, which must not be a test's.
assert torch.__version__

NAMES = iter(range(10**6))


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module in the current folder, another one for each test."""
    name = f"models_of_cli_test_{next(NAMES)}"
    (tmp_path / f"{name}.py").write_text(MODELS)
    (tmp_path / f"{name}_broken.py").write_text("def build(:\n")
    (tmp_path / f"{name}_imports.py").write_text("import os\nimport not_installed_anywhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(tmp_path)])
    yield name
    for loaded in [each for each in sys.modules if each.startswith(name)]:
        del sys.modules[loaded]


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert "Traceback" not in result.output
    return result


def error(*arguments: str) -> str:
    """The message of a command that cannot use its input."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    return result.stderr


def test_verify_agrees(models: str) -> None:
    result = run("verify", f"{models}:build", "--mesh", "pp=2,tp=2", "--dtype", "float64")
    assert result.exit_code == 0
    assert "ok: loss and all gradients agree within 1e-10" in result.stdout
    assert re.search(r"^4 gradients .*error \d", result.stdout, re.MULTILINE)
    assert re.search(r"^tp +100\.0% +100\.0%$", result.stdout, re.MULTILINE)
    assert "building" not in result.stdout


def test_verify_json_is_only_json(models: str) -> None:
    result = run("verify", f"{models}:build", "--mesh", "dp=2", "--microbatches", "2", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"], found["first_difference"]) == (0, True, "")
    assert set(found["grad_errors"]) == {
        f"layers.{i}.{name}" for i in range(2) for name in ("weight", "bias")
    }
    assert found["tolerance"] == 1e-5


@pytest.fixture
def wrong_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every parallel run yield a wrong gradient of one parameter."""
    original = Program.run_virtual

    def run_virtual(self: Program, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        result.grads["layers.1.weight"] = result.grads["layers.1.weight"] * 1.5
        return result

    monkeypatch.setattr(Program, "run_virtual", run_virtual)


@pytest.mark.usefixtures("wrong_gradient")
def test_a_difference_is_named(models: str) -> None:
    result = run("verify", f"{models}:build", "--mesh", "tp=2")
    assert result.exit_code == 1
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("DIFFERENT")]
    assert "gradient of layers.1.weight (module layers.1, placement" in line
    assert "'tp': " in line
    assert "error 0.5" in line


@pytest.mark.usefixtures("wrong_gradient")
def test_a_difference_is_named_in_json(models: str) -> None:
    result = run("verify", f"{models}:build", "--mesh", "tp=2", "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, found["ok"]) == (1, False)
    assert "layers.1.weight" in found["first_difference"]
    assert found["grad_errors"]["layers.1.weight"] == pytest.approx(0.5)


def test_compile_says_what_was_made(models: str) -> None:
    result = run("compile", f"{models}:on_meta", "--mesh", "pp=2,tp=2", "--optimizer", "lamb")
    assert result.exit_code == 0
    text = result.stdout
    assert "4 ranks on mesh pp=2,tp=2, 1 micro-batches" in text
    assert "2 chunks, 2 distinct rank graphs" in text
    assert re.search(r"^ +0 .*send over pp +1 +\d+", text, re.MULTILINE)
    assert re.search(r"^ +1 +\d+ .*layers\.1", text, re.MULTILINE)
    assert re.search(r"^differentiate +\d+\.\d{3}$", text, re.MULTILINE)
    assert re.search(r"^total +\d+\.\d{3}$", text, re.MULTILINE)


def test_compile_json_and_dump(models: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    arguments = ("--mesh", "dp=2,tp=2", "--dump", str(folder), "--json")
    result = run("compile", f"{models}:build", *arguments)
    found = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (found["mesh"], found["ranks"]) == ({"dp": 2, "tp": 2}, 4)
    assert found["cpu_seconds"]["capture"] > 0
    assert found["sharded"]["dp"]["flops"] == 1
    assert "ranks 0-3" in (folder / "index.txt").read_text()


def test_the_schedule_reaches_the_program(models: str, tmp_path: Path) -> None:
    texts = []
    for schedule in ("gpipe", "1f1b", "interleaved"):
        folder = tmp_path / schedule
        options = ["--mesh", "pp=2", "--microbatches", "4", "--schedule", schedule]
        options += ["--virtual-stages", "1"] if schedule == "interleaved" else []
        assert run("compile", f"{models}:build", *options, "--dump", str(folder)).exit_code == 0
        texts.append((folder / "stage0.step.txt").read_text())
    assert texts[0] != texts[1]
    assert texts[1] == texts[2]  # with one virtual stage it is the same


def test_what_to_recompute_reaches_the_program(models: str) -> None:
    """The third is a budget that the leanest choice of this model just keeps."""
    target = f"{models}:build"
    refused = error("compile", target, "--recompute", "1000")
    found = re.search(r"pipeline stage 0 needs at least ([\d,]+)", refused)
    assert found is not None
    leanest = found.group(1).replace(",", "")
    bytes_needed = []
    for wanted in ("none", "full", leanest):
        result = run("compile", target, "--recompute", wanted, "--json")
        assert result.exit_code == 0
        bytes_needed.append(max(json.loads(result.stdout)["memory_bytes"]))
    none, full, budget = bytes_needed
    assert full < none
    assert budget <= int(leanest) < none


def test_whether_to_fuse_the_loss_reaches_the_program(models: str) -> None:
    """This model's loss is no cross entropy, which a note says."""
    for command in ("compile", "verify", "simulate"):
        more = ("--cluster", "h100") if command == "simulate" else ("--json",)
        result = run(command, f"{models}:build", "--fuse-loss", *more)
        assert result.exit_code == 0
        if command != "simulate":
            (note,) = json.loads(result.stdout)["notes"]
            assert note.startswith("fuse_loss=True has no effect: the model has no cross entropy")


def test_whether_to_fuse_collectives_reaches_the_program(models: str) -> None:
    """This model is split by columns, so that nothing can be fused; each place has the reason."""
    options = (f"{models}:build", "--mesh", "tp=2", "--fuse-collectives")
    found = {
        wanted: json.loads(run("compile", *options, wanted, "--json").stdout)["fused_collectives"]
        for wanted in ("auto", "on", "off")
    }
    assert found["off"] == []
    assert found["on"] == found["auto"]
    assert "left alone: dim 1 is scattered, which the GEMM's weight has" in found["on"][0]
    printed = run("compile", *options, "on").stdout
    assert "  1 place left alone: dim 1 is scattered, which the GEMM's weight has" in printed
    assert run("verify", *options, "on").exit_code == 0
    assert run("simulate", *options, "on", "--cluster", "h100").exit_code == 0
    assert run("compile", *options, "always").exit_code == 2


def test_explain_says_where_everything_lies(models: str, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = run("explain", f"{models}:on_meta", "--mesh", "tp=2", "--html", str(page))
    assert result.exit_code == 0
    assert result.stdout.startswith("placements on mesh tp=2, 1 micro-batch; ")
    assert re.search(r"^ +weight +f32\[8,8\] +tp S[01]$", result.stdout, re.MULTILINE)
    assert "<title>Placements on tp=2</title>" in page.read_text()
    why = run("explain", f"{models}:on_meta", "layers.1", "--mesh", "tp=2")
    assert re.search(r"^ +S[01] +[\d,]+ +chosen$", why.stdout, re.MULTILINE)
    assert "nothing in a module 'x'" in error("explain", f"{models}:on_meta", "x", "--mesh", "tp=2")


def test_simulate_says_what_a_step_takes(models: str, tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    options = ("--mesh", "pp=2", "--microbatches", "2", "--cluster", "a100")
    result = run("simulate", f"{models}:on_meta", *options, "--trace", str(trace))
    assert result.exit_code == 0
    assert result.stdout.startswith("2 ranks on mesh pp=2, cluster '8x A100 80GB SXM per node")
    assert re.search(r"^stage1 +1 +\d", result.stdout, re.MULTILINE)
    assert re.search(r"^pp +recv +2\.0 ", result.stdout, re.MULTILINE)
    assert {each["pid"] for each in json.loads(trace.read_text())["traceEvents"]} == {0, 1}
    more = ("--schedule", "zb-h1", "--recompute", "full", "--optimizer", "lamb")
    assert run("simulate", f"{models}:on_meta", *options, *more).exit_code == 0
    one_chunk = error("simulate", f"{models}:on_meta", *options, *more, "--virtual-stages", "2")
    assert "Schedule 'zb-h1' has 1 virtual stage per rank of pp, not 2" in one_chunk
    nowhere = str(tmp_path / "nowhere" / "t.json")
    refused = error("simulate", f"{models}:on_meta", "--cluster", "h100", "--trace", nowhere)
    assert f"'{nowhere}' cannot be written" in refused
    unknown = error("simulate", f"{models}:on_meta", "--cluster", "b200")
    assert "Cluster file 'b200' cannot be read" in unknown


def test_a_plan_goes_from_command_to_command(models: str, tmp_path: Path) -> None:
    target, plan, pins = f"{models}:build", str(tmp_path / "plan.json"), tmp_path / "pins.json"
    pins.write_text('{"layers.*.weight": {"tp": "Shard(1)"}, "*.bias": {"tp": "Replicate()"}}')
    made = run("compile", target, "--mesh", "tp=2", "--pins", str(pins), "--save-plan", plan)
    assert made.exit_code == 0
    explained = run("explain", target, "--mesh", "tp=2", "--plan", plan).stdout
    assert re.search(r"^ +weight +f32\[8,8\] +tp S1$", explained, re.MULTILINE)
    assert run("verify", target, "--mesh", "tp=2", "--plan", plan).exit_code == 0
    refused = error("verify", target, "--mesh", "tp=4", "--plan", plan)
    assert "mesh axis 'tp' has 2 ranks in the plan, 4 here" in refused


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"layers.0.weight": {"tp": "S0"}}', 'a placement is "Shard(0)"'),
        ('{"layers.0.weight": {"tp": 0}}', 'a placement is "Shard(0)"'),
        ('{"no.weight": {"tp": "Shard(0)"}}', 'pin "no.weight" matches no parameter'),
    ],
)
def test_errors_of_a_pins_file(models: str, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pins.json").write_text(text)
    arguments = ("--mesh", "tp=2", "--pins", str(tmp_path / "pins.json"))
    assert message in error("compile", f"{models}:build", *arguments)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", r"raises failed at models_\w+\.py:\d+ in raises: raise RuntimeError\("),
        ("raises", r"RuntimeError: no \[red\]data\[/red\] today"),
        ("inside_torch", r"py:\d+ in inside_torch: return nn\.Linear\(3, 4\)"),
        ("one", r"one returned a Regressor; build\(\) returns \(model, inputs\)"),
        ("no_model", r"returned a int in the place of the model"),
        ("bad_inputs", r"returned inputs that are a Tensor"),
        ("bad_loss", r"returned a int in the place of loss_fn"),
        ("missing", r"Module 'models_\w+' has no 'missing'"),
        ("not_a_function", r"does not make a function of 'not_a_function'"),
        ("branches", r"models_\w+\.py:\d+ in forward: if x\.sum\(\) > 0:"),
        ("custom", r"Reinterprets is a torch\.autograd\.Function"),
        ("no_loss", r"loss"),
    ],
)
def test_errors_of_the_users_code(models: str, function: str, message: str) -> None:
    assert re.search(message, error("compile", f"{models}:{function}"))


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("no_such_module:build", r"There is no module 'no_such_module' to import"),
        ("no_such.module:build", r"There is no module 'no_such' to import"),
        ("{models}", r"names no function\. Write package\.module:function"),
        ("{models}:", r"names no function"),
        ("{models}_broken:build", r"Importing 'models_\w+_broken' failed\nSyntaxError: .*line 1"),
        ("{models}_imports:build", r"failed at models_\w+_imports\.py:2 in <module>: import not_"),
    ],
)
def test_errors_of_the_target(models: str, target: str, message: str) -> None:
    assert re.search(message, error("verify", target.format(models=models)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--mesh", "xx=2"], "Mesh axis 'xx' is unknown"),
        (["--mesh", "tp"], "write axes as name=size"),
        (["--mesh", "tp=0"], "has size 0"),
        (["--mesh", "dp=3"], "does not split evenly over dp=3"),
        (["--mesh", "dp=2", "--microbatches", "8"], "= 16 parts"),
        (["--microbatches", "0"], "microbatches is 0"),
        (["--mesh", "pp=8"], "8"),
        (["--schedule", "zigzag"], "Schedule 'zigzag' is unknown"),
    ],
)
@pytest.mark.parametrize("command", ["verify", "compile"])
def test_errors_of_the_plan(models: str, command: str, options: list[str], message: str) -> None:
    assert message in error(command, f"{models}:build", *options)


def test_errors_of_compile_options(models: str, tmp_path: Path) -> None:
    target = f"{models}:build"
    garbled = tmp_path / "cluster.json"
    garbled.write_text("{")
    assert "Cluster file 'nowhere.json'" in error("compile", target, "--cluster", "nowhere.json")
    assert f"Cluster file '{garbled}'" in error("compile", target, "--cluster", str(garbled))
    assert "Pipeline stage 0 needs" in error("compile", target, "--memory", "100")
    assert "recompute is 'some'; it is one of \"none\"" in error(
        "compile", target, "--recompute", "some"
    )
    occupied = error("compile", target, "--dump", str(garbled))
    assert f"The folder '{garbled}' cannot be made" in occupied


@pytest.mark.parametrize(
    "arguments",
    [
        ["compile", "m:build", "--unknown"],
        ["compile", "m:build", "--optimizer", "adagrad"],
        ["verify", "m:build", "--dtype", "int8"],
        ["verify", "m:build", "--microbatches", "two"],
        ["verify"],
        ["unknown"],
    ],
)
def test_usage_errors(arguments: list[str]) -> None:
    assert "Usage: " in error(*arguments)


def test_an_error_in_json(models: str) -> None:
    result = run("verify", f"{models}:build", "--mesh", "xx=2", "--json")
    assert result.exit_code == 2
    assert "Mesh axis 'xx' is unknown" in json.loads(result.stdout)["error"]


def test_a_model_without_values_cannot_be_verified(models: str) -> None:
    assert "has no values" in error("verify", f"{models}:on_meta", "--mesh", "tp=2")


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (msc.VerifyError("%y has no type"), "MSC failed, this is a bug in it or in a pass: %y has"),
        (KeyError("lost"), "MSC failed, this is a bug in it: KeyError: 'lost'"),
    ],
)
def test_a_failure_of_msc_itself(
    models: str, monkeypatch: pytest.MonkeyPatch, raised: Exception, message: str
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise raised

    monkeypatch.setattr(msc, "compile", fail, raising=False)
    result = CliRunner().invoke(cli.app, ["compile", f"{models}:build"])
    assert result.exit_code == 3
    assert message in result.stderr
    assert "Traceback" in result.stderr  # to be reported with it
    assert ", in fail" in result.stderr


def test_infinite_errors_are_valid_json() -> None:
    report = VerifyReport(
        ok=False,
        loss=float("nan"),
        reference_loss=1.0,
        loss_error=float("inf"),
        grad_errors={"w": float("inf")},
        eager_errors={},
        sharded={},
        notes=(),
        fallbacks=(),
        tolerance=1e-5,
        first_difference="loss: error inf",
    )
    found = json.loads(json.dumps(verify_json(report), allow_nan=False))
    assert (found["loss"], found["loss_error"], found["grad_errors"]) == (
        "nan",
        "inf",
        {"w": "inf"},
    )


def test_as_a_process(models: str) -> None:
    command = [sys.executable, "-m", "msc", "verify", f"{models}:build", "--mesh", "tp=2"]
    root = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "building\n")
    assert "ok: loss and all gradients agree" in done.stdout
    command[-1] = "tp=two"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr
    assert "error: Mesh 'tp=two' has the part 'tp=two'" in done.stderr


def test_an_export_error_is_one_message(models: str) -> None:
    """torch.export prints the graph so far and logs warnings before it raises."""
    command = [sys.executable, "-m", "msc", "compile", f"{models}:branches"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: The program depends on .*\n", done.stderr)
