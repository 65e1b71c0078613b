"""What an update rule sees: one bounded part of a slab, on the device that computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Matrices:
    """B matrices of the same shape that lie one after the other, or this rank's rows of one (B = 1)."""

    shape: tuple[int, int, int]  # B, local rows, columns
    full_rows: int
    shard_group: ProcessGroup | None = None  # over which the rows are split; None: whole here


@dataclass(frozen=True)
class Part:
    """Flat tensors of equal length; the rule changes master, moments and parameter in place."""

    master: torch.Tensor  # fp32
    grad: torch.Tensor  # fp32 or bf16, before `scale`; left as it is
    scale: torch.Tensor | None  # 0-dim fp32 that multiplies the gradient; None: 1
    moments: dict[str, torch.Tensor]  # fp32
    parameter: torch.Tensor  # takes the updated master in its own dtype
    weight_decay: float
    matrices: Matrices | None = None  # only where the rule asks for them

    def scaled_grad(self) -> torch.Tensor:
        """The gradient in fp32 times the scale, with at most one copy."""
        grad = self.grad.float()
        if self.scale is None:
            return grad
        return torch.mul(grad, self.scale, out=None if grad is self.grad else grad)


class Rule(Protocol):
    """An optimizer without state of its own: its moments lie in the slab."""

    moments: tuple[str, ...]  # names of the fp32 slabs that it needs
    of_matrices: bool  # parts are whole matrices; else any range of elements

    def update(self, part: Part, lr: float, step: int) -> None:
        """Apply optimizer step number `step`, counted from 1, to master, moments and parameter."""
