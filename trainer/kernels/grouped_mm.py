"""One matrix product per expert over rows that are grouped by expert.

Shapes: R rows, E experts, I in, O out. `ends` [E] int32 is the end of each expert's rows; ends[-1] == R always holds
here, because rows past it would be left uninitialised by the grouped kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def grouped_mm(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """x @ weight[e].T for the rows of each expert e: [R, I] -> [R, O].

    Weights are stored [E, O, I], which the grouped kernel takes as a transposed view (the faster layout on Hopper).
    On CUDA the kernel takes bf16 only, so other dtypes go through the loop there.
    """
    if x_RI.is_cuda and x_RI.dtype != torch.bfloat16:
        return grouped_mm_reference(x_RI, weight_EOI, ends_E)
    return F.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=ends_E)


def grouped_mm_reference(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The same as a loop over experts; reads `ends` on the host."""
    sizes = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
    parts = [rows @ weight.T for rows, weight in zip(x_RI.split(sizes), weight_EOI, strict=True)]
    return torch.cat(parts)
