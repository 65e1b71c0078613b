"""Replaces every 0, auto and empty name that stands for "derive it". Pure: config and machine in, a new config out."""

from __future__ import annotations

import math
import os
import re
from dataclasses import replace
from pathlib import Path

from launcher.machine import Machine
from trainer.config import ClusterConfig, DataConfig, LoggingConfig, ModelConfig, ParallelismConfig, RunConfig


def resolve(config: RunConfig, machine: Machine) -> RunConfig:
    """The configuration that run.json holds; what cannot be derived is left for check to refuse."""
    cluster = _cluster(config.cluster, config.model, machine)
    parallelism = _parallelism(config.parallelism, config.model)
    param_dtype = config.train.param_dtype
    if param_dtype == "auto":
        param_dtype = "fp32" if cluster.device == "cpu" else "bf16"
    wait = config.launch.wait
    if wait == "auto":
        wait = "true" if cluster.name == "local" else "false"
    weights = config.model.weights
    return replace(
        config,
        model=replace(config.model, weights=_absolute(weights, machine.cwd) if weights else ""),
        parallelism=parallelism,
        data=_data(config.data, config.model, parallelism, machine.cwd),
        train=replace(config.train, param_dtype=param_dtype),
        cluster=cluster,
        logging=_logging(config.logging, cluster, machine),
        launch=replace(config.launch, wait=wait, runs_dir=_absolute(config.launch.runs_dir, machine.cwd)),
    )


def slug(name: str) -> str:
    """A name that is safe in paths, job names and URLs; at most 40 characters."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")[:40] or "run"


def legal_ep(num_experts: int, dp_shard: int) -> list[int]:
    """Every ep that splits the experts evenly and divides dp_shard; ascending."""
    if num_experts <= 0 or dp_shard <= 0:
        return [1]
    return divisors(math.gcd(num_experts, dp_shard))


def divisors(number: int) -> list[int]:
    """Of a number of at least 1; ascending."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def _parallelism(wanted: ParallelismConfig, model: ModelConfig) -> ParallelismConfig:
    nodes = wanted.nodes or model.recommended_nodes
    gpus_per_node = wanted.gpus_per_node or model.recommended_gpus_per_node
    dp_replicate = wanted.dp_replicate or nodes
    dp_shard = wanted.dp_shard or nodes * gpus_per_node // max(dp_replicate, 1)
    ep = wanted.ep
    if ep == 0:
        widest = model.recommended_ep if wanted.name == "auto" else gpus_per_node
        ep = max((ep for ep in legal_ep(model.num_experts, dp_shard) if ep <= widest), default=1)
    return replace(
        wanted, nodes=nodes, gpus_per_node=gpus_per_node, dp_replicate=dp_replicate, dp_shard=dp_shard, ep=ep
    )


def _data(data: DataConfig, model: ModelConfig, parallelism: ParallelismConfig, cwd: Path) -> DataConfig:
    path = data.path
    if is_file_name(path):
        path = _absolute(path, cwd)
    return replace(
        data,
        path=path,
        seq_len=data.seq_len or model.recommended_seq_len,
        global_batch_size=data.global_batch_size or data.micro_batch_size * parallelism.world_size,
    )


def is_file_name(path: str) -> bool:
    """Whether data.path names a file; anything else is the name of a Hugging Face dataset."""
    return path.endswith((".jsonl", ".json")) or path.startswith(("/", "./", "../", "~"))


def _cluster(cluster: ClusterConfig, model: ModelConfig, machine: Machine) -> ClusterConfig:
    name = cluster.name
    if name == "auto":
        name = "slurm" if machine.sbatch else "local"
    device = cluster.device
    if device == "auto":
        device = "cpu" if model.name == "tiny" else "cuda"
    return replace(cluster, name=name, device=device)


def _logging(logging: LoggingConfig, cluster: ClusterConfig, machine: Machine) -> LoggingConfig:
    if logging.wandb != "auto":
        return logging
    online = machine.wandb_key and cluster.name == "slurm"
    return replace(logging, wandb="online" if online else "offline")


def _absolute(path: str, cwd: Path) -> str:
    return os.path.normpath(cwd / Path(path).expanduser())
