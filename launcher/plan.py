"""Numbers that follow from a resolved configuration, computed once, printed in words and stored as plan.json. Pure."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

from trainer.config import RunConfig
from trainer.flops import Weight, flops_per_token, parameter_counts, weights

GIB = 2**30
BYTES = {"bf16": 2, "fp32": 4}


def make_plan(config: RunConfig) -> dict[str, Any]:
    """plan.json. Memory is the state only (no activations), in GiB; gpu_hours are GPUs x time limit."""
    parallelism, counts, flops = config.parallelism, parameter_counts(config.model), flops_per_token(config)
    tokens = config.data.global_batch_size * config.data.seq_len
    on_gpus = config.cluster.device == "cuda"
    gpu, host = state_memory_gib(config)
    return {
        "world_size": parallelism.world_size,
        "nodes": parallelism.nodes,
        "gpus_per_node": parallelism.gpus_per_node,
        "device": config.cluster.device,
        "axes": {
            "dp_replicate": parallelism.dp_replicate,
            "dp_shard": parallelism.dp_shard,
            "ep": parallelism.ep,
            "efsdp": parallelism.efsdp,
        },
        "grad_accumulation": config.grad_accumulation,
        "tokens_per_step": tokens,
        "tokens_total": tokens * config.train.steps,
        "parameters": {"total": counts.total, "active": counts.active},
        "memory_per_gpu_gib": gpu,
        "host_memory_per_gpu_gib": host,
        "host_memory_per_node_gib": round(host["total"] * parallelism.gpus_per_node, 3),
        "flops_per_token": {
            "mfu": flops.per_token,
            "mfu_causal": flops.per_token_causal,
            "hfu": flops.per_token_executed,
        },
        "flops_per_step": flops.per_token * tokens,
        "time_limit_min": config.cluster.time_limit_min,
        "gpu_hours": parallelism.world_size * config.cluster.time_limit_min / 60 if on_gpus else 0.0,
    }


def state_memory_gib(config: RunConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Parameters, masters, moments and gradients of one rank: on its GPU, and in host memory. In GiB with their total."""
    parts = dict.fromkeys(("parameters", "masters", "moments", "gradients"), 0.0)
    # The gradients of a step's only micro-batch stay as they come; sums are in grad_dtype.
    gradient_dtype = config.train.grad_dtype if config.grad_accumulation > 1 else config.train.param_dtype
    for weight in weights(config.model):
        numel = weight.numel / config.parallelism.dp_shard  # experts too: efsdp x ep = dp_shard
        parts["parameters"] += numel * BYTES[config.train.param_dtype]
        if any(fnmatch(weight.name, pattern) for pattern in config.model.freeze):
            continue
        parts["masters"] += numel * 4
        parts["moments"] += numel * _moment_bytes(config.optimizer.name, weight)
        parts["gradients"] += numel * BYTES[gradient_dtype]
    offloaded = {"none": (), "optimizer": ("moments",), "full": ("masters", "moments", "gradients")}[
        config.offload.mode
    ]
    gpu = {name: size for name, size in parts.items() if name not in offloaded}
    host = {name: size for name, size in parts.items() if name in offloaded}
    return _gib(gpu), _gib(host)


def _moment_bytes(optimizer: str, weight: Weight) -> int:
    """fp32 moments of one element: two for AdamW, none for SignSGD; Muon keeps one for the matrices of the blocks."""
    if optimizer == "sign_sgd":
        return 0
    muon = optimizer == "muon" and weight.kind in ("matrix", "expert") and weight.name.startswith("layers.")
    return 4 if muon else 8


def _gib(parts: dict[str, float]) -> dict[str, float]:
    sizes = {name: round(size / GIB, 3) for name, size in parts.items()}
    return {**sizes, "total": round(sum(parts.values()) / GIB, 3)}


def describe(plan: dict[str, Any]) -> list[str]:
    """The plan in words, one line per subject."""
    axes, device = plan["axes"], "GPUs" if plan["device"] == "cuda" else "CPU processes"
    shard = f"dp_shard {axes['dp_shard']} (expert FSDP {axes['efsdp']} x ep {axes['ep']})"
    micro_batches = f"{plan['grad_accumulation']} micro-batch(es) a rank"
    lines = [
        f"layout      {plan['nodes']} x {plan['gpus_per_node']} {device} = dp_replicate {axes['dp_replicate']} x {shard}",
        f"batch       {plan['tokens_per_step']:,} tokens a step, {micro_batches}; {plan['tokens_total']:,} tokens in all",
        f"parameters  {_short(plan['parameters']['total'])} total, {_short(plan['parameters']['active'])} active",
        f"state       {_parts(plan['memory_per_gpu_gib'])} a rank, activations not counted",
    ]
    if plan["host_memory_per_gpu_gib"]["total"]:
        lines.append(
            f"host        {_parts(plan['host_memory_per_gpu_gib'])} a rank, "
            f"{plan['host_memory_per_node_gib']:,.1f} GiB a node"
        )
    flops = plan["flops_per_token"]
    lines.append(
        f"FLOPs       {flops['mfu']:.4g} a token (causal {flops['mfu_causal']:.4g}, executed {flops['hfu']:.4g}), "
        f"{plan['flops_per_step']:.4g} a step"
    )
    if plan["gpu_hours"]:
        lines.append(f"cost        at most {plan['gpu_hours']:,.1f} GPU-hours (limit {plan['time_limit_min']} min)")
    return lines


def _parts(memory: dict[str, float]) -> str:
    parts = ", ".join(f"{name} {size:,.2f}" for name, size in memory.items() if name != "total")
    return f"{memory['total']:,.2f} GiB ({parts})"


def _short(count: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return str(count)
