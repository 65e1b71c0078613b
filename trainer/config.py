"""The dataclasses of run.json: one per group, shared by launcher and trainer. Free of torch and of Hydra.

A field with `metadata["choices"]` is an enum written as a string. `0` in a count means "derive it": the launcher's
resolve step replaces it, so a value of 0 never reaches run.json where a number is needed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, get_type_hints


class ConfigError(Exception):
    """A mistake in the configuration; its text names the key, the value and a legal alternative."""


def one_of(default: str, *choices: str) -> Any:
    """A string field that takes only `choices`."""
    return field(default=default, metadata={"choices": choices})


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture, named as in Hugging Face's Qwen3 configs, and what the trainer does with it."""

    name: str = "tiny"
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384  # of dense layers
    num_experts: int = 0  # 0: every layer is dense
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # of one expert
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1  # layer i is sparse if (i + 1) % step == 0 and i is not in mlp_only_layers
    mlp_only_layers: list[int] = field(default_factory=list)
    router_aux_loss_coef: float = 0.0
    vocab_size: int = 512
    max_position_embeddings: int = 40960
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    tokenizer: str = one_of("byte", "byte", "qwen")
    weights: str = ""  # a Hugging Face directory to start from; empty: random weights
    routing: str = one_of("learned", "learned", "balanced")
    router_dtype: str = one_of("fp32", "fp32", "bf16")  # of the router's GEMM
    freeze: list[str] = field(default_factory=list)  # fnmatch patterns of parameter names that are not trained
    recommended_nodes: int = 1  # the layout that parallelism=auto takes
    recommended_gpus_per_node: int = 1
    recommended_ep: int = 1
    recommended_seq_len: int = 2048  # what data.seq_len=0 takes

    def is_sparse(self, layer: int) -> bool:
        """Whether this layer's MLP is a mixture of experts (the rule of Hugging Face's Qwen3MoeDecoderLayer)."""
        return (
            self.num_experts > 0 and (layer + 1) % self.decoder_sparse_step == 0 and layer not in self.mlp_only_layers
        )

    @property
    def num_sparse_layers(self) -> int:
        return sum(self.is_sparse(layer) for layer in range(self.num_hidden_layers))


@dataclass(frozen=True, kw_only=True)
class ParallelismConfig:
    """Mesh axes: world = dp_replicate x dp_shard, and ep divides dp_shard (dp_shard = expert FSDP x ep)."""

    name: str = "auto"
    nodes: int = 0
    gpus_per_node: int = 0
    dp_replicate: int = 1
    dp_shard: int = 0
    ep: int = 0

    @property
    def world_size(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def efsdp(self) -> int:
        """Ranks over which one expert-parallel shard is sharded again."""
        return self.dp_shard // self.ep


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    mode: str = one_of("optimizer", "none", "optimizer", "full")
    prefetch_gib: float = 2.0  # GPU memory for what is on its way: moments (optimizer), leaving gradients (full)


@dataclass(frozen=True, kw_only=True)
class AcConfig:
    mode: str = one_of("full", "none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class CompileConfig:
    mode: str = one_of("block", "none", "block", "fullgraph")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: str = one_of("adamw", "adamw", "muon", "sign_sgd")
    lr: float = 1e-5
    weight_decay: float = 0.1  # matrices only: norms are not decayed
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95  # muon's, for the matrices of the blocks; everything else takes AdamW
    clip_norm: float = 1.0  # 0: no clipping, the norm is reported all the same


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate over steps: warm-up, then the named course, down to min_lr over the last decay_steps."""

    name: str = one_of("constant", "constant", "linear", "cosine", "wsd")
    warmup_steps: int = 0
    decay_steps: int = 0  # 0: every step after the warm-up (linear, cosine)
    min_lr: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    name: str = one_of("sample", "sample", "random", "chat")
    path: str = ""  # chat: a JSONL file or a Hugging Face dataset name
    split: str = "train"  # of a Hugging Face dataset
    seq_len: int = 2048  # 0: the model's recommended_seq_len
    micro_batch_size: int = 1  # sequences per rank and forward
    global_batch_size: int = 0  # sequences per optimizer step over all ranks; 0: one micro-batch per rank
    long_documents: str = one_of("split", "split", "truncate", "drop")  # what happens to one longer than seq_len
    document_len: int = 0  # random: tokens of a document, packed; 0: one document fills a row
    validation_fraction: float = 0.0  # share of documents held out
    eval_every_steps: int = 0  # 0: never
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int = 20
    seed: int = 0
    param_dtype: str = one_of("auto", "auto", "bf16", "fp32")  # auto: bf16 on GPUs, fp32 on CPUs
    grad_dtype: str = one_of("fp32", "fp32", "bf16")  # gradients are reduced and accumulated in it
    stall_timeout_s: float = (
        1800.0  # no finished step for so long: stacks to the logs, exit as failed; 0: wait for ever
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every_steps: int = 0  # 0: no checkpoints
    keep: int = 2  # newest complete ones
    force: bool = False  # save although routing is balanced (such weights are only good for measurements)


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    wandb: str = one_of(
        "auto", "auto", "online", "offline", "disabled"
    )  # auto: online with a key on SLURM, else offline
    project: str = "moe"
    entity: str = ""
    run_name: str = ""  # empty: the run directory's name
    group: str = ""  # empty: the sweep's name
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class BenchmarkConfig:
    peak_flops: str = "auto"  # auto: the device table; measured: a large bf16 GEMM on this GPU; or FLOP/s as a number
    window_steps: int = 10  # the last steps over which the reported medians are taken


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where a run goes. Not part of its identity. Empty, 0 and false: left to the site."""

    name: str = one_of("auto", "auto", "local", "slurm")
    device: str = one_of("auto", "auto", "cpu", "cuda")
    env: dict[str, str] = field(default_factory=dict)  # exported in every rank
    grace_s: float = 60.0  # from a signal to stop to the end of an optimizer step, or the rank leaves without a save
    signal_before_s: int = 300  # SIGUSR2 so long before the time limit: a step and a save; at most half of the limit
    requeue_limit: int = 20  # how often a run that was asked to stop is started again
    node_check: bool = False  # before training: measure every device and stop where one is broken or slow
    node_check_min_share: float = 0.8  # of the median, under which a device is slow
    time_limit_min: int = 1440
    cpus_per_task: int = 0
    partition: str = ""
    account: str = ""
    qos: str = ""
    constraint: str = ""
    reservation: str = ""
    exclusive: bool = False
    gres: str = ""  # in place of --gpus-per-node; none: whole nodes whose GPUs SLURM does not count
    mem: str = ""  # per node, in SLURM's spelling ("0": all)
    mem_per_cpu: str = ""  # in place of mem
    array_parallelism: int = 0  # runs of a sweep at a time; 0: as many as find room
    container: str = one_of("none", "none", "pyxis", "apptainer")  # what the ranks run in
    container_image: str = ""
    container_mounts: list[str] = field(default_factory=list)  # PATH or HOST:CONTAINER; runs_dir is mounted anyway
    python: str = ""  # that the ranks start with; empty: the one that submits, in a container `python`
    mail_type: str = ""  # say END,FAIL
    mail_user: str = ""
    setup: list[str] = field(default_factory=list)  # shell lines before srun
    sbatch_args: list[str] = field(default_factory=list)  # say --exclude=node7
    srun_args: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How this command acts. Not part of the run's identity."""

    dry_run: bool = False
    submit: bool = True
    wait: str = one_of("auto", "auto", "true", "false")  # auto: true on local, false on slurm
    again: str = one_of("none", "none", "failed", "all")
    name: str = ""  # start of the run directory's name; empty: the model's
    runs_dir: str = "runs"
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """run.json: everything that a rank needs to know, resolved."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallelism: ParallelismConfig = field(default_factory=ParallelismConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    ac: AcConfig = field(default_factory=AcConfig)
    compile: CompileConfig = field(default_factory=CompileConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    benchmark: BenchmarkConfig = field(default_factory=BenchmarkConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def grad_accumulation(self) -> int:
        """Micro-batches per rank and optimizer step."""
        return self.data.global_batch_size // (self.data.micro_batch_size * self.parallelism.world_size)


NOT_IDENTITY = ("cluster", "launch", "logging")  # where and how, not what


def from_dict(data: dict[str, Any], cls: type = RunConfig, path: str = "") -> Any:
    """Build a config dataclass from plain containers; raises ConfigError for unknown and missing keys and wrong types."""
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls)]
    unknown, missing = sorted(set(data) - set(names)), sorted(set(names) - set(data))
    if unknown or missing:
        raise ConfigError(f"{path or 'run.json'}: unknown keys {unknown}, missing keys {missing}")
    values = {}
    for name in names:
        hint, value, key = hints[name], data[name], f"{path}{name}"
        if dataclasses.is_dataclass(hint):
            value = from_dict(value, hint, f"{key}.")
        elif hint is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        elif hint in (int, float, str, bool) and type(value) is not hint:
            raise ConfigError(f"{key}={value!r} is not of type {hint.__name__}")
        values[name] = value
    return cls(**values)


def to_dict(config: Any) -> dict[str, Any]:
    """The config as plain containers, ready for JSON and for W&B."""
    return dataclasses.asdict(config)


def looks_secret(name: str) -> bool:
    """Whether the value of an environment variable of this name belongs into no file and no log."""
    return re.search(r"(KEY|TOKEN|SECRET|PASS(WORD|WD)?|CREDENTIAL|AUTH)S?(_|$)", name.upper()) is not None


def canonical_json(data: dict[str, Any]) -> str:
    """Sorted, compact JSON: equal configurations give equal text."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"))


def load(run_dir: Path) -> RunConfig:
    """Read run.json of a run directory."""
    return from_dict(json.loads((run_dir / "run.json").read_text()))


def digest(text: str) -> str:
    """Ten hex digits that name a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]
