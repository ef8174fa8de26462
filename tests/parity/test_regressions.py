"""Models that once gave a wrong number or an internal error, kept small."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as functional
from torch import Tensor, nn

import msc


class TwoTiedWeights(nn.Module):
    """Stages read the two in different orders."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.shared = nn.Parameter(torch.randn(8, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x) @ self.shared.T @ self.shared
        logits = x @ self.embed.weight.T
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class DetachedOnAnotherStage(nn.Module):
    """The last stage holds a weight of the first, but has no gradient for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x @ self.weight
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (x @ self.weight.detach()).pow(2).mean()


class SummedLosses(nn.Module):
    """Python's `sum` starts with 0; a number is added as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.embed(tokens)).flatten(0, 1)
        losses = [functional.cross_entropy(logits, labels.flatten()) for _ in range(2)]
        return sum(losses) + 0.5  # type: ignore[return-value]


def _ids(*shape: int) -> Tensor:
    return torch.randint(32, shape)


@pytest.mark.parametrize("mesh", ["pp=2", "pp=4", "pp=2,dp=2,tp=2"])
def test_two_tied_weights(mesh: str) -> None:
    torch.manual_seed(0)
    batch = (_ids(4, 8), _ids(4, 8))
    report = msc.verify(TwoTiedWeights(), batch, mesh=mesh, dtype=torch.float64)
    assert report.ok, report.first_difference


@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,tp=2"])
def test_a_tied_weight_without_gradient_on_one_stage_stays_equal(mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = DetachedOnAnotherStage().double(), (torch.randn(4, 16).double(),)
    program = msc.compile(model, batch, mesh=mesh, optimizer=msc.AdamW(lr=0.1))
    result = program.run_virtual(batch)
    copies = [s.parameters["weight"] for s in result.state if "weight" in s.parameters]
    assert len(copies) == program.mesh.size
    assert all(torch.equal(copies[0], copy) or program.mesh.axis_size("tp") > 1 for copy in copies)
    assert msc.verify(model, batch, mesh=mesh).ok


def test_numbers_added_to_a_loss_leave_it_separable() -> None:
    torch.manual_seed(0)
    labels = _ids(4, 8)
    labels[0, :5] = -100
    model, batch = SummedLosses().double(), (_ids(4, 8), labels)
    program = msc.compile(model, batch, mesh="dp=2", microbatches=2)
    assert program.report.notes == ()
    loss = program.run_virtual(batch).loss
    assert float(loss) == pytest.approx(model(*batch).item(), rel=1e-14)


class WindowsOfOneSample(nn.Module):
    """Its backward has a view of a value that is strided otherwise than it was traced."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        b, t, d = x.shape
        x = self.layers[0](x.reshape(b * t, d)).view(b, t // 2, 2, d)
        x = self.layers[1](x.permute(0, 2, 1, 3).reshape(b * 2, t // 2, d))
        x = x.reshape(b, 2, t // 2, d).transpose(1, 2).reshape(b, t, d)
        return functional.mse_loss(x, y)


@pytest.mark.parametrize(("mesh", "samples"), [("", 1), ("dp=2", 2), ("tp=2", 1)])
def test_views_of_one_sample(mesh: str, samples: int) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(samples, 8, 16), torch.randn(samples, 8, 16))
    report = msc.verify(WindowsOfOneSample(), batch, mesh=mesh, dtype=torch.float64)
    assert report.ok, report.first_difference


class LogOfASum(nn.Module):
    """A loss that is no sum over samples, but can be reduced over ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.logsumexp(self.linear(x).flatten(), 0)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_loss_that_is_a_logarithm_of_a_sum(microbatches: int) -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 4),)
    report = msc.verify(
        LogOfASum(), batch, mesh="dp=2", microbatches=microbatches, dtype=torch.float64
    )
    assert report.ok, report.first_difference
    assert bool(report.notes) == (microbatches > 1)


class TransposedWeight(nn.Module):
    """The gradient of the weight has other strides than the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bfd,edf->bef", x, self.weight).pow(2).mean()


@pytest.mark.parametrize("mesh", ["", "tp=2", "dp=2"])
def test_the_optimizer_reads_gradients_of_any_strides(mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = TransposedWeight().double(), (torch.randn(8, 5, 3).double(),)
    program = msc.compile(model, batch, mesh=mesh, optimizer=msc.AdamW(lr=1e-2))
    result = program.run_virtual(batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(*batch).backward()
    optimizer.step()
    torch.testing.assert_close(result.params["weight"], model.weight.detach(), rtol=0, atol=1e-12)


class Spectrum(nn.Module):
    """Complex values on the way of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.fft(self.first(x), dim=1).real).pow(2).mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("mesh", ["tp=2", "pp=2,dp=2,tp=2"])
def test_complex_values_have_gradients(mesh: str) -> None:
    torch.manual_seed(0)
    report = msc.verify(Spectrum(), (torch.randn(4, 6, 4),), mesh=mesh, dtype=torch.float64)
    assert report.ok, report.first_difference


class Lookup(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8, sparse=sparse), nn.Linear(8, 12)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.table(tokens))
        return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("mesh", ["", "tp=2", "tp=5"])
def test_ids_outside_of_the_table_are_refused(mesh: str) -> None:
    tokens = torch.randint(12, (4, 6))
    program = msc.compile(Lookup(), (tokens, tokens), mesh=mesh)
    for wrong, said in ((12, "row 12"), (-1, "row -1")):
        outside = tokens.clone()
        outside[1, 2] = wrong
        with pytest.raises(msc.InputError, match=f"table of 12 rows .*{said}.* 0 to 11"):
            program.run_virtual((outside, tokens))


def test_a_table_with_sparse_gradients() -> None:
    """Its gradient is dense here; the numbers are the same."""
    tokens = torch.randint(12, (4, 6))
    report = msc.verify(Lookup(sparse=True), (tokens, tokens), mesh="tp=2", dtype=torch.float64)
    assert report.ok, report.first_difference


class Flat(nn.Module):
    """No numbered container: the outermost modules are the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.head = nn.GroupNorm(2, 8), nn.Linear(8, 10)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = functional.relu(self.first(x))
        x = functional.relu(self.norm(self.second(x))).mean((2, 3))
        return functional.cross_entropy(self.head(x), labels)


def test_a_flat_model_is_cut_at_its_modules() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 3, 6, 6), torch.randint(10, (4,)))
    report = msc.verify(Flat(), batch, mesh="pp=3,dp=2", microbatches=2, dtype=torch.float64)
    assert report.ok, report.first_difference


class MaskedMean(nn.Module):
    """A zero that is made like a value of the batch, without reading it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.head, self.kind = nn.Linear(4, 5), kind

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        losses = functional.cross_entropy(self.head(x), labels, reduction="none")
        zero = {
            "new_zeros": lambda: losses.new_zeros(()),
            "new_full": lambda: losses.new_full((), 0.0),
            "zeros_like": lambda: torch.zeros_like(losses[0]),
            "ones_like": lambda: torch.ones_like(losses) - 1,
        }[self.kind]()
        return torch.where(labels > 1, losses, zero).sum() / (labels > 1).sum()


@pytest.mark.parametrize("kind", ["new_zeros", "new_full", "zeros_like", "ones_like"])
def test_constants_made_like_a_value_combine_no_samples(kind: str) -> None:
    torch.manual_seed(0)
    model, x = MaskedMean(kind).double(), torch.randn(8, 4).double()
    labels = torch.tensor([0, 0, 4, 3, 1, 0, 4, 3])
    program = msc.compile(model, (x, labels), mesh="dp=2", microbatches=2)
    assert program.report.notes == ()
    loss = program.run_virtual((x, labels)).loss
    torch.testing.assert_close(loss, model(x, labels).detach(), rtol=1e-12, atol=0)


class Teacher(nn.Module):
    """A weight that is used, but that no gradient reaches."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.student, self.teacher, self.kind = nn.Linear(4, 4), nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "no_grad":
            with torch.no_grad():
                aim = self.teacher(x)
        elif self.kind == "detach":
            aim = self.teacher(x).detach()
        else:
            aim = (self.teacher(x) > 0).to(x.dtype)
        return functional.mse_loss(self.student(x), aim)


@pytest.mark.parametrize("kind", ["no_grad", "detach", "compare"])
@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_a_weight_without_gradient_is_left_alone(kind: str, mesh: str) -> None:
    torch.manual_seed(0)
    model, batch = Teacher(kind).double(), (torch.randn(8, 4).double(),)
    program = msc.compile(model, batch, mesh=mesh, optimizer=msc.AdamW(lr=0.1))
    result = program.run_virtual(batch)
    assert set(result.grads) == {"student.weight", "student.bias"}
    assert torch.equal(result.params["teacher.weight"], model.teacher.weight)
    model(*batch).backward()
    assert model.student.weight.grad is not None
    torch.testing.assert_close(result.grads["student.weight"], model.student.weight.grad)


class DropsInAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        p = 0.1 if self.training else 0.0
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=p).square().mean()


def test_dropout_of_attention_alone_is_compared_with_eager_in_eval_mode() -> None:
    torch.manual_seed(0)
    batch = (torch.randn(4, 5, 8),)
    report = msc.verify(DropsInAttention(), batch, mesh="tp=2", dtype=torch.float64)
    assert report.ok, report.first_difference
