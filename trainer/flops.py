"""What a model costs: parameters, FLOPs per token, and the peak of the devices it runs on. Free of torch.

Shapes: D hidden_size, H num_attention_heads, G num_key_value_heads, d head_dim, E num_experts, K num_experts_per_tok,
I intermediate size, V vocab_size, L layers, S sequence length. A multiply-add is 2 FLOPs.

Model FLOPs of training are 3 passes (forward, gradient of the input, gradient of the weight) over the matrices that a
token meets, and over the two products of attention. Recomputation is never part of `mfu`; it is of `hfu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import NamedTuple

from trainer.config import ModelConfig, RunConfig


class Weight(NamedTuple):
    """One parameter of the model, under the name that the trainer's model gives it."""

    name: str
    numel: int
    kind: str  # matrix: every token meets it; expert: all E of them in one; lookup: the embedding; vector: a norm


@dataclass(frozen=True, kw_only=True)
class ParameterCounts:
    total: int  # a tied head once
    active: int  # all but the experts that a token does not go to
    active_matmul: int  # what a token is multiplied with: the head always, the embedding's lookup never
    experts: int  # all routed experts


@dataclass(frozen=True, kw_only=True)
class Flops:
    """FLOPs per token and optimizer step, under three conventions."""

    per_token: float  # attention in full, the reference benchmark's convention: mfu
    per_token_causal: float  # only the products that the mask keeps: mfu_causal
    per_token_executed: float  # causal, and what activation checkpointing computes again: hfu


def weights(model: ModelConfig) -> Iterator[Weight]:
    """Every parameter in the order of the forward pass; a tied head is the embedding, met as a matrix."""
    D, d = model.hidden_size, model.head_dim
    q, kv = model.num_attention_heads * d, model.num_key_value_heads * d
    embedding = model.vocab_size * D
    yield Weight("embed_tokens.weight", embedding, "matrix" if model.tie_word_embeddings else "lookup")
    for layer in range(model.num_hidden_layers):
        at = f"layers.{layer}"
        yield Weight(f"{at}.input_layernorm.weight", D, "vector")
        yield Weight(f"{at}.self_attn.q_proj.weight", q * D, "matrix")
        yield Weight(f"{at}.self_attn.k_proj.weight", kv * D, "matrix")
        yield Weight(f"{at}.self_attn.v_proj.weight", kv * D, "matrix")
        yield Weight(f"{at}.self_attn.o_proj.weight", D * q, "matrix")
        yield Weight(f"{at}.self_attn.q_norm.weight", d, "vector")
        yield Weight(f"{at}.self_attn.k_norm.weight", d, "vector")
        yield Weight(f"{at}.post_attention_layernorm.weight", D, "vector")
        if model.is_sparse(layer):
            E, I = model.num_experts, model.moe_intermediate_size
            yield Weight(f"{at}.mlp.gate.weight", E * D, "matrix")
            yield Weight(f"{at}.mlp.experts.gate_up_proj", E * 2 * I * D, "expert")
            yield Weight(f"{at}.mlp.experts.down_proj", E * D * I, "expert")
        else:
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield Weight(f"{at}.mlp.{name}.weight", model.intermediate_size * D, "matrix")
    yield Weight("norm.weight", D, "vector")
    if not model.tie_word_embeddings:
        yield Weight("lm_head.weight", embedding, "matrix")


def _active(weight: Weight, model: ModelConfig) -> int:
    """Elements that one token meets."""
    if weight.kind == "expert":
        return weight.numel // model.num_experts * model.num_experts_per_tok
    return weight.numel


def parameter_counts(model: ModelConfig) -> ParameterCounts:
    """Count the parameters of the whole model, over all ranks."""
    listed = list(weights(model))
    return ParameterCounts(
        total=sum(w.numel for w in listed),
        active=sum(_active(w, model) for w in listed),
        active_matmul=sum(_active(w, model) for w in listed if w.kind in ("matrix", "expert")),
        experts=sum(w.numel for w in listed if w.kind == "expert"),
    )


def flops_per_token(config: RunConfig, documents: list[int] | None = None) -> Flops:
    """FLOPs per token of this run.

    `documents`: lengths of the documents packed into one row of data.seq_len positions; None: one document fills it.
    """
    if documents is None:
        return flops_at_length(config, config.data.seq_len)
    return flops_at_length(config, sum(length**2 for length in documents) / config.data.seq_len)


def flops_at_length(config: RunConfig, document_len: float) -> Flops:
    """FLOPs per token where the causal mask leaves on average half of `document_len` positions to a token.

    For packed rows that is the sum of the squared document lengths over all positions, padding included.
    What backward does not compute is not counted: the weight gradient of a frozen matrix, and below the first layer
    with something to train any gradient at all.
    """
    model = config.model
    first, matmul = _first_in_backward(model), 0.0
    below_head = any(not _is_frozen(w, model) for w in weights(model) if w.name != "lm_head.weight")
    for weight in weights(model):
        if weight.kind in ("matrix", "expert"):
            layer = _layer(weight)
            reached = below_head if layer is None else layer >= first
            matmul += 2 * (1 + reached + (not _is_frozen(weight, model))) * _active(weight, model)
    passes = 3 * model.num_hidden_layers - 2 * first  # through the layers
    attention = 4 * passes * model.num_attention_heads * model.head_dim  # per attended position
    causal = matmul + attention / 2 * document_len
    return Flops(
        per_token=matmul + attention * config.data.seq_len,
        per_token_causal=causal,
        per_token_executed=causal + _recomputed(config, first, document_len),
    )


def _is_frozen(weight: Weight, model: ModelConfig) -> bool:
    return any(fnmatch(weight.name, pattern) for pattern in model.freeze)


def _layer(weight: Weight) -> int | None:
    parts = weight.name.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _first_in_backward(model: ModelConfig) -> int:
    """The first layer that backward goes through; num_hidden_layers if only what follows them is trained."""
    first = next((weight for weight in weights(model) if not _is_frozen(weight, model)), None)
    if first is not None and first.name == "embed_tokens.weight":
        return 0
    layer = None if first is None else _layer(first)
    return model.num_hidden_layers if layer is None else layer


def _recomputed(config: RunConfig, first: int, document_len: float) -> float:
    """FLOPs per token that activation checkpointing executes once more, in the layers from `first` on.

    full: the forward pass of every block, the router's GEMM included. selective: the experts' GEMMs, as attention and
    the dense GEMMs are kept. Nothing needs the output of an MLP's last GEMM in backward, so it is not repeated where
    the recomputation can stop before it: in dense layers, and in every compiled block. The head is outside the blocks.
    """
    if config.ac.mode == "none":
        return 0.0
    last = ("mlp.down_proj.weight",) if config.compile.mode == "none" else ("mlp.down_proj.weight", "experts.down_proj")
    kinds = ("matrix", "expert") if config.ac.mode == "full" else ("expert",)
    model, layers = config.model, config.model.num_hidden_layers
    repeated = sum(
        2 * _active(weight, model)
        for weight in weights(model)
        if weight.kind in kinds and not weight.name.endswith(last) and _layer(weight) in range(first, layers)
    )
    attention = 2 * (layers - first) * model.num_attention_heads * model.head_dim * document_len
    return repeated + (attention if config.ac.mode == "full" else 0.0)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device by its exact name (nvidia-smi's, amd-smi's); None where we do not know it."""
    return {
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-PCIE-40GB": 312e12,
        "NVIDIA A100 80GB PCIe": 312e12,
        "A100-SXM4-40GB": 312e12,  # drivers before 470 leave the vendor out
        "A100-PCIE-40GB": 312e12,
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 NVL": 835e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA B200": 2.25e15,
        "NVIDIA B300 SXM6 AC": 2.25e15,
        "NVIDIA GB200": 2.5e15,
        "NVIDIA GB300": 2.5e15,
        "AMD Instinct MI300X": 1307.4e12,
        "AMD Instinct MI300X OAM": 1307.4e12,
        "AMD Instinct MI300X VF": 1307.4e12,  # what a virtual machine sees of a whole one
        "AMD Instinct MI325X": 1307.4e12,
        "AMD Instinct MI325X OAM": 1307.4e12,
        "AMD Instinct MI325X VF": 1307.4e12,
        "AMD Instinct Mi325X VF": 1307.4e12,  # amd-smi also prints it so
    }.get(device_name)
