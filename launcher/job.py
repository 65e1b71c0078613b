"""`python -m launcher.job RUN_DIR`: what every task starts, on SLURM and on this machine. It is the rank."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path

from launcher import line
from launcher.environment import threads_per_rank
from trainer import config as configuration
from trainer.config import ConfigError
from trainer.failure import write_failure
from trainer.stop import LEFT, StopRequest, is_over, leave

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
_WHY = "another one has failed, or the run was cancelled"
ATTEMPT_TIME = "MOE_LAUNCHER_ATTEMPT_TIME"  # seconds since the epoch; set by launcher.batch


def die_with_supervisor() -> None:
    """On this machine: no rank outlives launcher.local, however that ends. On SLURM slurmstepd sees to it."""
    supervisor = os.environ.get("SUBMITIT_LOCAL_JOB_ID")
    if supervisor is None or sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(supervisor):  # it ended before the line above
        os._exit(1)


def leave_with_the_others(run_dir: Path, rank: int, begun_s: float) -> None:
    """On SLURM: end this rank soon after another one has failed or the run was cancelled, whatever it hangs in.

    SLURM's SIGTERM does not reach Python code that waits in a collective, means preemption as well, and its SIGKILL comes
    only after KillWait. launcher.batch knows what happened and says so on a line to every rank; where that is broken, the
    files do, as late as a shared file system shows them.
    """

    def watch() -> None:
        if (after_s := line.listen(os.environ)) is not None:
            time.sleep(after_s)
            leave(rank, LEFT, _WHY)
        while not is_over(run_dir, rank, begun_s):
            time.sleep(_LOOK_S)
        time.sleep(line.LEAVE_S)
        leave(rank, LEFT, _WHY)

    threading.Thread(target=watch, daemon=True, name="leave_with_the_others").start()


def missing_packages(run_dir: Path) -> list[str]:
    """Packages that a task needs on SLURM and its Python lacks."""
    wandb = json.loads((run_dir / "run.json").read_text())["logging"]["wandb"]
    needed = ["submitit"] if wandb == "disabled" else ["submitit", "wandb"]
    return [name for name in needed if importlib.util.find_spec(name) is None]


def rank_variables() -> dict[str, str]:
    """torch.distributed's env:// variables of this task, from what submitit knows about the job."""
    from submitit import JobEnvironment

    job = JobEnvironment()
    variables = {
        "RANK": str(job.global_rank),
        "LOCAL_RANK": str(job.local_rank),
        "WORLD_SIZE": str(job.num_tasks),
        "LOCAL_WORLD_SIZE": str(job.num_tasks // job.num_nodes),
    }
    if job.cluster == "slurm":
        if "MASTER_PORT" not in os.environ:
            raise ConfigError("MASTER_PORT is not set: launcher.batch holds a free one and hands it to srun")
        variables["MASTER_ADDR"] = job.hostnames[0]
        variables["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(
            _threads(job.num_tasks // job.num_nodes)
        )
    return variables


def _threads(ranks_per_node: int) -> int:
    """CPU threads of a rank: what SLURM gave it, else its share of the node."""
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(asked) if asked.isdigit() else threads_per_rank(ranks_per_node)


def own_rank() -> int:
    """Of this task, as far as it is known when something goes wrong before the trainer has started."""
    names = ("RANK", "SLURM_PROCID", "SUBMITIT_LOCAL_GLOBALID")
    return int(next((value for name in names if (value := os.environ.get(name))), "0"))


def main(run_dir: Path) -> int:
    """Run this rank in this process; returns its exit code. Whatever goes wrong leaves the process, with 1."""
    rank = own_rank()
    begun_s = float(os.environ.get(ATTEMPT_TIME, "0"))
    die_with_supervisor()
    try:
        stop = StopRequest(run_dir, rank, configuration.load(run_dir).cluster.grace_s, begun_s)
        if "SLURM_JOB_ID" in os.environ and (missing := missing_packages(run_dir)):
            raise ModuleNotFoundError(
                f"{sys.executable} on {socket.gethostname()} lacks {', '.join(missing)}: install it where the ranks run"
            )
        os.environ.update(rank_variables())
        if "SLURM_JOB_ID" in os.environ:
            leave_with_the_others(run_dir, rank, begun_s)
        from trainer.__main__ import main as train

        return train(run_dir, stop)
    except BaseException as error:  # noqa: BLE001 (also sys.exit: a rank that ends early has failed)
        print(f"rank {os.environ.get('RANK', '?')} on {socket.gethostname()} failed:", file=sys.stderr)
        traceback.print_exc()
        write_failure(run_dir, rank, f"{type(error).__name__}: {error}", traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        # Not sys.exit: destructors of a process group with a pending collective can wait for ever.
        os._exit(1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
