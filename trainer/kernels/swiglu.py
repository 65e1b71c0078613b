"""SwiGLU of the experts, weighted by the router's scores, in one pass over memory each way.

Shapes: R rows, I intermediate size. `gate_up` holds the gate in its first I columns and the up projection behind.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from trainer.kernels.capability import has_triton


def swiglu_reference(gate_up_RJ: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score with J = 2 I, in fp32 and rounded once: [R, 2 I] and [R] fp32 -> [R, I]."""
    gate, up = gate_up_RJ.float().chunk(2, dim=-1)
    return (F.silu(gate) * up * scores_R[:, None]).to(gate_up_RJ.dtype)


# Registered, so that a compiled block launches these kernels as they are: fused by the compiler, the backward reads
# gate and up twice and takes three times as long.
@torch.library.custom_op("moe::swiglu", mutates_args=())
def swiglu(gate_up_RJ: torch.Tensor, scores_R: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up * score with J = 2 I, in fp32 and rounded once: [R, 2 I] and [R] fp32 -> [R, I]."""
    if has_triton(gate_up_RJ.device):
        from trainer.kernels import triton_swiglu

        return triton_swiglu.forward(gate_up_RJ, scores_R)
    return swiglu_reference(gate_up_RJ, scores_R)


@torch.library.custom_op("moe::swiglu_backward", mutates_args=())
def swiglu_backward(
    grad_RI: torch.Tensor, gate_up_RJ: torch.Tensor, scores_R: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate_up [R, 2 I], in its dtype, and of the scores [R] fp32."""
    if has_triton(gate_up_RJ.device):
        from trainer.kernels import triton_swiglu

        return triton_swiglu.backward(grad_RI, gate_up_RJ, scores_R)
    gate, up = gate_up_RJ.float().chunk(2, dim=-1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    grad = grad_RI.float()
    weighted = grad * scores_R[:, None]
    grad_gate = weighted * up * (sigmoid + silu * (1 - sigmoid))
    grad_gate_up = torch.cat((grad_gate, weighted * silu), dim=-1).to(gate_up_RJ.dtype)
    return grad_gate_up, (grad * silu * up).sum(-1)


@swiglu.register_fake
def _(gate_up_RJ, scores_R):
    return gate_up_RJ.new_empty(gate_up_RJ.shape[0], gate_up_RJ.shape[1] // 2)


@swiglu_backward.register_fake
def _(grad_RI, gate_up_RJ, scores_R):
    return torch.empty_like(gate_up_RJ, memory_format=torch.contiguous_format), torch.empty_like(scores_R)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_RI):
    return swiglu_backward(grad_RI, *ctx.saved_tensors)


swiglu.register_autograd(_backward, setup_context=_keep)
