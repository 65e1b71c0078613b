"""Sparse mixture of experts: router, routing and experts.

Shapes: N tokens, D hidden_size, E num_experts, K num_experts_per_tok, R = N * K rows, I moe_intermediate_size,
L local experts (E / ep).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from trainer.config import ModelConfig
from trainer.kernels.grouped_mm import grouped_mm
from trainer.kernels.permute import combine_rows, gather_rows, sort_by_expert
from trainer.kernels.swiglu import swiglu
from trainer.parallel.dispatch import on_expert_ranks


class RoutingStats(NamedTuple):
    """What one layer's router did with the real tokens (padding left out)."""

    tokens_per_expert: torch.Tensor  # [E] fp32
    probability_sum: torch.Tensor  # [E] fp32, of the router's softmax; carries gradient


def balanced_ids(num_tokens: int, num_experts: int, top_k: int, first_slot: int, device: torch.device) -> torch.Tensor:
    """Expert ids [N, K] that load every expert equally (counts differ by at most 1), without looking at the tokens.

    Slots are dealt to the experts in turn, with a stride of about E / K, so that a token's experts are distinct and
    spread over the expert-parallel ranks. `first_slot` continues the deal of another rank.
    """
    slot = (torch.arange(num_tokens * top_k, device=device) + first_slot) % num_experts
    stride, longer = divmod(num_experts, top_k)  # `longer` of the K strides hold one expert more
    position = slot % top_k
    expert = position * stride + position.clamp_max(longer) + slot // top_k
    return expert.view(num_tokens, top_k)


class Router(nn.Module):
    """Softmax over all experts in fp32, then the top k (Qwen3's order), renormalised if norm_topk_prob."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.top_k = config.num_experts_per_tok
        self.num_experts = config.num_experts
        self.norm_topk_prob = config.norm_topk_prob
        self.balanced = config.routing == "balanced"
        self.fp32 = config.router_dtype == "fp32"
        self.data_rank = 0  # balanced routing of rank r continues where rank r - 1 stops
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x_ND: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns scores [N, K] fp32, expert ids [N, K], and probabilities [N, E] fp32."""
        x, weight = (x_ND.float(), self.weight.float()) if self.fp32 else (x_ND, self.weight)
        probabilities = F.linear(x, weight).softmax(-1, dtype=torch.float32)
        if self.balanced:
            N = x_ND.shape[0]
            first_slot = self.data_rank * N * self.top_k % self.num_experts
            ids = balanced_ids(N, self.num_experts, self.top_k, first_slot, x_ND.device)
            scores = probabilities.gather(1, ids)
        else:
            scores, ids = probabilities.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores, ids, probabilities


class Experts(nn.Module):
    """The SwiGLU experts of this expert-parallel rank, gate and up in one weight."""

    def __init__(self, config: ModelConfig, ep: int):
        super().__init__()
        self.num_local_experts = config.num_experts // ep
        L, I, D = self.num_local_experts, config.moe_intermediate_size, config.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(L, 2 * I, D))
        self.down_proj = nn.Parameter(torch.empty(L, D, I))

    def forward(self, x_RD: torch.Tensor, scores_R: torch.Tensor, ends_L: torch.Tensor) -> torch.Tensor:
        """Rows grouped by local expert -> their outputs, weighted by their scores: [R, D] -> [R, D].

        The score multiplies the hidden state before the down projection: the same product, and the output of the
        down projection is not needed again in backward.
        """
        hidden = swiglu(grouped_mm(x_RD, self.gate_up_proj, ends_L), scores_R)
        return grouped_mm(hidden, self.down_proj, ends_L)


class SparseMoe(nn.Module):
    """Router and experts of one layer; with an expert-parallel group, rows travel to their expert's rank."""

    def __init__(self, config: ModelConfig, ep: int, ep_group: dist.ProcessGroup | None):
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, ep)
        self.ep_group = ep_group if ep > 1 else None

    def forward(self, x_ND: torch.Tensor, real_N: torch.Tensor | None) -> tuple[torch.Tensor, RoutingStats]:
        """real_N is false for padding, None where there is none; padding is routed but not counted."""
        N, K, E = x_ND.shape[0], self.gate.top_k, self.gate.num_experts
        scores_NK, ids_NK, probabilities_NE = self.gate(x_ND)
        order, inverse, ends = sort_by_expert(ids_NK.flatten(), E)
        x_RD = gather_rows(x_ND, inverse, K)
        scores_R = scores_NK.flatten()[order]
        if self.ep_group is None:
            y_RD = self.experts(x_RD, scores_R, ends)
        else:
            even = self.gate.balanced and N * K % E == 0
            y_RD = on_expert_ranks(self.experts, x_RD, scores_R, ends, self.ep_group, N * K if even else -1)
        y_ND = combine_rows(y_RD, inverse, K)

        if real_N is None:
            counts_E = torch.diff(ends, prepend=ends.new_zeros(1)).float()
            return y_ND, RoutingStats(counts_E, probabilities_NE.sum(0))
        weight_N = real_N.float()
        counts_E = weight_N.new_zeros(E).scatter_add(0, ids_NK.flatten(), weight_N.repeat_interleave(K))
        return y_ND, RoutingStats(counts_E, weight_N @ probabilities_NE)


def moe_reference(moe: SparseMoe, x_ND: torch.Tensor) -> torch.Tensor:
    """The same layer (ep = 1) as a loop over experts, the score applied to the output as in Hugging Face's code."""
    scores_NK, ids_NK, _ = moe.gate(x_ND)
    y_ND = torch.zeros_like(x_ND)
    for expert in range(moe.gate.num_experts):
        token, choice = torch.where(ids_NK == expert)
        gate, up = (x_ND[token] @ moe.experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        out = (F.silu(gate) * up) @ moe.experts.down_proj[expert].T
        y_ND = y_ND.index_add(0, token, out * scores_NK[token, choice, None].to(out.dtype))
    return y_ND


def auxiliary_loss(stats: list[RoutingStats], real_tokens: torch.Tensor) -> torch.Tensor:
    """Load-balancing loss of Hugging Face's Qwen3-MoE: all sparse layers pooled, before router_aux_loss_coef.

    E * sum_e f_e * P_e with f_e the share of (layer, token) pairs that chose e (it sums to K over experts) and P_e the
    mean router probability. `real_tokens` counts the tokens behind the statistics of one layer.
    """
    counts = torch.stack([s.tokens_per_expert for s in stats]).sum(0)
    probabilities = torch.stack([s.probability_sum for s in stats]).sum(0)
    pairs = (real_tokens * len(stats)).clamp_min(1)
    return counts.numel() * ((counts / pairs) * (probabilities / pairs)).sum()
