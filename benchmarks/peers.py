"""Training steps of one rank that step_time.py compares: plain PyTorch, its parallel forms, MSC.

Each class builds the model from one seed, so that all of them train the same weights, and has
`step()`, which takes one optimizer step on the same global batch and returns a loss. All use
PyTorch's fused AdamW kernel.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import msc
from benchmarks.models import GPT, GPTConfig, GPTWithLoss, token_loss
from msc.runtime.process import ProcessExecutor

LR = 1e-3
WEIGHT_DECAY = 0.1
MICRO_BATCHES = 4
"""Of the pipelines."""

Batch = tuple[Tensor, Tensor]


def seeded(config: GPTConfig) -> GPTWithLoss:
    """The model with the weights that every candidate starts from."""
    torch.manual_seed(0)
    return GPTWithLoss(config)


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """The optimizer of the peers; its defaults are those of `msc.AdamW`."""
    return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)


class Candidate(ABC):
    """A training step on this rank. `ranks`: those that take part; the others only wait."""

    ranks: Sequence[int] = (0, 1)

    @abstractmethod
    def step(self) -> float:
        """Take one step; return this rank's loss."""

    def whole_loss(self, losses: Sequence[float]) -> float:
        """The loss of the global batch, from that of every rank that takes part."""
        return losses[0]


class Eager(Candidate):
    """The plain model and optimizer on one rank."""

    ranks: Sequence[int] = (0,)

    def __init__(self, config: GPTConfig, batch: Batch) -> None:
        self.batch = batch
        self.model: nn.Module = seeded(config)
        self.optimizer = adamw(self.model)

    def step(self) -> float:
        self.optimizer.zero_grad()
        loss: Tensor = self.model(*self.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()


class DataParallel(Eager):
    """DistributedDataParallel; each rank takes its half of the batch."""

    ranks = (0, 1)

    def __init__(self, config: GPTConfig, batch: Batch) -> None:
        tokens, labels = (part.chunk(dist.get_world_size())[dist.get_rank()] for part in batch)
        super().__init__(config, (tokens, labels))
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)

    def whole_loss(self, losses: Sequence[float]) -> float:
        return sum(losses) / len(losses)


class TensorParallel(Eager):
    """`parallelize_module` with tensor parallel linears and sequence parallel norms."""

    ranks = (0, 1)

    def __init__(self, config: GPTConfig, batch: Batch) -> None:
        super().__init__(config, batch)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
        parallelize_module(self.model, mesh, self._plan(config))
        self.optimizer = adamw(self.model)

    @staticmethod
    def _plan(config: GPTConfig) -> dict[str, Any]:
        def gathered() -> PrepareModuleInput:
            return PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            )

        plan: dict[str, Any] = {
            "gpt.embedding.token": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "gpt.embedding.position": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(0)
            ),
            "gpt.norm": SequenceParallel(),
            "gpt.head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        for index in range(config.layers):
            layer = f"gpt.layers.{index}"
            plan |= {
                f"{layer}.norm1": SequenceParallel(),
                f"{layer}.attention": gathered(),
                f"{layer}.attention.q": ColwiseParallel(),
                f"{layer}.attention.k": ColwiseParallel(),
                f"{layer}.attention.v": ColwiseParallel(),
                f"{layer}.attention.out": RowwiseParallel(output_layouts=Shard(1)),
                f"{layer}.norm2": SequenceParallel(),
                f"{layer}.mlp": gathered(),
                f"{layer}.mlp.up": ColwiseParallel(),
                f"{layer}.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
            }
        return plan


class FirstHalf(nn.Module):
    """Embedding and the first half of the layers."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.embedding = model.embedding
        self.layers = model.layers[: len(model.layers) // 2]

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, sequence] tokens to [batch, sequence, hidden]."""
        x: Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class SecondHalf(nn.Module):
    """The other layers, norm and output layer."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.layers = model.layers[len(model.layers) // 2 :]
        self.norm = model.norm
        self.head = model.head

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to logits."""
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Pipelined(Candidate):
    """`torch.distributed.pipelining` with Schedule1F1B."""

    def __init__(self, config: GPTConfig, batch: Batch) -> None:
        self.tokens, self.labels = batch
        self.last = dist.get_rank() == 1
        model = seeded(config).gpt
        half = SecondHalf(model) if self.last else FirstHalf(model)
        stage = PipelineStage(half, dist.get_rank(), 2, torch.device("cpu"))
        self.schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=token_loss)
        self.optimizer = adamw(half)

    def step(self) -> float:
        self.optimizer.zero_grad()
        losses: list[Tensor] = []
        if self.last:
            self.schedule.step(target=self.labels, losses=losses, return_outputs=False)
        else:
            self.schedule.step(self.tokens, return_outputs=False)
        self.optimizer.step()
        return torch.stack(losses).mean().item() if losses else 0.0

    def whole_loss(self, losses: Sequence[float]) -> float:
        return losses[-1]


class Compiled(Candidate):
    """The program that MSC compiles for a mesh."""

    def __init__(self, config: GPTConfig, batch: Batch, mesh: str, backend: str = "aten") -> None:
        self.program = msc.compile(
            seeded(config),
            batch,
            mesh=mesh,
            optimizer=msc.AdamW(lr=LR, weight_decay=WEIGHT_DECAY),
            microbatches=MICRO_BATCHES if "pp" in mesh else 1,
            backend=backend,
        )
        self.ranks = range(self.program.mesh.size)
        rank = dist.get_rank()
        if rank not in self.ranks:
            return
        self.graph = self.program.rank_graph(rank)
        self.executor = ProcessExecutor(
            self.program.mesh, self.graph, "inductor" if backend == "inductor" else "aten"
        )
        self.state = self.program.initial_state(rank)
        self.inputs = self.program.local_inputs(batch, rank)

    def step(self) -> float:
        inputs = self.state.arguments(self.graph, self.inputs)
        self.outputs = self.executor.run(inputs)  # kept until the next step has run, as in Trainer
        self.state.advance(self.graph, self.outputs)
        return float(self.outputs["loss"])
