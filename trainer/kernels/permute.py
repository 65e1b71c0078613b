"""Moving token rows to their experts and back, without atomics: both directions are a gather.

Shapes: N tokens, K experts per token, R = N * K rows (one per token and chosen expert), D model dim, E experts.
Row r of the sorted order is the choice `order[r]`, which belongs to token `order[r] // K`.
"""

from __future__ import annotations

import torch


def sort_by_expert(ids_R: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group choices by expert, in the order of tokens within an expert.

    Returns order [R] (sorted row -> choice), inverse [R] (choice -> sorted row), and ends [E] int32, the end of each
    expert's rows, as grouped_mm wants it.
    """
    sorted_ids, order = torch.sort(ids_R, stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    experts = torch.arange(num_experts, device=ids_R.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    return order, inverse, ends


class _Gather(torch.autograd.Function):
    """x[order // k]; its adjoint is a gather by the inverse and a sum over k."""

    @staticmethod
    def forward(ctx, x_ND, order_R, inverse_R, k):
        ctx.save_for_backward(order_R, inverse_R)
        ctx.k = k
        return x_ND[order_R // k if k > 1 else order_R]

    @staticmethod
    def backward(ctx, grad_RD):
        order_R, inverse_R = ctx.saved_tensors
        return _Combine.apply(grad_RD, order_R, inverse_R, ctx.k), None, None, None


class _Combine(torch.autograd.Function):
    """Sum over each token's k rows; its adjoint is the gather."""

    @staticmethod
    def forward(ctx, y_RD, order_R, inverse_R, k):
        ctx.save_for_backward(order_R, inverse_R)
        ctx.k = k
        rows = y_RD[inverse_R]
        return rows.unflatten(0, (-1, k)).sum(1) if k > 1 else rows

    @staticmethod
    def backward(ctx, grad_ND):
        order_R, inverse_R = ctx.saved_tensors
        return _Gather.apply(grad_ND, order_R, inverse_R, ctx.k), None, None, None


def gather_rows(x_ND: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Copy each token to the rows of its k experts: [N, D] -> [R, D]."""
    return _Gather.apply(x_ND, order_R, inverse_R, k)


def combine_rows(y_RD: torch.Tensor, order_R: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Sum the k rows of each token: [R, D] -> [N, D]."""
    return _Combine.apply(y_RD, order_R, inverse_R, k)
