"""The verbs of one optimizer step. Each decision before a collective rests on an all-reduced value."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainer.config import RunConfig
from trainer.data import Batch
from trainer.data.batch import to_device
from trainer.models.moe import auxiliary_loss
from trainer.models.qwen3 import Qwen3
from trainer.optim.optimizer import SlabOptimizer
from trainer.parallel.mesh import Mesh
from trainer.readback import Readback


class NonFiniteError(RuntimeError):
    """Loss or gradients are not finite."""


@dataclass
class StepTotals:
    """Sums over the micro-batches of all ranks."""

    loss_sum: float
    aux_loss: float  # mean over micro-batches, before its coefficient
    supervised_tokens: int
    real_tokens: int
    padded_tokens: int
    squared_document_len: int  # over the documents; prices causal attention
    stops_asked: int = 0  # ranks that were asked to stop before this step
    tokens_per_expert: list[list[float]] = field(default_factory=list)  # [sparse layer][expert]

    @property
    def loss(self) -> float:
        return self.loss_sum / self.supervised_tokens if self.supervised_tokens else math.nan

    @property
    def load_balance(self) -> list[float]:
        """Most loaded expert over the mean, per sparse layer."""
        return [max(layer) * len(layer) / max(sum(layer), 1.0) for layer in self.tokens_per_expert]


@dataclass(frozen=True)
class QueuedTotals:
    """Sums that a device will have once it has done its work."""

    sums: torch.Tensor  # [7] fp64, the fields of StepTotals in their order
    tokens_per_expert: torch.Tensor | None  # [sparse layers, E]

    def wait(self) -> StepTotals:
        """Wait for the device."""
        loss_sum, aux_loss, *counts = self.sums.tolist()
        experts = [] if self.tokens_per_expert is None else self.tokens_per_expert.tolist()
        return StepTotals(loss_sum, aux_loss, *(int(count) for count in counts), experts)


def forward_backward(
    model: Qwen3,
    batches: list[Batch],
    config: RunConfig,
    mesh: Mesh,
    stop_asked: bool = False,
    before_last: Callable[[Callable[[], int]], None] | None = None,
) -> QueuedTotals:
    """Accumulate the gradients of the step: token losses over the step's global number of supervised tokens.

    Nothing here waits for a GPU, so that it never waits for the host. The auxiliary loss of Hugging Face is the mean
    over all micro-batches of all ranks, so it counts once per step. `before_last` is called before the last backward
    pass with a function that waits for the number of supervised tokens, which a GPU has known since the step began.
    """
    counts = [sum(column) for column in zip(*map(batch_counts, batches), strict=True)]
    counts = torch.tensor([*counts, stop_asked], dtype=torch.float64)
    counts = mesh.all_reduce(to_device(counts, mesh.device))
    supervised_tokens = Readback(counts[0])
    per_token = counts[0].clamp_min(1).reciprocal().float()
    per_micro_batch = 1.0 / (len(batches) * mesh.world_size)
    coefficient = config.model.router_aux_loss_coef

    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    experts = []
    for left, batch in zip(reversed(range(len(batches))), batches, strict=True):
        batch = batch.to(mesh.device)
        loss_sum, statistics = model(*batch.inputs)
        objective = loss_sum * per_token
        sums[0] += loss_sum.detach()
        if statistics:
            real = torch.full((), batch.real_tokens, device=mesh.device)  # filled there: a copy would wait
            auxiliary = auxiliary_loss(statistics, real) * per_micro_batch
            objective = objective + coefficient * auxiliary
            sums[1] += auxiliary.detach()
            experts.append(torch.stack([layer.tokens_per_expert.detach() for layer in statistics]))
        if before_last is not None and not left:
            before_last(lambda: int(supervised_tokens.wait()))
        objective.backward()
    mesh.all_reduce(sums)
    tokens_per_expert = mesh.all_reduce(torch.stack(experts).sum(0)) if experts else None
    return QueuedTotals(torch.cat((sums, counts)), tokens_per_expert)


def batch_counts(batch: Batch) -> list[int]:
    """Supervised, real and padded tokens, and the sum of squared document lengths (sum of 2 p + 1 over positions)."""
    real = (
        batch.document_ids >= 0 if batch.document_ids is not None else torch.ones_like(batch.labels, dtype=torch.bool)
    )
    squared = int(((2 * batch.position_ids + 1) * real).sum())
    return [batch.supervised_tokens, batch.real_tokens, real.numel() - batch.real_tokens, squared]


def refuse_nonfinite(step: int, totals: StepTotals, norm: float, optimizer: SlabOptimizer, mesh: Mesh) -> None:
    """Stop every rank if the all-reduced loss or gradient norm is not finite."""
    loss_ok = math.isfinite(totals.loss_sum) and math.isfinite(totals.aux_loss)
    if loss_ok and math.isfinite(norm):
        return
    weights = (
        "partly updated, so only a checkpoint can be gone on from"
        if optimizer.updates_early
        else (f"those of step {step - 1}")
    )
    names = mesh.gather(optimizer.nonfinite_parameters()[:5])
    found = "; ".join(f"rank {rank}: {', '.join(bad)}" for rank, bad in enumerate(names) if bad)
    none = "none on any rank" + ("" if math.isfinite(norm) else ", the norm overflowed")
    raise NonFiniteError(
        f"step {step}: loss {totals.loss}, auxiliary loss {totals.aux_loss}, gradient norm {norm}; the weights are "
        f"{weights}. Non-finite gradients: {found or none}"
    )


@torch.no_grad()
def evaluate(model: Qwen3, batches: list[Batch], mesh: Mesh) -> float:
    """Mean loss over the supervised tokens of the held-out batches of all ranks."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for batch in (batch.to(mesh.device) for batch in batches):
        loss_sum, _ = model(*batch.inputs)
        sums += torch.stack((loss_sum.double(), sums.new_tensor(batch.supervised_tokens)))
    loss_sum, tokens = mesh.all_reduce(sums).tolist()
    return loss_sum / tokens if tokens else math.nan
