"""Causal attention with grouped key/value heads; packed documents do not see each other.

Shapes: B sequences, S positions, H query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def document_mask(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Boolean [B, 1, S, S], true where position i may see position j: same document and j <= i."""
    S = document_ids_BS.shape[1]
    same = document_ids_BS[:, None, :, None] == document_ids_BS[:, None, None, :]
    return same & torch.ones(S, S, dtype=torch.bool, device=document_ids_BS.device).tril()


def attention(
    q_BHSd: torch.Tensor, k_BGSd: torch.Tensor, v_BGSd: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """softmax(q k^T / sqrt(d)) v -> [B, H, S, d]; causal where `mask` is None.

    With a mask the key/value heads are repeated: the fused CUDA kernel that takes masks does not group heads, and the
    unfused one would hold H * S * S scores.
    """
    if mask is None:
        return F.scaled_dot_product_attention(q_BHSd, k_BGSd, v_BGSd, is_causal=True, enable_gqa=True)
    repeats = q_BHSd.shape[1] // k_BGSd.shape[1]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k_BGSd, v_BGSd))
    return F.scaled_dot_product_attention(q_BHSd, k, v, attn_mask=mask)


def attention_reference(
    q_BHSd: torch.Tensor, k_BGSd: torch.Tensor, v_BGSd: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """The same with explicit matrix products, which a FLOP counter sees."""
    repeats, S = q_BHSd.shape[1] // k_BGSd.shape[1], q_BHSd.shape[2]
    k, v = (t.repeat_interleave(repeats, dim=1) for t in (k_BGSd, v_BGSd))
    if mask is None:
        mask = torch.ones(S, S, dtype=torch.bool, device=q_BHSd.device).tril()
    scores = (q_BHSd @ k.transpose(-2, -1)).float() * q_BHSd.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype) @ v
