"""Qwen3, dense and mixture of experts (arXiv:2505.09388), with Hugging Face's module names.

Shapes: B sequences, S positions, N = B * S tokens, D hidden_size, H num_attention_heads, G num_key_value_heads,
d head_dim, V vocab_size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.config import ModelConfig
from trainer.kernels.attention import AttentionKernels, Mask, attention, make_mask
from trainer.kernels.cross_entropy import linear_cross_entropy
from trainer.models.moe import RoutingStats, SparseMoe


class Context(NamedTuple):
    """What every block needs besides the hidden states."""

    cos: torch.Tensor  # [B, 1, S, d], in the parameters' dtype
    sin: torch.Tensor
    mask: Mask
    real: torch.Tensor | None  # [N], false for padding; None: no padding


class RMSNorm(nn.Module):
    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary(position_ids_BS: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype):
    """cos and sin of the rotary embedding, [B, 1, S, d]; angles in fp32."""
    exponent = torch.arange(0, head_dim, 2, device=position_ids_BS.device, dtype=torch.float32) / head_dim
    angle = position_ids_BS[:, None, :, None].float() * theta**-exponent
    angle = torch.cat((angle, angle), dim=-1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x_BHSd: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply the rotary embedding to halves (Hugging Face's layout)."""
    first, second = x_BHSd.chunk(2, dim=-1)
    return x_BHSd * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        D, d = config.hidden_size, config.head_dim
        self.head_dim = d
        self.q_proj = nn.Linear(D, config.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(D, config.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * d, D, bias=False)
        self.q_norm = RMSNorm(d, config.rms_norm_eps)
        self.k_norm = RMSNorm(d, config.rms_norm_eps)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> torch.Tensor:
        q, k, v = (
            proj(x_BSD).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = rotate(self.q_norm(q), context.cos, context.sin)
        k = rotate(self.k_norm(k), context.cos, context.sin)
        return self.o_proj(attention(q, k, v, context.mask).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, config: ModelConfig):
        super().__init__()
        D, I = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(D, I, bias=False)
        self.up_proj = nn.Linear(D, I, bias=False)
        self.down_proj = nn.Linear(I, D, bias=False)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x_ND)) * self.up_proj(x_ND))


class Block(nn.Module):
    """One decoder layer. Its routing statistics are outputs, so that recomputation cannot count them twice."""

    def __init__(self, config: ModelConfig, layer: int, ep: int, ep_group: dist.ProcessGroup | None):
        super().__init__()
        self.sparse = config.is_sparse(layer)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SparseMoe(config, ep, ep_group) if self.sparse else Mlp(config)

    def forward(self, x_BSD: torch.Tensor, context: Context) -> tuple[torch.Tensor, RoutingStats | None]:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), context)
        normed_ND = self.post_attention_layernorm(x_BSD).flatten(0, 1)
        if self.sparse:
            y_ND, stats = self.mlp(normed_ND, context.real)
        else:
            y_ND, stats = self.mlp(normed_ND), None
        return x_BSD + y_ND.view_as(x_BSD), stats


class Qwen3(nn.Module):
    def __init__(self, config: ModelConfig, ep: int = 1, ep_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.config = config
        self.attention_kernels = AttentionKernels()
        # From an empty tensor: torch's own initialisation would be thrown away, and on meta it imports the compiler.
        self.embed_tokens = nn.Embedding.from_pretrained(
            torch.empty(config.vocab_size, config.hidden_size), freeze=False
        )
        self.layers = nn.ModuleList(Block(config, i, ep, ep_group) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make a tied head the embedding; again after Module.to_empty, which takes shared parameters apart."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        document_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        document_starts: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, list[RoutingStats]]:
        """Sum of the token losses (fp32 scalar), or logits [B, S, V] without labels; and the sparse layers' statistics.

        Inputs are int64 [B, S]; labels are already shifted, -100 is not supervised; document_ids None means that every
        row is one document without padding, -1 marks padding. Only flash-attn-4 needs document_starts (make_mask).
        """
        x_BSD = self.embed_tokens(input_ids)
        cos, sin = rotary(position_ids, self.config.head_dim, self.config.rope_theta, x_BSD.dtype)
        mask = make_mask(self.attention_kernels, document_ids, document_starts)
        context = Context(cos, sin, mask, None if document_ids is None else (document_ids >= 0).flatten())
        statistics = []
        for block in self.layers:
            x_BSD, stats = block(x_BSD, context)
            if stats is not None:
                statistics.append(stats)
        hidden_BSD = self.norm(x_BSD)
        if labels is None:
            return self.lm_head(hidden_BSD), statistics
        return linear_cross_entropy(hidden_BSD.flatten(0, 1), self.lm_head.weight, labels.flatten()), statistics
