"""Activation checkpointing per block: which operators' outputs are kept for backward.

Routing is never computed twice, whatever the mode: expert ids that differ between forward and recomputation (ties,
rounding) would send gradients to other experts than those that ran.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

aten = torch.ops.aten


def kept_operators(mode: str) -> frozenset:
    """Operators whose outputs are saved. full: routing only; selective: also attention, dense GEMMs and exchanges."""
    routing = {aten.topk.default, aten.sort.stable, torch.ops.moe.exchange_counts.default}
    if mode == "full":
        return frozenset(routing)
    attention = {
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_attention_math.default,
        torch.ops.higher_order.flex_attention,
        torch.ops.moe.flash_attention_4.default,
    }
    return frozenset(routing | attention | {aten.mm.default, aten.addmm.default, torch.ops.moe.all_to_all.default})


def _policy(kept: frozenset, ctx, operator, *args, **kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in kept else CheckpointPolicy.PREFER_RECOMPUTE


def apply_ac(model: nn.Module, mode: str) -> None:
    """Checkpoint every block's forward in place; parameter names do not change. Does nothing for mode none."""
    if mode == "none":
        return
    contexts = partial(create_selective_checkpoint_contexts, partial(_policy, kept_operators(mode)))
    for block in model.layers:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
