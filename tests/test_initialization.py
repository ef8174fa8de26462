"""`msc.init`: a model on meta starts with the same values on every mesh, drawn shard by shard."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

import msc
from msc.ir.draws import Draw, Step
from msc.ir.torch_private import TorchDispatchMode
from msc.program import Program
from msc.saving import describe
from tests import models

ADAMW = msc.AdamW(lr=1e-2, weight_decay=0.1)
MESHES = ["", "tp=2", "tp=3", "pp=3", "dp=2", "pp=3,dp=2,tp=2"]


def gpt(device: str = "meta") -> nn.Module:
    with torch.device(device):
        return models.GPT(width=24, layers=3, heads=6)


def compiled(mesh: str = "", seed: int = 5, **options: Any) -> Program:
    model = gpt()
    msc.init(model, seed, init={"*.up.weight": msc.Normal(0.02)})
    return msc.compile(
        model, models.tokens(), mesh=mesh, microbatches=2, optimizer=ADAMW, **options
    )


def moments(value: Tensor) -> tuple[float, float]:
    return float(value.mean()), float(value.std())


# -- the numbers


@pytest.mark.parametrize("mesh", MESHES[1:])
def test_every_mesh_starts_with_the_same_bits(mesh: str) -> None:
    program, single = compiled(mesh), compiled()
    for rank in range(program.mesh.size):
        state = program.initial_state(rank)
        for name, value in state.parameters.items():
            layout = program.parameters[name]
            expected = layout.local(single.read_parameter(name), program.mesh, rank)
            assert torch.equal(value, expected), (rank, name)
    other = compiled(mesh, seed=6).initial_state(0).parameters
    random = [n for n, v in program.initial_state(0).parameters.items() if v.std() > 0]
    assert len(random) > 4
    assert not any(torch.equal(other[n], program.initial_state(0).parameters[n]) for n in random)


def test_training_from_meta_is_training_from_those_values() -> None:
    drawn = compiled("pp=3,dp=2,tp=2", precision="float64")
    real = gpt("cpu")
    real.load_state_dict(compiled().state_dict())
    loaded = msc.compile(
        real, models.tokens(), microbatches=2, optimizer=ADAMW, precision="float64"
    )
    states: tuple[Any, Any] = None, None
    for step in range(5):
        batch = models.tokens(step)
        found, expected = drawn.run_virtual(batch, states[0]), loaded.run_virtual(batch, states[1])
        states = found.state, expected.state
        assert float((found.loss - expected.loss).abs()) <= 1e-12
    for name, value in expected.params.items():
        torch.testing.assert_close(found.params[name], value, rtol=1e-8, atol=1e-10)


def test_the_modules_own_initialization_is_followed() -> None:
    """Mean, spread and bounds of each layer are those that torch gives it."""
    torch.manual_seed(0)

    def build() -> nn.Module:
        return nn.ModuleDict(
            {
                "linear": nn.Linear(300, 200),
                "embedding": nn.Embedding(500, 40, padding_idx=3),
                "norm": nn.LayerNorm(64),
                "rms": nn.RMSNorm(64),
                "group": nn.GroupNorm(4, 64),
                "batch": nn.BatchNorm1d(64),
                "conv": nn.Conv2d(16, 32, 3, groups=2),
                "attention": nn.MultiheadAttention(64, 4),
                "prelu": nn.PReLU(),
            }
        )

    with torch.device("meta"):
        recipe = msc.init(build(), 1)
    real = build()
    for name, expected in real.state_dict().items():
        found = recipe.whole(name)
        assert found is not None, name
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
        if expected.numel() == 1 or not expected.double().std():
            assert torch.equal(found, expected), name
            continue
        spread = moments(expected)[1]
        noise = 5 * spread / math.sqrt(expected.numel())
        assert moments(found) == pytest.approx(moments(expected), abs=2 * noise), name
        bound = 1.2 if "embedding" in name else 1.0
        assert float(found.abs().max()) <= bound * float(expected.abs().max()) + noise, name
    padding = recipe.whole("embedding.weight")
    assert padding is not None
    assert not padding[3].any()
    assert padding[2].any()


class Custom(nn.Module):
    """The convention of `_init_weights`, a truncated normal, and a weight filled in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(100, 100)
        self.second = nn.Linear(100, 100, bias=False)
        self.gains = nn.Parameter(torch.empty(2, 50))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.ones_(self.gains[0])
            nn.init.constant_(self.gains[1], 2.0)
        elif module is self.second:
            nn.init.trunc_normal_(module.weight, std=0.1, a=-0.15, b=0.15)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
            module.weight.data.mul_(0.5).add_(1.0)
            nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return y * self.gains.mean()


def test_custom_initialization_is_followed() -> None:
    with torch.device("meta"):
        model = Custom()
    recipe = msc.init(model, 3)
    found = {name: recipe.whole(name) for name in model.state_dict()}
    first, second, gains = found["first.weight"], found["second.weight"], found["gains"]
    assert first is not None
    assert second is not None
    assert gains is not None
    assert moments(first) == pytest.approx((1.0, 0.15), abs=0.01)
    assert float(second.abs().max()) <= 0.15
    assert moments(second) == pytest.approx((0.0, 0.0743), abs=0.003)
    assert [row.unique().tolist() for row in gains] == [[1.0], [2.0]]
    assert not found["first.bias"].any()  # type: ignore[union-attr]
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_what_the_user_says_comes_last() -> None:
    with torch.device("meta"):
        model = Custom()
    recipe = msc.init(
        model,
        init={
            "first.weight": msc.Uniform(2.0, 3.0),
            "first.bias": msc.Constant(7.0),
            "*.weight": msc.Ones(),
            "gains": lambda shape, dtype: torch.arange(100, dtype=dtype).view(shape),
        },
    )
    values = {name: recipe.whole(name) for name in model.state_dict()}
    first = values["first.weight"]
    assert first is not None
    assert 2.0 <= float(first.min()) < 2.01 < 2.99 < float(first.max()) < 3.0
    assert values["first.bias"].unique().tolist() == [7.0]  # type: ignore[union-attr]
    assert values["second.weight"].unique().tolist() == [1.0]  # type: ignore[union-attr]
    assert values["gains"].flatten().tolist() == list(range(100))  # type: ignore[union-attr]


@given(data=st.data())
def test_any_part_is_that_part_of_the_whole(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 9), max_size=3)))
    numel = math.prod(shape)
    cut = data.draw(st.integers(0, numel))
    steps = (
        Step("uniform", (-1.0, 1.0), 0, numel),
        Step("erfinv", (), 0, numel),
        Step("normal", (0.0, 3.0), cut, numel),
    )
    draw = Draw("w", shape, torch.float32, steps)
    held = [torch.tensor(data.draw(st.lists(st.integers(0, n - 1)) if n else st.just([])),
                         dtype=torch.int64) for n in shape]  # fmt: skip
    whole = draw.whole(7)
    for dim, indices in enumerate(held):
        whole = whole.index_select(dim, indices)
    assert torch.equal(draw.part(7, held), whole)


def test_normal_numbers_are_normal() -> None:
    """Moments, tails and the lack of correlation of a million numbers."""
    whole = Draw("w", (1000, 1000), torch.float64, (Step("normal", (0.0, 1.0), 0, 10**6),)).whole(0)
    for power, expected in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        assert float((whole**power).mean()) == pytest.approx(expected, abs=0.05)
    for bound in (1.0, 2.0, 3.0):
        beyond = float((whole.abs() > bound).double().mean())
        assert beyond == pytest.approx(math.erfc(bound / math.sqrt(2)), abs=0.002)
    rows = torch.corrcoef(whole[:50])
    assert float((rows - torch.eye(50, dtype=torch.float64)).abs().max()) < 0.2


# -- memory


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest storage that an op made, in bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.device.type == "cpu":
                self.peak = max(self.peak, value.untyped_storage().nbytes())
        return result


def test_a_rank_never_holds_more_than_its_shards() -> None:
    """No tensor of the size of a whole sharded parameter is made, and blocks are small."""
    with torch.device("meta"):
        model = models.GPT(width=512, layers=1, heads=8, vocabulary=4096)
    msc.init(model)
    program = msc.compile(model, models.tokens(), mesh="tp=4")
    weight = program.parameters["wte.weight"]
    assert weight.local_shape(program.mesh, 1)[0] == 1024
    with Allocated() as found:
        state = program.initial_state(1)
    largest_shard = max(value.nbytes for value in state.parameters.values())
    assert found.peak <= largest_shard
    assert 4 * largest_shard <= math.prod(weight.shape) * weight.dtype.itemsize


def test_a_recipe_takes_no_memory() -> None:
    with torch.device("meta"):
        model = nn.Linear(10**6, 10**6)  # 4 TB
    with Allocated() as found:
        recipe = msc.init(model)
    assert found.peak <= 64
    part = recipe.part("weight", [torch.tensor([999_999]), torch.tensor([0, 123_456])])
    assert part.shape == (1, 2)
    assert part.abs().max() <= 1e-3


# -- buffers, ties, Hugging Face models


class Rotary(nn.Module):
    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("scale", torch.linspace(0, 1, 16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = functional.mse_loss(self.linear(x * self.scale), x)
        return y


def test_a_buffer_that_was_computed_on_meta_must_be_given() -> None:
    batch = (torch.randn(4, 16),)
    with torch.device("meta"):
        model = Rotary()
    msc.init(model)
    with pytest.raises(msc.UserError) as error:
        msc.compile(model, batch)
    assert "  scale: no reset_parameters or _init_weights of a module fills it" in str(error.value)
    assert "init={name: lambda shape, dtype" in str(error.value)
    msc.init(model, init={"scale": lambda shape, dtype: torch.linspace(0, 1, 16, dtype=dtype)})
    found = msc.compile(model, batch, mesh="tp=2")
    real = Rotary()
    real.load_state_dict(found.state_dict())
    with torch.no_grad():
        assert float(found.run_virtual(batch).loss) == pytest.approx(float(real(*batch)), rel=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_hugging_face_models(kind: str) -> None:
    """Spread by the config, scaled projections, rotary frequencies, tied embeddings."""
    transformers = pytest.importorskip("transformers")
    if kind == "gpt2":
        config = transformers.GPT2Config(
            n_embd=64, n_layer=2, n_head=4, vocab_size=96, initializer_range=0.05
        )
        build = transformers.GPT2LMHeadModel
    else:
        config = transformers.LlamaConfig(
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=96,
            initializer_range=0.05,
        )
        build = transformers.LlamaForCausalLM
    config.use_cache = False
    model_dropout = {n: 0.0 for n in ("resid_pdrop", "embd_pdrop", "attn_pdrop")}
    config.update(model_dropout if kind == "gpt2" else {})
    torch.manual_seed(0)
    real = build(config)
    with torch.device("meta"):
        model = build(config)
    recipe = msc.init(model, 4)
    for name, expected in real.named_parameters():
        found = recipe.whole(name)
        assert found is not None
        expected = expected.detach()
        spread = float(expected.std())
        assert moments(found) == pytest.approx(moments(expected), abs=0.1 * spread + 1e-12), name
    ids = torch.randint(96, (4, 8))
    batch = {"input_ids": ids, "labels": ids}
    program = msc.compile(model, batch, mesh="tp=2,dp=2", precision="float64")
    real.load_state_dict(program.state_dict())
    loss = float(real.double()(**batch).loss.detach())
    assert float(program.run_virtual(batch).loss) == pytest.approx(loss, rel=1e-7)


# -- programs


def test_a_saved_program_draws_the_same(tmp_path: Path) -> None:
    program = compiled("pp=3,tp=2")
    program.save(tmp_path)
    assert not (tmp_path / "model.safetensors").exists()
    loaded = msc.load(tmp_path)
    assert loaded.values_digest == program.values_digest != compiled("pp=3,tp=2", 6).values_digest
    assert describe(loaded) == describe(program)
    for rank in range(6):
        found, expected = loaded.initial_state(rank), program.initial_state(rank)
        for name, value in expected.parameters.items():
            assert torch.equal(found.parameters[name], value)


def test_a_saved_program_keeps_what_was_computed(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Rotary()
    msc.init(model, init={"scale": lambda shape, dtype: torch.linspace(0, 1, 16)})
    batch = (torch.randn(4, 16),)
    program = msc.compile(model, batch)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    assert torch.equal(loaded.run_virtual(batch).loss, program.run_virtual(batch).loss)
    assert loaded.values_digest == program.values_digest


def test_running_statistics_start_and_are_saved(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 1))

    with torch.device("meta"):
        model = build()
    msc.init(model, 2)
    batch = (torch.randn(6, 8),)
    options: dict[str, Any] = {"loss_fn": lambda out: out.square().mean(), "precision": "float64"}
    program = msc.compile(model, batch, mesh="dp=2", **options)
    program.save(tmp_path)
    loaded = msc.load(tmp_path)
    real = build()
    real.load_state_dict(loaded.state_dict())
    expected = msc.compile(real, batch, **options).run_virtual(batch)
    found = loaded.run_virtual(batch)
    assert float(found.loss) == pytest.approx(float(expected.loss), rel=1e-12)
    assert sorted(found.buffers) == ["1.num_batches_tracked", "1.running_mean", "1.running_var"]
    for name, value in expected.buffers.items():
        torch.testing.assert_close(found.buffers[name], value, rtol=1e-12, atol=1e-12)
    real.load_state_dict(loaded.state_dict(found))


def test_the_trainer_starts_from_it() -> None:
    program = compiled()
    with msc.Trainer(program, [models.tokens()], log=False) as trainer:
        found = trainer.state_dict()
    assert all(torch.equal(found[n], v) for n, v in program.state_dict().items())


def test_tensors_with_values_keep_them() -> None:
    real = nn.Linear(4, 4)
    model = nn.Sequential(real, nn.Linear(4, 4, device="meta"))
    before = real.weight.detach().clone()
    recipe = msc.init(model)
    assert torch.equal(real.weight, before)
    assert sorted(recipe.draws) == ["1.bias", "1.weight"]


# -- refusals


def refused(model: nn.Module, init: Any = None, seed: Any = 0) -> str:
    with pytest.raises(msc.UserError) as error:
        msc.init(model, seed, init=init)
    return str(error.value)


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, 3, device="meta"))
        self.linear = nn.Linear(3, 3, device="meta")


class Fails(Bare):
    def reset_parameters(self) -> None:
        self.weight.fill_(self.weight.norm().item())


class Orthogonal(Bare):
    def reset_parameters(self) -> None:
        nn.init.orthogonal_(self.weight)


class Identity(Bare):
    def reset_parameters(self) -> None:
        nn.init.eye_(self.weight)


class Half(Bare):
    def reset_parameters(self) -> None:
        self.weight[:1].fill_(1.0)


@pytest.mark.parametrize(
    ("model", "why"),
    [
        (Bare, "weight: no reset_parameters or _init_weights of a module fills it"),
        (Fails, "weight: Fails.reset_parameters fails on meta: RuntimeError"),
        (Orthogonal, "weight: its initialization uses copy_, which cannot be repeated on a part"),
        (Identity, "weight: its initialization computes it by eye"),
        (Half, "weight: its initialization fills a part of it only"),
    ],
)
def test_a_parameter_of_which_nothing_is_known(model: type[nn.Module], why: str) -> None:
    text = refused(model())
    assert why in text
    assert "linear" not in text
    assert 'init={"weight": msc.Normal(0.02)}' in text
    assert sorted(msc.init(model(), init={"weight": msc.Zeros()}).draws) == [
        "linear.bias",
        "linear.weight",
        "weight",
    ]


def test_what_does_not_fit_is_refused() -> None:
    linear = nn.Linear(3, 3, device="meta")
    assert "fit no parameter" in refused(linear, {"wieght": msc.Zeros()})
    assert "is a float" in refused(linear, {"weight": 0.02})
    wrong = refused(linear, {"weight": lambda shape, dtype: torch.zeros(2)})
    assert "returned Tensor [2]; it must return a tensor of shape [3, 3]" in wrong
    assert "seed is 'a'" in refused(linear, seed="a")
    assert "not a torch.nn.Module" in refused(None)  # type: ignore[arg-type]
