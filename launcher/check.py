"""Every rule that a resolved configuration has to keep. Pure but for the files that a configuration names."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from fnmatch import fnmatch
from typing import Any

from launcher.check_cluster import check_cluster
from launcher.environment import SHELL_NAME
from launcher.machine import Machine
from launcher.plan import BYTES, state_memory_gib
from launcher.problem import Problem, files_are_here, problem
from launcher.resolve import divisors, is_file_name, legal_ep, slug
from launcher.weights import check_weights
from trainer.config import RunConfig, to_dict
from trainer.flops import weights

TOKENIZER_SIZE = {"byte": 512, "qwen": 151_669}  # ids; the embedding may be larger
SAMPLE_TOKENS = {"byte": 128_007, "qwen": 70_072}  # of data=sample
# fmt: off
AT_LEAST_ONE = (
    "model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads", "model.num_key_value_heads",
    "model.head_dim", "model.intermediate_size", "model.decoder_sparse_step", "model.vocab_size",
    "model.max_position_embeddings", "parallelism.nodes", "parallelism.gpus_per_node", "parallelism.dp_replicate",
    "parallelism.dp_shard", "parallelism.ep", "data.seq_len", "data.micro_batch_size", "data.global_batch_size",
    "train.steps", "checkpoint.keep", "benchmark.window_steps", "cluster.time_limit_min",
    "cluster.signal_before_s",
)
AT_LEAST_ZERO = (
    "model.num_experts", "model.num_experts_per_tok", "model.moe_intermediate_size", "model.router_aux_loss_coef",
    "optimizer.lr", "optimizer.weight_decay", "optimizer.clip_norm", "schedule.warmup_steps",
    "schedule.decay_steps", "schedule.min_lr", "data.eval_every_steps", "train.seed", "train.stall_timeout_s",
    "checkpoint.every_steps", "cluster.grace_s", "cluster.cpus_per_task", "cluster.array_parallelism",
    "cluster.requeue_limit",
)
ABOVE_ZERO = (
    "model.rope_theta", "model.rms_norm_eps", "optimizer.eps", "model.initializer_range", "offload.prefetch_gib",
)
# fmt: on
AT_MOST = {  # what is counted one by one here; a typing error must not keep the command busy for ever
    "model.num_hidden_layers": 10_000,
    "model.num_experts": 100_000,
    "model.num_attention_heads": 100_000,
    "parallelism.nodes": 100_000,
    "parallelism.gpus_per_node": 1_024,
    "cluster.signal_before_s": 65_535,  # SLURM's own limit
}
BELOW_ONE = ("optimizer.beta1", "optimizer.beta2", "optimizer.momentum", "data.validation_fraction")
SET_BY_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def check(config: RunConfig, machine: Machine) -> list[Problem]:
    """Every broken rule of a resolved configuration; empty if it can run. Changes nothing.

    `machine` matters only where the run is to start on it.
    """
    numbers = list(_numbers(config))
    problems = [*_strings(config), *numbers, *_optimizer(config), *_data(config, machine), *check_cluster(config)]
    if not numbers:  # the others divide by these
        problems += [*_layout(config), *_batch(config), *_model(config), *_compute(config), *check_weights(config)]
        problems += _target(config, machine)
    return problems


def _strings(config: RunConfig) -> Iterator[Problem]:
    def walk(value: Any, key: str) -> Iterator[Problem]:
        if isinstance(value, dict):
            for name, item in value.items():
                yield from walk(item, f"{key}.{name}" if key else name)
        elif isinstance(value, list):
            for item in value:
                yield from walk(item, key)
        elif isinstance(value, str) and re.search(r"[\n\r\0]", value):
            yield Problem((key,), (value,), "holds a line break, which would end a line of the job script early")

    yield from walk(to_dict(config), "")
    if re.fullmatch(r"code|\d{4}-\d\d-\d\d", slug(config.launch.name)):
        yield problem(config, ["launch.name"], "names another directory of launch.runs_dir: frozen code, a day's runs")
    for name, value in config.cluster.env.items():
        if not SHELL_NAME.fullmatch(name):
            yield Problem((f"cluster.env.{name}",), (value,), "is not a name that a shell can export")
        elif name in SET_BY_LAUNCHER:
            yield Problem((f"cluster.env.{name}",), (value,), "is set for every rank by the launcher")


def _numbers(config: RunConfig) -> Iterator[Problem]:
    for key in AT_LEAST_ONE:
        if _value(config, key) < 1:
            yield problem(config, [key], "has to be at least 1")
    for key, most in AT_MOST.items():
        if _value(config, key) > most:
            yield problem(config, [key], f"has to be at most {most:,}")
    for key in AT_LEAST_ZERO:
        if not 0 <= _value(config, key) < math.inf:
            yield problem(config, [key], "has to be 0 or more")
    for key in ABOVE_ZERO:
        if not 0 < _value(config, key) < math.inf:
            yield problem(config, [key], "has to be above 0")
    for key in BELOW_ONE:
        if not 0 <= _value(config, key) < 1:
            yield problem(config, [key], "has to be at least 0 and below 1")
    peak = config.benchmark.peak_flops
    if peak not in ("auto", "measured"):
        try:
            good = 0 < float(peak) < math.inf
        except ValueError:
            good = False
        if not good:
            message = "is neither auto, measured nor a number of FLOP/s"
            yield problem(config, ["benchmark.peak_flops"], message, "benchmark.peak_flops=9.89e14")


def _value(config: RunConfig, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _layout(config: RunConfig) -> Iterator[Problem]:
    p, experts = config.parallelism, config.model.num_experts
    world = ["parallelism.nodes", "parallelism.gpus_per_node", "parallelism.dp_replicate", "parallelism.dp_shard"]
    if p.world_size != p.dp_replicate * p.dp_shard:
        if p.world_size % p.dp_replicate == 0:
            fit = f"parallelism.dp_shard={p.world_size // p.dp_replicate}"
        else:
            fit = "parallelism.dp_replicate=" + "|".join(str(d) for d in divisors(p.world_size))
        yield problem(
            config, world, f"{p.world_size} ranks are not dp_replicate x dp_shard = {p.dp_replicate * p.dp_shard}", fit
        )
    legal = legal_ep(experts, p.dp_shard)
    if p.ep not in legal:
        where = f"{p.dp_shard} ranks of dp_shard (of {p.world_size} ranks)"
        message = (
            f"{experts} experts on {where} cannot be split {p.ep} ways" if experts else "a dense model has no experts"
        )
        keys = ["parallelism.ep", "model.num_experts", "parallelism.dp_shard"]
        yield problem(config, keys, message, "parallelism.ep=" + "|".join(map(str, legal)))


def _batch(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    at_once = data.micro_batch_size * config.parallelism.world_size
    if data.global_batch_size % at_once:
        below = data.global_batch_size // at_once * at_once
        yield problem(
            config,
            ["data.global_batch_size", "data.micro_batch_size"],
            f"is not a multiple of micro_batch_size x {config.parallelism.world_size} ranks = {at_once}",
            *(f"data.global_batch_size={size}" for size in (below, below + at_once) if size),
        )
    tokens = SAMPLE_TOKENS[config.model.tokenizer]
    most_rows = 2 * tokens // data.seq_len + 1  # packed rows are more than half full
    if data.name == "sample" and data.global_batch_size > most_rows:
        yield problem(
            config,
            ["data.name", "data.global_batch_size", "data.seq_len"],
            f"a step takes {data.global_batch_size * data.seq_len:,} tokens, the sample has {tokens:,}",
            "data=random",
            "data=chat",
        )
    if data.seq_len > config.model.max_position_embeddings:
        limit = config.model.max_position_embeddings
        keys = ["data.seq_len", "model.max_position_embeddings"]
        yield problem(config, keys, "sequences are longer than the model's positions", f"data.seq_len={limit}")


def _model(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if model.num_attention_heads % model.num_key_value_heads:
        fit = "model.num_key_value_heads=" + "|".join(str(d) for d in divisors(model.num_attention_heads))
        keys = ["model.num_attention_heads", "model.num_key_value_heads"]
        yield problem(config, keys, "query heads are not a multiple of key-value heads", fit)
    if model.head_dim % 2:
        yield problem(
            config, ["model.head_dim"], "rotary embeddings need an even one", f"model.head_dim={model.head_dim + 1}"
        )
    outside = [layer for layer in model.mlp_only_layers if not 0 <= layer < model.num_hidden_layers]
    if outside:
        yield problem(config, ["model.mlp_only_layers"], f"there are layers 0 to {model.num_hidden_layers - 1}")
    if model.num_experts:
        yield from _experts(config)
    elif model.routing == "balanced":
        yield problem(
            config, ["model.routing", "model.num_experts"], "a dense model routes nothing", "model.routing=learned"
        )
    elif model.router_aux_loss_coef:
        keys = ["model.router_aux_loss_coef", "model.num_experts"]
        yield problem(config, keys, "a dense model has no router", "model.router_aux_loss_coef=0")
    size = TOKENIZER_SIZE[model.tokenizer]
    if config.data.name != "random" and model.vocab_size < size:
        keys = ["model.vocab_size", "model.tokenizer"]
        yield problem(config, keys, f"the tokenizer has {size} ids", f"model.vocab_size={size}", "data=random")
    names = [weight.name for weight in weights(model)]
    for pattern in model.freeze:
        if not any(fnmatch(name, pattern) for name in names):
            yield problem(config, ["model.freeze"], f"{pattern!r} matches no parameter; names look like {names[1]}")
    if all(any(fnmatch(name, pattern) for pattern in model.freeze) for name in names):
        yield problem(config, ["model.freeze"], "nothing is left to train")


def _experts(config: RunConfig) -> Iterator[Problem]:
    model = config.model
    if not 1 <= model.num_experts_per_tok <= model.num_experts:
        keys = ["model.num_experts_per_tok", "model.num_experts"]
        yield problem(config, keys, f"a token goes to 1 to {model.num_experts} experts")
    if not model.num_sparse_layers:
        keys = ["model.num_experts", "model.decoder_sparse_step", "model.mlp_only_layers"]
        yield problem(config, keys, "no layer is sparse", "model.num_experts=0")
    multiple = 16 // BYTES[config.train.param_dtype]  # the grouped GEMM's rows start at multiples of 16 bytes
    for key in ("model.hidden_size", "model.moe_intermediate_size"):
        size = _value(config, key)
        if size < 1 or size % multiple:
            fit = f"{key}={max(1, -(-size // multiple)) * multiple}"
            message = f"has to be a multiple of {multiple}: the grouped GEMM takes rows of 16 bytes"
            yield problem(config, [key, "train.param_dtype"], message, fit)


def _compute(config: RunConfig) -> Iterator[Problem]:
    if config.model.routing == "balanced" and config.checkpoint.every_steps and not config.checkpoint.force:
        keys = ["model.routing", "checkpoint.every_steps", "checkpoint.force"]
        message = "weights trained under forced routing are good for measurements only"
        yield problem(
            config, keys, message, "checkpoint.every_steps=0", "model.routing=learned", "checkpoint.force=true"
        )


def _optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer, schedule, steps = config.optimizer, config.schedule, config.train.steps
    if config.offload.mode == "full" and optimizer.name == "muon":
        message = "Muon's orthogonalisation is not run on the CPU"
        yield problem(
            config, ["offload.mode", "optimizer.name"], message, "offload=optimizer", "optimizer=adamw|sign_sgd"
        )
    if optimizer.lr == 0:
        yield problem(config, ["optimizer.lr"], "trains nothing", "optimizer.lr=1e-5")
    if schedule.warmup_steps + schedule.decay_steps > steps:
        keys = ["schedule.warmup_steps", "schedule.decay_steps", "train.steps"]
        yield problem(config, keys, "warm-up and decay are longer than the run")
    if schedule.min_lr > optimizer.lr:
        yield problem(
            config, ["schedule.min_lr", "optimizer.lr"], "the course ends above the learning rate it decays from"
        )
    if schedule.name == "wsd" and schedule.decay_steps == 0:
        fit = f"schedule.decay_steps={max(1, steps // 5)}"
        yield problem(config, ["schedule.name", "schedule.decay_steps"], "wsd needs the length of its decay", fit)
    if schedule.name == "constant" and (schedule.decay_steps or schedule.min_lr):
        keys = ["schedule.name", "schedule.decay_steps", "schedule.min_lr"]
        yield problem(config, keys, "a constant learning rate does not decay", "schedule=linear|cosine|wsd")


def _data(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    data = config.data
    if data.document_len and data.name != "random":
        yield problem(config, ["data.name", "data.document_len"], "only data=random makes documents", "data=random")
    if data.document_len and not 2 <= data.document_len <= data.seq_len:
        yield problem(
            config,
            ["data.document_len", "data.seq_len"],
            "has to be 0 or from 2 to data.seq_len",
            "data.document_len=0",
        )
    if data.name == "chat" and not data.path:
        yield problem(config, ["data.name", "data.path"], "needs a JSONL file or a Hugging Face dataset", "data=sample")
    elif data.name != "chat" and data.path:
        yield problem(config, ["data.name", "data.path"], "only data=chat reads a path", "data=chat")
    elif data.path and is_file_name(data.path) and files_are_here(config) and not os.access(data.path, os.R_OK):
        yield problem(config, ["data.path"], "cannot be read here")
    elif data.path and not is_file_name(data.path) and (machine.cwd / data.path).exists():
        message = "is taken for a Hugging Face dataset's name, but exists here"
        yield problem(config, ["data.path"], message, f"data.path=./{data.path}")
    if data.eval_every_steps and not data.validation_fraction:
        keys = ["data.eval_every_steps", "data.validation_fraction"]
        yield problem(config, keys, "nothing is held out to evaluate on", "data.validation_fraction=0.05")


def _target(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """What stands in the way of running here; a run for SLURM or for torchrun elsewhere is not held up by it."""
    p, cluster = config.parallelism, config.cluster
    if cluster.name == "slurm":
        if config.launch.submit and not config.launch.dry_run and not machine.sbatch:
            message = "sbatch is not on PATH of this machine, or has no cluster"
            yield problem(
                config, ["cluster.name"], message, "launch.dry_run=true", "cluster=local", concerns_machine=True
            )
        return
    if not config.launch.submit:
        return
    here = "cluster=local is one machine" + (
        "" if machine.sbatch else " (sbatch is not on PATH or has no cluster, so cluster=auto means local)"
    )
    if p.nodes > 1:
        keys = ["cluster.name", "parallelism.nodes"]
        yield problem(
            config, keys, here, "cluster=slurm launch.dry_run=true", "parallelism.nodes=1", concerns_machine=True
        )
    if cluster.device == "cuda" and p.world_size > machine.gpus:
        layers = min(2, config.model.num_hidden_layers)
        truncated = (
            f"model.num_hidden_layers={layers} parallelism.nodes=1 parallelism.gpus_per_node={max(1, machine.gpus)}"
        )
        fits = [
            f"a truncated model that fits: {truncated}",
            "cluster=slurm launch.dry_run=true for the plan and the script",
        ]
        if machine.gpus == 0:
            fits.append("cluster.device=cpu for a model of tiny's size")
        keys = ["parallelism.nodes", "parallelism.gpus_per_node"]
        message = f"asks for {p.world_size} GPUs, this machine has {machine.gpus}"
        yield problem(config, keys, message, *fits, concerns_machine=True)
    elif not list(_layout(config)):
        gpu, host = state_memory_gib(config)
        ram = (host["total"] + (gpu["total"] if cluster.device == "cpu" else 0.0)) * p.gpus_per_node
        if ram > machine.memory_gib:
            message = f"its state takes {ram:,.1f} GiB of host memory, this machine has {machine.memory_gib:,.1f}"
            keys = ["model.num_hidden_layers", "offload.mode", "cluster.device"]
            yield problem(config, keys, message, "model.num_hidden_layers=2", concerns_machine=True)
