"""`torchrun --nproc-per-node N -m trainer RUN_DIR`: run one rank of the job in RUN_DIR."""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from trainer import config as configuration
from trainer.checkpoint.directory import surviving
from trainer.config import ConfigError, RunConfig
from trainer.failure import write_failure
from trainer.parallel.mesh import build_mesh
from trainer.stop import PREEMPTED, Stopped, StopRequest, leave
from trainer.train import train


def environment_rank() -> tuple[int, int]:
    """Rank and local rank as torchrun, submitit's job or a user exported them; a single process needs neither."""
    missing = [
        name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ
    ]
    if missing and len(missing) < 5:
        raise ConfigError(f"{', '.join(missing)} not set, though other variables of torchrun are: start with torchrun")
    return int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))


def start_process_group(config: RunConfig, local_rank: int) -> torch.device:
    """Initialise torch.distributed for the configured device; raises ConfigError where the GPU is not there."""
    if config.cluster.device == "cpu":
        device = torch.device("cpu")
    elif local_rank < torch.cuda.device_count():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    else:
        raise ConfigError(
            f"cluster.device=cuda, but {socket.gethostname()} shows {torch.cuda.device_count()} GPUs to local rank "
            f"{local_rank}: use fewer ranks (parallelism.gpus_per_node) or cluster.device=cpu"
        )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = {"device_id": device} if device.type == "cuda" else {}
    if "RANK" in os.environ:
        dist.init_process_group(backend, **bound)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **bound)
    return device


def same_configuration_everywhere(run_dir: Path) -> str:
    """Compare run.json over all ranks; returns its digest, raises ConfigError naming keys, values and ranks."""
    mine = json.loads((run_dir / "run.json").read_text())
    texts = [None] * dist.get_world_size()
    dist.all_gather_object(texts, configuration.canonical_json(mine))
    if len(set(texts)) > 1:
        flat = [_flatten(json.loads(text)) for text in texts]
        keys = sorted({key for one in flat for key in one if any(other.get(key) != one[key] for other in flat)})
        shown = "; ".join(
            f"{key}: " + ", ".join(f"rank {r} has {f.get(key)!r}" for r, f in enumerate(flat)) for key in keys[:5]
        )
        raise ConfigError(f"ranks read different run.json files, {shown}")
    return configuration.digest(texts[0])


def _flatten(data: dict, prefix: str = "") -> dict:
    flat = {}
    for key, value in data.items():
        flat.update(_flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat


def main(run_dir: Path, stop: StopRequest | None = None) -> int:
    """Run this rank to the end of the run; returns 0, or PREEMPTED where it was asked to stop before that.

    An exception leaves a failure file and the process, but counts as PREEMPTED where it came after the request: what
    asks the ranks to stop asks their helper processes too.
    """
    rank = int(os.environ.get("RANK", "0"))
    try:
        rank, local_rank = environment_rank()
        if (run_dir / "result.json").exists():
            print(f"{run_dir} is done: result.json is there. Prepare another run to train again", flush=True)
            return 0
        (run_dir / f"failure-{rank}.json").unlink(missing_ok=True)  # of a former attempt
        config = configuration.load(run_dir)
        stop = stop or StopRequest(run_dir, rank, config.cluster.grace_s)
        device = start_process_group(config, local_rank)
        digest = same_configuration_everywhere(run_dir)
        train(config, run_dir, build_mesh(config.parallelism, device), digest, stop)
        code = 0
    except Stopped as reason:
        print(reason, flush=True)
        dist.barrier()  # rank 0 has written its last word before any rank ends
        code = PREEMPTED
    except BaseException as error:
        trace = "".join(traceback.format_exception(error))
        if stop is not None and stop.is_pending:
            print(trace, file=sys.stderr, flush=True)
            leave(rank, PREEMPTED, f"{stop.words}; the run goes on from {surviving(run_dir)}")
        write_failure(run_dir, rank, f"{type(error).__name__}: {error}", trace)
        raise
    # Only after success: a failed rank must not wait here for the others.
    dist.destroy_process_group()
    return code


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "run.json").is_file():
        sys.exit("usage: python -m trainer RUN_DIR, a directory with run.json (python -m launcher launch.submit=false)")
    try:
        sys.exit(main(Path(sys.argv[1]).resolve()))
    except ConfigError as error:
        sys.exit(f"error: {error}")
