"""`python -m launcher.local RUN_DIR`: start one process per rank on this machine and see them to their end.

submitit's own local controller waits for every task: when one rank dies, the others hang in their next collective until
the time limit. This one is the parent of all ranks, so it learns of every kind of death (exception, os._exit, signal,
failed import) from the kernel; it then stops the others and writes the run's final state.
"""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launcher import status
from launcher.environment import scrubbed, threads_per_rank
from trainer import config as configuration
from trainer.checkpoint.directory import surviving
from trainer.failure import write_failure
from trainer.stop import PREEMPTED

_POLL_S = 0.05
_STOP_S = 5.0  # a rank that ignores SIGTERM this long is killed: it hangs in a collective with a dead peer


def free_port() -> socket.socket:
    """A socket that reserves a port until it is closed: rank 0 binds beside it, others find the port taken.

    Both sides set SO_REUSEADDR, and this one never listens, so Linux lets torch's store listen on the same port.
    """
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    return holder


class Ranks:
    """The processes of one attempt, each the leader of its own process group."""

    def __init__(self, run_dir: Path, log_dir: Path, count: int, port: int):
        self.processes: list[subprocess.Popen] = []
        environment = scrubbed(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(threads_per_rank(count)))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        for rank in range(count):
            with open(log_dir / f"rank_{rank}.log", "ab") as log:
                process = subprocess.Popen(
                    [sys.executable, "-u", "-m", "launcher.job", str(run_dir)],
                    env=environment | _submitit_variables(rank, count),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    process_group=0,
                )
            self.processes.append(process)

    def exit_codes(self) -> dict[int, int]:
        """Codes of the ranks that have ended; negative: the signal."""
        codes = {rank: process.poll() for rank, process in enumerate(self.processes)}
        return {rank: code for rank, code in codes.items() if code is not None}

    def ask_to_stop(self) -> None:
        """Have the ranks save after their optimizer step and end."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)

    def kill(self, grace_s: float) -> None:
        """End every rank and whatever it has started: SIGTERM, after grace_s SIGKILL."""
        self._signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while len(self.exit_codes()) < len(self.processes) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._signal(signal.SIGKILL)
        for process in self.processes:
            process.wait()

    def _signal(self, number: int) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                pass  # it and all its children have ended


def _submitit_variables(rank: int, count: int) -> dict[str, str]:
    """What submitit's LocalJobEnvironment reads."""
    return {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": str(os.getpid()),
        "SUBMITIT_LOCAL_NTASKS": str(count),
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_GLOBALID": str(rank),
        "SUBMITIT_LOCAL_LOCALID": str(rank),
    }


def verdict(run_dir: Path, exit_codes: dict[int, int]) -> dict[str, Any]:
    """The final state of an attempt from the exit codes seen when the first rank had failed, or all had ended."""
    if PREEMPTED in exit_codes.values():  # what the others ended of is that they have lost this one
        if status.read_json(run_dir / "status.json").get("state") == "preempted":
            return {"state": "preempted"}
        asked = f"asked to stop; no optimizer step ended within cluster.grace_s, goes on from {surviving(run_dir)}"
        return {"state": "preempted", "error": asked}
    bad = {rank: code for rank, code in exit_codes.items() if code != 0}
    if not bad:
        state = status.read_json(run_dir / "status.json").get("state")
        if state == "done":
            return {"state": "done"}
        return {"state": "failed", "error": f"every rank exited with code 0, but status.json says {state}, not done"}
    broken = [failure for failure in status.failures(run_dir) if failure["rank"] in bad]
    # A rank that lost its peer raises and leaves a file; one that dies without a file is never the consequence.
    silent = [rank for rank in bad if rank not in [failure["rank"] for failure in broken]]
    rank = silent[0] if silent else broken[0]["rank"]
    if silent:
        error = f"rank {rank} {exit_words(bad[rank])}"
        write_failure(run_dir, rank, exit_words(bad[rank]), "")  # the others look for it when they get SIGTERM
    else:
        error = status.failure_words(broken[0])
    return {
        "state": "failed",
        "rank": rank,
        "exit_code": bad[rank],
        "error": error,
        "log": str(status.log_path(run_dir, rank)),
    }


def exit_words(code: int) -> str:
    if code >= 0:
        return f"exited with code {code} and left no traceback of its own"
    hint = " (the kernel does so when memory runs out)" if -code == signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def supervise(run_dir: Path) -> dict[str, Any]:
    """Run one attempt to its end; returns the final state as it stands in status.json."""
    config = configuration.load(run_dir)
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: signals.append(number))
    number = status.begin_attempt(run_dir)
    start = {"state": "starting", "step": 0, "steps": config.train.steps, "attempt": number, "heartbeat": time.time()}
    status.write_json(run_dir / "status.json", start)
    with free_port() as holder:
        log_dir = run_dir / "logs" / f"attempt_{number}"
        ranks = Ranks(run_dir, log_dir, config.parallelism.gpus_per_node, holder.getsockname()[1])
        try:
            end = _see_to_their_end(run_dir, ranks, signals, config.cluster.time_limit_min)
        finally:
            ranks.kill(min(config.cluster.grace_s, _STOP_S))
    end = status.read_json(run_dir / "status.json") | end | {"attempt": number, "heartbeat": time.time()}
    status.write_json(run_dir / "status.json", end)
    return end


def _see_to_their_end(run_dir: Path, ranks: Ranks, signals: list[int], limit_min: int) -> dict[str, Any]:
    """Wait for the ranks, and ask them once to stop where a signal or the time limit says so."""
    limit, asked = time.monotonic() + 60 * limit_min, ""
    while True:
        codes = ranks.exit_codes()
        if len(codes) == len(ranks.processes) or any(codes.values()):
            if asked:  # some may not have listened yet
                codes = {rank: PREEMPTED if code == -signal.SIGTERM else code for rank, code in codes.items()}
            end = verdict(run_dir, codes)
            if asked and end["state"] == "preempted":
                end["error"] = f"{asked}: {end.get('error') or status.read_json(run_dir / 'status.json')['error']}"
            return end
        if signals and (run_dir / status.CANCEL).exists():
            return {"state": "cancelled", "error": "stopped on request"}
        if not asked and (signals or time.monotonic() > limit):
            asked = signal.Signals(signals[0]).name if signals else f"time limit, cluster.time_limit_min={limit_min}"
            ranks.ask_to_stop()  # they leave by themselves where they cannot agree in cluster.grace_s
        time.sleep(_POLL_S)


def main(run_dir: Path) -> int:
    """Exit code 0: done; 1: failed; 130: cancelled."""
    with status.supervisor_lock(run_dir) as mine:
        if not mine:
            print(
                f"{run_dir} is running already: python -m multirun status {shlex.quote(str(run_dir))}", file=sys.stderr
            )
            return 1
        end = supervise(run_dir)
    print(f"{end['state']}: {end.get('error', '')}", flush=True)
    return {"done": 0, "cancelled": 130}.get(end["state"], 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
