"""`python -m launcher.batch RUN_DIR srun ...`: what a SLURM job does on its first node, from srun's start to its end.

srun says how every rank ended, also those that left no word of their own (os._exit, a signal, a failed import). This
process reads it, so that failure-<rank>.json is there at once, names the rank that was first, and writes the run's
final state. It tells the other ranks to leave, starts a preempted run again, and holds the port at which the ranks meet.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher import slurm, status
from launcher.job import ATTEMPT_TIME
from launcher.line import LEAVE_S, PORT, Line
from launcher.local import exit_words, free_port
from trainer import config as configuration
from trainer.checkpoint.directory import surviving
from trainer.config import RunConfig
from trainer.stop import LEFT, PREEMPTED

_TOGETHER_S = 3.0  # deaths that came after the first one by less may have caused it
_LIMIT_SLACK_S = 30.0  # the job has begun this much before this process at most
_ENDED = re.compile(r"srun: error: (?P<nodes>[^:]+): tasks? (?P<tasks>[0-9,-]+): (?P<words>.+)")
_EXITED = re.compile(r"Exited with exit code (\d+)")
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
_LOOK_S = 0.2
_STOPPED = (
    -signal.SIGTERM,
    -signal.SIGUSR2,
    LEFT,
    PREEMPTED,
)  # how ranks end that were stopped, some before they listen


@dataclass(frozen=True)
class Death:
    """A rank that ended badly, as srun saw it."""

    rank: int
    node: str  # or several, in SLURM's spelling
    exit_code: int  # negative: the signal
    words: str
    after_s: float  # since the first death
    left_word: bool  # it had written failure-<rank>.json itself


def parse(line: str) -> tuple[str, list[int], int, str] | None:
    """Node, ranks, exit code and words of a line in which srun says that tasks ended badly; None for other lines."""
    match = _ENDED.match(line.strip())
    if not match:
        return None
    words = match["words"]
    if exited := _EXITED.match(words):
        code = int(exited[1])
    else:
        number = _SIGNALS.get(words.removesuffix(" (core dumped)"))
        code = -number if number else -signal.SIGKILL if "Out Of Memory" in words else 1
    ranks: list[int] = []
    for part in match["tasks"].split(","):
        first, _, last = part.partition("-")
        ranks += range(int(first), int(last or first) + 1)
    return match["nodes"], ranks, code, words


class Step:
    """srun and what it says."""

    def __init__(self, run_dir: Path, command: list[str], environment: dict[str, str]):
        self.deaths: list[Death] = []  # that can be why the run failed
        self.first_death = 0.0
        self.stopping = False  # from here on ranks end because the job is being stopped
        self.gave_way = False  # a rank has ended as one that was asked to stop
        self.was_terminated = False
        self.was_warned = False  # SIGTERM has come, and why is not known
        self.line = Line()
        self._run_dir = run_dir
        told = {PORT: str(self.line.port)}
        self.process = subprocess.Popen(
            command,
            env=environment | told,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if found := parse(line):
                self._note(*found)

    def _note(self, node: str, ranks: list[int], code: int, words: str) -> None:
        now = time.monotonic()
        self.first_death = self.first_death or now
        self.was_terminated |= code == -signal.SIGTERM  # srun does so too, and may say it before it names the cause
        if code in (PREEMPTED, -signal.SIGUSR2) and not self.deaths:
            self.gave_way = self.stopping = True  # what the others die of now is that they have lost this one
        for rank in ranks:
            left_word = (self._run_dir / f"failure-{rank}.json").exists()
            death = Death(rank, node, code, words, now - self.first_death, left_word)
            if is_cause(death) and not self.stopping:
                self.deaths.append(death)
                if not left_word:
                    write_failure(self._run_dir, death)
        if self.deaths or self.gave_way:
            self.line.end(LEAVE_S)

    def has_ended(self, within_s: float) -> bool:
        """Whether srun ends in that time, with all that it says read."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(timeout=10)
        return True


def is_cause(death: Death) -> bool:
    """Whether a death can be why the run failed: not one that SLURM brought about because of another."""
    return death.exit_code not in _STOPPED and death.after_s < _TOGETHER_S


def write_failure(run_dir: Path, death: Death) -> None:
    """failure-<rank>.json and a line in the log of a rank that left neither."""
    error = exit_words(death.exit_code)
    content = {"rank": death.rank, "host": death.node, "error": error, "traceback": "", "exit_code": death.exit_code}
    status.write_json(run_dir / f"failure-{death.rank}.json", content)
    with open(status.log_path(run_dir, death.rank), "a") as log:
        log.write(f"\nrank {death.rank} on {death.node} {error} (srun: {death.words})\n")


def verdict(run_dir: Path, code: int, step: Step, stopped: dict[str, Any]) -> dict[str, Any]:
    """The final state of an attempt from srun's exit code, how ranks ended and why the job was stopped, if it was."""
    deaths = step.deaths
    now = status.read_json(run_dir / "status.json").get("state")
    if stopped.get("requeued"):
        return stopped
    if not deaths and now == "done" and code == 0:
        return {"state": now}
    if not deaths and stopped.get("state") == "cancelled":
        return stopped
    if not deaths and now == "preempted":
        return {"state": now}
    if not deaths and (step.gave_way or (step.was_terminated and not stopped and not step.was_warned)):
        asked = f"asked to stop; no optimizer step ended within cluster.grace_s, goes on from {surviving(run_dir)}"
        return {"state": "preempted", "error": asked}
    if not deaths and now in status.FINAL and now != "done":
        return {"state": now}
    if not deaths and (stopped or step.was_warned):
        return stopped or {"state": "cancelled", "error": "stopped by SLURM"}
    if not deaths:
        said = "every rank exited with code 0" if code == 0 else f"srun exited with code {code} and named no rank"
        error = f"{said}, but status.json says {now}, not done"
        return {"state": "failed", "exit_code": code, "error": error, "log": str(log_file(run_dir))}
    # A rank that lost its peer raises and leaves a file; one that dies without a word is never the consequence.
    silent = [death for death in deaths if not death.left_word]
    ranks = [death.rank for death in silent or deaths]
    broken = [failure for failure in status.failures(run_dir) if failure["rank"] in ranks]
    first = broken[0]["rank"] if broken else ranks[0]
    death = next(death for death in deaths if death.rank == first)
    error = (
        status.failure_words(broken[0]) if broken else f"rank {first} on {death.node}: {exit_words(death.exit_code)}"
    )
    log = str(status.log_path(run_dir, first))
    return {"state": "failed", "rank": first, "exit_code": death.exit_code, "error": error, "log": log}


def log_file(run_dir: Path) -> Path:
    """What srun and this process say in the newest attempt."""
    return run_dir / "logs" / f"attempt_{status.attempts(run_dir)}" / "slurm.log"


def why_stopped(run_dir: Path, running_s: float, limit_min: int) -> dict[str, Any]:
    """State and reason of a run to which SLURM has sent SIGTERM, or that has a cancel marker; empty: it may run on."""
    if (run_dir / status.CANCEL).exists():
        return {"state": "cancelled", "error": "stopped on request"}
    if slurm.restarts(os.environ["SLURM_JOB_ID"]) > restarts_before():
        why = "stopped by SLURM, which starts it again (preemption, requeue or a failed node)"
        return {"state": "preempted", "error": why, "requeued": True}
    if running_s > 60 * limit_min - _LIMIT_SLACK_S:
        return {"state": "failed", "error": f"stopped at the time limit, cluster.time_limit_min={limit_min}"}
    known = slurm.ask([own_job()])
    if known is None or known[own_job()].state == "RUNNING":  # the warning before a preemption, for all that is known
        return {}
    return {"state": "cancelled", "error": "stopped by SLURM (scancel or an administrator)"}


def own_job() -> str:
    """This job's id as squeue lists it: 12, or 12_3 in an array."""
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ["SLURM_JOB_ID"]


def restarts_before() -> int:
    """How often SLURM had started this job again when this attempt began."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def because_of_a_node(end: dict[str, Any]) -> dict[str, Any]:
    """A failure while a node of the job is down or silent is the node's: the ranks only lost their peers."""
    if end["state"] == "failed" and (broken := slurm.failed_nodes(os.environ.get("SLURM_JOB_NODELIST", ""))):
        names = ", ".join(f"{node} is {state}" for node, state in broken.items())
        return end | {"state": "preempted", "error": f"failed node: {names}; {end['error']}"}
    return end


def start_again(run_dir: Path, config: RunConfig, end: dict[str, Any]) -> dict[str, Any]:
    """Have SLURM start a preempted run again, unless it has decided so itself; returns the final state with the outcome."""
    if end["state"] != "preempted" or end.get("requeued"):
        return end
    limit, count = config.cluster.requeue_limit, restarts_before()
    status.write_json(run_dir / "status.json", end | {"requeued": True})  # first: SLURM may end this process for it
    why = slurm.requeue(os.environ["SLURM_JOB_ID"]) if count < limit else f"cluster.requeue_limit={limit} is reached"
    if not why:
        return end | {"requeued": True, "error": f"{end['error']}; SLURM starts it again ({count + 1} of {limit})"}
    go_on = f"not started again: {why}. Go on with: python -m multirun retry {shlex.quote(str(run_dir))}"
    return end | {"error": f"{end['error']}; {go_on}"}


def supervise(run_dir: Path, command: list[str]) -> dict[str, Any]:
    """Run one attempt to its end; returns the final state as it stands in status.json."""
    start = time.monotonic()
    config = configuration.load(run_dir)
    asked: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: asked.append(number))
    number = status.begin_attempt(run_dir)
    _write_to(log_file(run_dir))
    _note_job(run_dir)
    begun = {"state": "starting", "step": 0, "steps": config.train.steps, "attempt": number, "heartbeat": time.time()}
    status.write_json(run_dir / "status.json", begun)
    with free_port() as holder:
        told = {"MASTER_PORT": str(holder.getsockname()[1]), ATTEMPT_TIME: str(begun["heartbeat"])}
        output = f"--output={log_file(run_dir).with_name('rank_%t.log')}"
        step = Step(run_dir, [command[0], output, *command[1:]], dict(os.environ) | told)
        stopped: dict[str, Any] = {}
        while not step.has_ended(_LOOK_S):
            stopped = stopped or _look(run_dir, step, asked, time.monotonic() - start, config.cluster.time_limit_min)
        stopped = stopped or _look(run_dir, step, asked, time.monotonic() - start, config.cluster.time_limit_min)
    end = because_of_a_node(verdict(run_dir, step.process.returncode, step, stopped))
    end = status.read_json(run_dir / "status.json") | end | {"attempt": number, "heartbeat": time.time()}
    end = start_again(run_dir, config, end)
    status.write_json(run_dir / "status.json", end)
    return end


def _look(run_dir: Path, step: Step, asked: list[int], running_s: float, limit_min: int) -> dict[str, Any]:
    """Act on signals and on a cancel marker, which comes without a signal where scancel is not at hand."""
    numbers = [asked.pop() for _ in list(asked)]
    if signal.SIGUSR2 in numbers:
        step.process.send_signal(signal.SIGUSR2)  # srun passes it on to the ranks
    if signal.SIGTERM not in numbers and not (run_dir / status.CANCEL).exists():
        return {}
    step.stopping = True
    stopped = why_stopped(run_dir, running_s, limit_min)
    if stopped.get("state") == "cancelled":
        step.line.end(0)
    step.stopping, step.was_warned = bool(stopped), True
    return stopped


def _write_to(path: Path) -> None:
    """From here on everything that is printed goes to a file of this attempt."""
    with open(path, "ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)


def _note_job(run_dir: Path) -> None:
    """job.json, where the command that submitted this job was killed before it wrote one."""
    job_id = own_job()
    job = {"path": str(run_dir), "job_id": job_id, "cluster": "slurm", "host": socket.gethostname()}
    known = status.read_json(run_dir / "job.json")
    if known.get("job_id") != job_id:
        status.write_json(run_dir / "job.json", known | job | {"submitted": time.time()})


def main(run_dir: Path, command: list[str]) -> int:
    """Exit code 0: done; 1: failed; 130: cancelled."""
    end = supervise(run_dir, command)
    print(f"{end['state']}: {end.get('error', '')}", flush=True)
    return {"done": 0, "cancelled": 130}.get(end["state"], 1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
