"""Expert parallelism: rows go to the rank that holds their expert and come back, by all-to-all with uneven splits.

Both collectives are registered operators, so that a compiled block holds them as single nodes (no graph break at the
host's copy of the counts), and activation checkpointing can name them.
Shapes: P expert-parallel ranks, L local experts, E = P * L experts, R rows, D row width.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group  # the inverse of group.group_name: no public one

from trainer.kernels.permute import combine_rows, gather_rows, invert


@torch.library.custom_op("moe::exchange_counts", mutates_args=())
def exchange_counts(counts_E: torch.Tensor, group_name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tell every rank how many rows it gets for each of its experts.

    Returns received [P, L] int64 on the device, and on the host the rows sent to and received from each rank, [P].
    """
    group = _resolve_process_group(group_name)
    counts = counts_E.view(group.size(), -1)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts.contiguous(), group=group)
    splits = torch.stack((counts.sum(1), received.sum(1))).cpu()
    return received, splits[0].clone(), splits[1].clone()


@exchange_counts.register_fake
def _(counts_E, group_name):
    ranks = _resolve_process_group(group_name).size()
    host = torch.empty(ranks, dtype=counts_E.dtype, device="cpu")
    return counts_E.new_empty(ranks, counts_E.numel() // ranks), host, torch.empty_like(host)


@torch.library.custom_op("moe::all_to_all", mutates_args=())
def all_to_all(
    x_RD: torch.Tensor, send_P: torch.Tensor, receive_P: torch.Tensor, rows: int, group_name: str
) -> torch.Tensor:
    """Exchange rows: send_P[p] rows go to rank p, receive_P[p] come from it; both on the host.

    `rows` is the number of rows that arrive where it is known without looking at the counts, else -1.
    """
    receive = receive_P.tolist()
    out = x_RD.new_empty(sum(receive), x_RD.shape[1])
    dist.all_to_all_single(out, x_RD.contiguous(), receive, send_P.tolist(), group=_resolve_process_group(group_name))
    return out


@all_to_all.register_fake
def _(x_RD, send_P, receive_P, rows, group_name):
    return x_RD.new_empty(torch.library.get_ctx().new_dynamic_size() if rows < 0 else rows, x_RD.shape[1])


def _save_splits(ctx, inputs, output):
    x_RD, send_P, receive_P, _, ctx.group_name = inputs
    ctx.rows = x_RD.shape[0]
    ctx.save_for_backward(send_P, receive_P)


def _all_to_all_backward(ctx, grad_RD):
    send_P, receive_P = ctx.saved_tensors
    return all_to_all(grad_RD, receive_P, send_P, ctx.rows, ctx.group_name), None, None, None, None


all_to_all.register_autograd(_all_to_all_backward, setup_context=_save_splits)


def on_expert_ranks(experts, x_RD, scores_R, ends_E, group: dist.ProcessGroup, rows: int) -> torch.Tensor:
    """Run `experts(x, scores, ends)` where the experts are.

    x_RD [R, D] and scores_R [R] fp32 are grouped by global expert with ends_E [E]; the result has the rows of x_RD.
    `rows` is the number of rows that arrive here, where it is known (balanced routing), else -1.
    """
    name = group.group_name
    counts_E = torch.diff(ends_E, prepend=ends_E.new_zeros(1)).long()
    received_PL, send_P, receive_P = exchange_counts(counts_E, name)
    x = all_to_all(x_RD, send_P, receive_P, rows, name)
    scores = all_to_all(scores_R[:, None], send_P, receive_P, rows, name)

    # Rows arrive ordered by sender, then expert; the experts want them ordered by expert, then sender.
    expert_of_part = torch.arange(received_PL.shape[1], device=x.device).expand_as(received_PL)
    expert_of_row = torch.repeat_interleave(expert_of_part.flatten(), received_PL.flatten(), output_size=x.shape[0])
    order = torch.argsort(expert_of_row, stable=True)
    inverse = invert(order)
    ends_L = received_PL.sum(0).cumsum(0).int()
    y = experts(gather_rows(x, inverse, 1), gather_rows(scores, inverse, 1)[:, 0], ends_L)
    return all_to_all(combine_rows(y, inverse, 1), receive_P, send_P, x_RD.shape[0], name)
