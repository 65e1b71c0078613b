"""A trainer in processes of its own, started as torchrun would, and what it leaves behind."""

import dataclasses
import json
import multiprocessing
import os
import tempfile
from pathlib import Path

from tests.conftest import FORKSERVER
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
NEW = multiprocessing.get_context("spawn")
# A GPU image may have none of them; the trainer has to run all the same.
BLOCKED = "import sys; sys.modules.update(dict.fromkeys(['hydra', 'omegaconf', 'submitit', 'wandb', 'launcher']))"


def freeze(run_dir, run):
    run_dir.mkdir()
    (run_dir / "run.json").write_text(json.dumps(to_dict(run)))
    return run_dir


def start(run_dir, world=1, edit="", timeout_s=120, fresh=False):
    """Run the trainer's processes to their ends, one per rank; returns their exit codes and what they said.

    edit: code that runs before, with RANK_HERE for the rank. fresh: new interpreters, which have imported nothing.
    """
    code = f"{BLOCKED}\nfrom pathlib import Path\nfrom trainer.__main__ import main\n{edit}\nsys.exit(main(Path({str(run_dir)!r})))"
    port = str(20000 + os.getpid() % 10000 + world)
    with tempfile.TemporaryDirectory() as logs:
        processes = []
        for rank in range(world):
            place = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            variables = {name: str(value) for name, value in place.items()} if world > 1 else {}
            arguments = (code.replace("RANK_HERE", str(rank)), variables, f"{logs}/{rank}")
            process = (NEW if fresh else FORKSERVER).Process(target=_run, args=arguments, daemon=True)
            process.start()
            processes.append(process)
        try:
            for process in processes:
                process.join(timeout_s)
            return [(process.exitcode, Path(logs, str(rank)).read_text()) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()


def _run(code, variables, log):
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(1, 2)
    os.environ.update(variables, OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    exec(code, {})  # noqa: S102 (the test wrote it)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def course(run_dir):
    """What a resume may not change."""
    keys = ("step", "loss", "aux_loss", "grad_norm", "lr", "epoch", "eval_loss", "supervised_tokens")
    return [{key: row.get(key) for key in keys} for row in rows(run_dir)]
