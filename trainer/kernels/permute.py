"""Moving token rows to their experts and back, without atomics: each direction is the other's adjoint.

Shapes: N tokens, K experts per token, R = N * K rows (one per token and chosen expert), D row width, E experts.
Choice c belongs to token c // K and lies in row `inverse[c]` of the sorted order.
"""

from __future__ import annotations

import torch

from trainer.kernels.capability import has_triton


def sort_by_expert(ids_R: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Group choices by expert, in the order of tokens within an expert.

    Returns order [R] (sorted row -> choice), inverse [R] (choice -> sorted row), and ends [E] int32, the end of each
    expert's rows, as grouped_mm wants it.
    """
    sorted_ids, order = torch.sort(ids_R, stable=True)
    experts = torch.arange(num_experts, device=ids_R.device, dtype=sorted_ids.dtype)
    ends = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    return order, invert(order), ends


def invert(order_R: torch.Tensor) -> torch.Tensor:
    """The inverse of a permutation."""
    return torch.empty_like(order_R).scatter(0, order_R, torch.arange(order_R.numel(), device=order_R.device))


# Registered, so that a compiled block launches these kernels as they are: fused with their neighbours, torch 2.11 reads
# every row K times (gather) or takes 4.5 times as long (combine).
@torch.library.custom_op("moe::gather_rows", mutates_args=())
def gather_rows(x_ND: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Copy each token to the rows of its k experts: [N, D] -> [R, D]."""
    if has_triton(x_ND.device):
        from trainer.kernels import triton_permute

        return triton_permute.gather(x_ND, inverse_R, k)
    out = x_ND.new_empty(inverse_R.numel(), x_ND.shape[1])
    return out.index_copy_(0, inverse_R, x_ND.repeat_interleave(k, dim=0))


@torch.library.custom_op("moe::combine_rows", mutates_args=())
def combine_rows(y_RD: torch.Tensor, inverse_R: torch.Tensor, k: int) -> torch.Tensor:
    """Sum the k rows of each token: [R, D] -> [N, D]."""
    if has_triton(y_RD.device):
        from trainer.kernels import triton_permute

        return triton_permute.combine(y_RD, inverse_R, k)
    rows = y_RD[inverse_R]
    return rows.unflatten(0, (-1, k)).sum(1) if k > 1 else rows


@gather_rows.register_fake
def _(x_ND, inverse_R, k):
    return x_ND.new_empty(inverse_R.shape[0], x_ND.shape[1])


@combine_rows.register_fake
def _(y_RD, inverse_R, k):
    return y_RD.new_empty(inverse_R.shape[0] // k, y_RD.shape[1])


def _save_inverse(ctx, inputs, output):
    _, inverse_R, ctx.k = inputs
    ctx.save_for_backward(inverse_R)


def _gather_backward(ctx, grad_RD):
    return combine_rows(grad_RD, *ctx.saved_tensors, ctx.k), None, None


def _combine_backward(ctx, grad_ND):
    return gather_rows(grad_ND, *ctx.saved_tensors, ctx.k), None, None


gather_rows.register_autograd(_gather_backward, setup_context=_save_inverse)
combine_rows.register_autograd(_combine_backward, setup_context=_save_inverse)
