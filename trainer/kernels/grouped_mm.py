"""One matrix product per expert over rows that are grouped by expert.

Shapes: R rows, E experts, I in, O out. `ends` [E] int32 is the end of each expert's rows; ends[-1] == R always holds
here, because rows past it would be left uninitialised by the grouped kernels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.kernels.quack import has_quack


# Registered, so that a compiled block calls whichever kernel this machine has.
@torch.library.custom_op("moe::grouped_mm", mutates_args=())
def _rows(x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """x @ weight[e] for the rows of each expert e: [R, I] -> [R, O]."""
    if has_quack(x_RI.device, x_RI.dtype):
        from trainer.kernels import quack

        return quack.rows(x_RI, weight_EIO, ends_E)
    if x_RI.is_cuda and x_RI.dtype != torch.bfloat16:  # torch's CUDA kernel takes nothing else
        return _loop(x_RI, weight_EIO, ends_E)
    return F.grouped_mm(x_RI, weight_EIO, offs=ends_E)


@torch.library.custom_op("moe::grouped_mm_weight", mutates_args=())
def _weight(grad_RO: torch.Tensor, x_RI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """grad.T @ x over the rows of each expert, zero where it has none: [E, O, I]."""
    if has_quack(x_RI.device, x_RI.dtype):
        from trainer.kernels import quack

        return quack.weight(grad_RO, x_RI, ends_E)
    if x_RI.is_cuda and x_RI.dtype != torch.bfloat16:
        sizes = _sizes(ends_E)
        return torch.stack([grad.T @ rows for grad, rows in zip(grad_RO.split(sizes), x_RI.split(sizes), strict=True)])
    return F.grouped_mm(grad_RO.T, x_RI, offs=ends_E)


@_rows.register_fake
def _(x_RI, weight_EIO, ends_E):
    return x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[-1])


@_weight.register_fake
def _(grad_RO, x_RI, ends_E):
    return x_RI.new_empty(ends_E.shape[0], grad_RO.shape[1], x_RI.shape[1])


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_RO):
    x_RI, weight_EIO, ends_E = ctx.saved_tensors
    grad_RO = grad_RO.contiguous()
    grad_x = _rows(grad_RO, weight_EIO.mT, ends_E) if ctx.needs_input_grad[0] else None
    grad_weight = _weight(grad_RO, x_RI, ends_E).mT if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None


_rows.register_autograd(_backward, setup_context=_keep)


def describe(device: torch.device, dtype: torch.dtype) -> str:
    """The kernel in words, for the start-up log."""
    return f"experts: {'quack-kernels' if has_quack(device, dtype) else 'torch.nn.functional.grouped_mm'}"


def grouped_mm(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """x @ weight[e].T for the rows of each expert e: [R, I] -> [R, O].

    Weights are stored [E, O, I], which the grouped kernels take as a transposed view (the faster layout on Hopper).
    """
    return _rows(x_RI, weight_EOI.mT, ends_E)


def grouped_mm_reference(x_RI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    """The same as a loop over experts; reads `ends` on the host."""
    return _loop(x_RI, weight_EOI.mT, ends_E)


def _loop(x_RI: torch.Tensor, weight_EIO: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    return torch.cat([rows @ weight for rows, weight in zip(x_RI.split(_sizes(ends_E)), weight_EIO, strict=True)])


def _sizes(ends_E: torch.Tensor) -> list[int]:
    return torch.diff(ends_E, prepend=ends_E.new_zeros(1)).tolist()
