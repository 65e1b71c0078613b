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
    """Flat fp32 tensors of equal length; the rule changes master and moments in place."""

    master: torch.Tensor
    grad: torch.Tensor
    moments: dict[str, torch.Tensor]
    weight_decay: float
    matrices: Matrices | None = None  # only where the rule asks for them


class Rule(Protocol):
    """An optimizer without state of its own: its moments lie in the slab."""

    moments: tuple[str, ...]  # names of the fp32 slabs that it needs
    of_matrices: bool  # parts are whole matrices; else any range of elements

    def update(self, part: Part, lr: float, step: int) -> None:
        """Apply optimizer step number `step`, counted from 1."""
