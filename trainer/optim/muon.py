"""Muon on slabs: the mathematics of torch.optim.Muon, for stacks of matrices and for matrices sharded by rows.

torch's own class takes neither, and its Newton-Schulz one matrix at a time: 128 experts would be 128 times 15 kernels.
Shapes: B matrices, R rows, C columns.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from trainer.config import OptimizerConfig
from trainer.optim.rule import Part

# torch.optim.Muon's defaults (Keller Jordan's): the quintic's coefficients, its iterations, the least norm.
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
LEAST_NORM = 1e-7


class Muon:
    """torch.optim.Muon with Nesterov momentum and adjust_lr_fn="match_rms_adamw".

    That adjustment makes an update as large as AdamW's, which the other parameters take at the same rate and decay.
    """

    moments = ("momentum",)
    of_matrices = True

    def __init__(self, config: OptimizerConfig):
        self._momentum = config.momentum

    def update(self, part: Part, lr: float, step: int) -> None:
        matrices, momentum = part.matrices, part.moments["momentum"]
        grad = part.scaled_grad()
        momentum.lerp_(grad, 1 - self._momentum)
        update_BRC = grad.lerp(momentum, self._momentum).bfloat16().view(matrices.shape)
        group, full_rows = matrices.shard_group, matrices.full_rows
        if group is None:
            update_BRC = orthogonalize(update_BRC)
        else:
            first, count = sharded_rows(full_rows, group.rank(), group.size())
            full_RC = gather_rows(update_BRC[0], full_rows, group)
            update_BRC = orthogonalize(full_RC[None])[:, first : first + count]
        part.master.mul_(1 - lr * part.weight_decay)
        rms = 0.2 * math.sqrt(max(full_rows, matrices.shape[2]))
        part.master.view(matrices.shape).add_(update_BRC, alpha=-lr * rms)
        part.parameter.copy_(part.master)


def orthogonalize(x_BRC: torch.Tensor) -> torch.Tensor:
    """The nearest (semi-)orthogonal matrix of each, roughly: singular values end between 0.5 and 1.5. bf16."""
    a, b, c = NEWTON_SCHULZ
    tall = x_BRC.shape[1] > x_BRC.shape[2]
    x = x_BRC.mT if tall else x_BRC
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_min(LEAST_NORM)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.mT if tall else x


def sharded_rows(full_rows: int, rank: int, ranks: int) -> tuple[int, int]:
    """First row and number of rows of a rank, split as torch.chunk and FSDP do: the last ranks may have fewer or none."""
    per_rank = -(-full_rows // ranks)
    first = min(rank * per_rank, full_rows)
    return first, min(per_rank, full_rows - first)


def gather_rows(rows_RC: torch.Tensor, full_rows: int, group: ProcessGroup) -> torch.Tensor:
    """The whole matrix from every rank's rows; a collective over the group."""
    per_rank = -(-full_rows // group.size())
    padded = rows_RC.new_zeros(per_rank, rows_RC.shape[1])
    padded[: rows_RC.shape[0]] = rows_RC
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat(parts)[:full_rows]
