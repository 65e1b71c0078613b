"""From a configuration to a model and an optimizer on this rank, in the one order that works."""

from __future__ import annotations

from fnmatch import fnmatch

import torch
from torch import nn

from trainer.compile import apply_compile
from trainer.config import ConfigError, ModelConfig, RunConfig
from trainer.kernels import attention, grouped_mm
from trainer.memory.ac import apply_ac
from trainer.models.init import init_weights
from trainer.models.moe import Router
from trainer.models.qwen3 import Qwen3
from trainer.optim.optimizer import SlabOptimizer, build_optimizer
from trainer.optim.slabs import LocalParameter
from trainer.parallel import local
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import row_group, shard

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def freeze(model: nn.Module, config: ModelConfig) -> None:
    """Stop training the parameters that match model.freeze; a pattern that matches none is an error."""
    names = [name for name, _ in model.named_parameters()]
    for pattern in config.freeze:
        matched = [name for name in names if fnmatch(name, pattern)]
        if not matched:
            raise ConfigError(f"model.freeze: {pattern!r} matches no parameter; names look like {names[1]!r}")
        for name in matched:
            model.get_parameter(name).requires_grad_(False)


def build_model(config: RunConfig, mesh: Mesh) -> tuple[Qwen3, list[str]]:
    """The sharded model with random weights, and in words what was chosen for it.

    Order: meta device -> expert parallel -> activation checkpointing -> compile -> FSDP -> memory -> weights.
    """
    dtype = DTYPES[config.train.param_dtype]
    with torch.device("meta"):
        model = Qwen3(config.model, mesh.ep, mesh.ep_group).to(dtype)
    for module in model.modules():
        if isinstance(module, Router):
            module.data_rank = mesh.rank
    freeze(model, config.model)
    apply_ac(model, config.ac.mode)
    apply_compile(model, config.compile.mode)
    chosen = shard(model, mesh, DTYPES[config.train.grad_dtype])
    model.attention_kernels = attention.choose_kernels(
        mesh.device, dtype, config.model.head_dim, compiled=config.compile.mode != "none"
    )
    model.to_empty(device=mesh.device)
    model.tie_weights()
    init_weights(model, config.train.seed, mesh.ep_rank)
    kernels = [*attention.describe(model.attention_kernels), grouped_mm.describe(mesh.device, dtype)]
    return model, [chosen, *kernels]


def local_parameters(model: Qwen3) -> list[LocalParameter]:
    """The trained parameters as the optimizer sees them."""
    return [
        LocalParameter(
            name=name,
            tensor=local(parameter),
            parameter=parameter,
            decay=parameter.ndim > 1,
            matrix=parameter.ndim > 1 and name.startswith("layers."),
            shard_group=row_group(parameter),
            full_rows=parameter.shape[0],
        )
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]


def build(config: RunConfig, mesh: Mesh) -> tuple[Qwen3, SlabOptimizer, list[str]]:
    """Model and optimizer; weights of model.weights are loaded before the optimizer copies its masters."""
    model, chosen = build_model(config, mesh)
    if config.model.weights:
        from trainer.checkpoint.hugging_face import load_weights  # safetensors is only needed here

        load_weights(model, config.model, mesh)
    optimizer = build_optimizer(config, local_parameters(model), mesh.device, mesh.shard_group)
    optimizer.wait_before_use(model)
    return model, optimizer, chosen
