"""Causal attention with grouped key/value heads; packed documents do not see each other.

Shapes: B sequences, S positions, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from trainer.kernels.capability import has_triton
from trainer.kernels.flash_attention_4 import flash_attention_4, why_no_flash_attention_4

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

BLOCK = 128  # positions that flex_attention masks or skips together


class AttentionKernels(NamedTuple):
    """Which kernel a model runs: for one document a row, and for packed documents."""

    causal: str = "sdpa"  # or flash4
    packed: str = "sdpa"  # with a boolean mask; or flex, or flash4
    missed: str = ""  # why there is nothing faster


class Mask(NamedTuple):
    """Which of the earlier positions a position sees, in its kernel's own form; None: all of them."""

    kernel: str
    form: torch.Tensor | BlockMask | None = None


def choose_kernels(device: torch.device, dtype: torch.dtype, head_dim: int, compiled: bool) -> AttentionKernels:
    """The fastest kernels that run here; flex_attention is one only where the blocks around it are compiled."""
    missed = why_no_flash_attention_4(device, dtype, head_dim)
    if missed is None:
        return AttentionKernels("flash4", "flash4")
    # torch's kernels with a mask hold S x S values and take four times as long as flex_attention.
    return AttentionKernels("sdpa", "flex" if compiled and has_triton(device) else "sdpa", missed)


def describe(kernels: AttentionKernels) -> list[str]:
    """The choice in words, for the start-up log."""
    names = {"sdpa": "scaled_dot_product_attention", "flex": "flex_attention", "flash4": "flash-attn-4"}
    return [
        f"attention: {names[kernels.causal]}, packed documents: {names[kernels.packed]}",
        *([f"  {kernels.missed}"] if kernels.missed else []),
    ]


def make_mask(
    kernels: AttentionKernels, document_ids_BS: torch.Tensor | None, document_starts: torch.Tensor | None
) -> Mask:
    """The mask of a micro-batch, once for all layers; document_ids None: every row is one document.

    document_starts [documents + 1] int32: where each document, or stretch of padding, begins in the flattened batch.
    """
    if document_ids_BS is None:
        return Mask(kernels.causal)
    if kernels.packed == "flash4":
        torch._dynamo.mark_dynamic(document_starts, 0)  # else a new number of documents would compile anew
        return Mask("flash4", document_starts)
    return Mask(kernels.packed, (document_blocks if kernels.packed == "flex" else document_mask)(document_ids_BS))


def document_mask(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Boolean [B, 1, S, S], true where position i may see position j: same document and j <= i."""
    S = document_ids_BS.shape[1]
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    return same & torch.ones(S, S, dtype=torch.bool, device=document_ids_BS.device).tril()


def document_blocks(document_ids_BS: torch.Tensor) -> BlockMask:
    """The same as flex_attention's block mask, from the first and last document of each block: nothing is S x S.

    Ids rise along a row, and padding (-1) is at its end.
    """
    from torch.nn.attention.flex_attention import BlockMask

    S = document_ids_BS.shape[1]
    ids = document_ids_BS.masked_fill(document_ids_BS < 0, S)  # padding comes last: ids never fall
    blocks = F.pad(ids, (0, -S % BLOCK), value=S).unflatten(1, (-1, BLOCK))
    first, last = blocks[:, None, :, 0], blocks[:, None, :, -1]
    n = first.shape[-1]
    below = torch.ones(n, n, dtype=torch.bool, device=ids.device).tril()
    seen = below & (last[..., None, :] >= first[..., :, None])  # [B, 1, query block, key block]
    full = below.tril(-1) & (first[..., None, :] == last[..., :, None])

    def mask_mod(b, h, i, j):
        return (i >= j) & (ids[b, i] == ids[b, j])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full), *_listed(full), BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(S, S)
    )


def _listed(chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many key blocks each query block has, and which: int32, those chosen first."""
    order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True)
    return chosen.sum(-1, dtype=torch.int32), order.int()


def attention(q_BHSd: torch.Tensor, k_BGSd: torch.Tensor, v_BGSd: torch.Tensor, mask: Mask) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v over what `mask` lets see -> [B, H, S, d]."""
    if mask.kernel == "flash4":
        q, k, v = (t.transpose(1, 2) for t in (q_BHSd, k_BGSd, v_BGSd))
        return flash_attention_4(q, k, v, mask.form)[0].transpose(1, 2)
    if mask.kernel == "flex":
        from torch.nn.attention.flex_attention import flex_attention

        return flex_attention(q_BHSd, k_BGSd, v_BGSd, block_mask=mask.form, enable_gqa=True)
    if mask.form is None:
        return F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=True)
    # Repeated heads: the fused CUDA kernel that takes masks does not group them, and the unfused one holds all scores.
    repeats = q_BHSd.shape[1] // k_BGSd.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k_BGSd, v_BGSd))
    return F.scaled_dot_product_attention(q_BHSd, k, v, attn_mask=mask.form)


def attention_reference(q_BHSd: torch.Tensor, k_BGSd: torch.Tensor, v_BGSd: torch.Tensor, mask: Mask) -> torch.Tensor:
    """The same with explicit matrix products, which a FLOP counter sees; takes the masks of sdpa."""
    repeats, S = q_BHSd.shape[1] // k_BGSd.shape[1], q_BHSd.shape[2]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k_BGSd, v_BGSd))
    seen = mask.form
    if seen is None:
        seen = torch.ones(S, S, dtype=torch.bool, device=q_BHSd.device).tril()
    scores = (q_BHSd @ k.transpose(-2, -1)).float() * q_BHSd.shape[-1] ** -0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).to(v.dtype) @ v
