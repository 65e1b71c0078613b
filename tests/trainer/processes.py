"""A trainer in processes of its own, started as torchrun would, and what it leaves behind."""

import dataclasses
import json
import os
import subprocess
import sys

from trainer.config import (
    AcConfig,
    ClusterConfig,
    CompileConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    to_dict,
)

MODEL = ModelConfig(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=48,
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, vocab_size=512, router_aux_loss_coef=0.01,
)  # fmt: skip
RUN = RunConfig(
    model=MODEL,
    parallelism=ParallelismConfig(name="auto", nodes=1, gpus_per_node=1, dp_replicate=1, dp_shard=1, ep=1),
    offload=OffloadConfig(mode="none"),
    ac=AcConfig(mode="none"),
    compile=CompileConfig(mode="none"),
    optimizer=OptimizerConfig(lr=1e-2),
    schedule=ScheduleConfig(name="cosine", warmup_steps=2),
    data=DataConfig(seq_len=64, global_batch_size=2, validation_fraction=0.02, eval_every_steps=3),
    train=TrainConfig(steps=6, param_dtype="fp32"),
    logging=LoggingConfig(wandb="disabled"),
    cluster=ClusterConfig(name="local", device="cpu"),
)
TWO = dataclasses.replace(
    RUN, parallelism=ParallelismConfig(name="auto", nodes=1, gpus_per_node=2, dp_replicate=1, dp_shard=2, ep=2)
)
# A GPU image may have none of them; the trainer has to run all the same.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'submitit', 'wandb', 'launcher']))"


def freeze(run_dir, run):
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps(to_dict(run)))
    return run_dir


def begin(run_dir, world=1, edit=""):
    """Start the trainer's processes, one per rank; RANK_HERE in `edit` is the rank."""
    code = f"{BLOCKED}\nfrom pathlib import Path\nfrom trainer.__main__ import main\n{edit}\nsys.exit(main(Path({str(run_dir)!r})))"
    processes = []
    port = str(20000 + os.getpid() % 10000 + world)
    for rank in range(world):
        variables = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": world,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(v) for name, v in variables.items()}
        if world == 1:
            environment = {name: v for name, v in environment.items() if name not in variables}
        command = [sys.executable, "-c", code.replace("RANK_HERE", str(rank))]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    return processes


def end(processes, timeout_s=120):
    """Every process's exit code and output."""
    outputs = [process.communicate(timeout=timeout_s)[0] for process in processes]
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def start(run_dir, world=1, edit="", timeout_s=120):
    """Run the trainer to its end."""
    return end(begin(run_dir, world, edit), timeout_s)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def course(run_dir):
    """What a resume may not change."""
    keys = ("step", "loss", "aux_loss", "grad_norm", "lr", "epoch", "eval_loss", "supervised_tokens")
    return [{key: row.get(key) for key in keys} for row in rows(run_dir)]
