"""Sums of tensors of different dtypes, in one pass over memory."""

from __future__ import annotations

import torch

from trainer.kernels.capability import has_triton


def add(total: torch.Tensor, addend: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """total + addend in `dtype`: in place where total has it already, else in a new tensor. Both contiguous, of a shape."""
    if not has_triton(total.device):
        return total.to(dtype).add_(addend)
    from trainer.kernels import triton_add

    return triton_add.add(total, addend, dtype)
