"""What the files of a run directory say about the run. Files first; SLURM is asked only where they are silent."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FINAL = ("done", "failed", "cancelled", "preempted", "lost")
LOCK = ".supervisor.lock"  # held by launcher.local for as long as it lives: no process id can be mistaken for it
CANCEL = "cancel.json"
_START_S = 15.0  # within it a submitted job may not hold its lock yet
_TAIL_BYTES = 65536
_SILENT_S = 300.0  # a heartbeat older than this is worth a word


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}


def write_json(path: Path, data: dict[str, Any]) -> None:
    """Replace a file by rename, so that no reader sees half of it."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(data, indent=1) + "\n")
    partial.rename(path)


def last_rows(run_dir: Path, count: int) -> list[dict[str, Any]]:
    """The newest complete rows of metrics.jsonl, oldest first; none before the first step."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line end is still being written
    except FileNotFoundError:
        return []
    cut = 1 if size > _TAIL_BYTES else 0
    return [json.loads(line) for line in lines[cut:][-count:]]


def failures(run_dir: Path) -> list[dict[str, Any]]:
    """Contents of failure-<rank>.json, the first to be written first: the others often only lost their peer."""
    paths = sorted(run_dir.glob("failure-*.json"), key=lambda path: path.stat().st_mtime_ns)
    return [read_json(path) for path in paths]


def attempts(run_dir: Path) -> int:
    """How many attempts have begun, counted by their log directories."""
    numbers = [path.name.removeprefix("attempt_") for path in (run_dir / "logs").glob("attempt_*")]
    return max((int(number) for number in numbers if number.isdigit()), default=0)


def log_path(run_dir: Path, rank: int) -> Path:
    """The text log of a rank in the newest attempt."""
    return run_dir / "logs" / f"attempt_{max(1, attempts(run_dir))}" / f"rank_{rank}.log"


def begin_attempt(run_dir: Path) -> int:
    """Open the next attempt: its log directory, and no trace of the former one's end where status is read."""
    number = attempts(run_dir) + 1
    for path in run_dir.glob("failure-*.json"):
        path.rename(run_dir / "logs" / f"attempt_{number - 1}" / path.name if number > 1 else path.with_suffix(".old"))
    (run_dir / CANCEL).unlink(missing_ok=True)
    (run_dir / "logs" / f"attempt_{number}").mkdir(parents=True)
    return number


@contextmanager
def supervisor_lock(run_dir: Path) -> Iterator[bool]:
    """Hold the run's lock; yields False where another process has it."""
    # Read-only where it exists, so that status works on another user's run.
    with open(run_dir / LOCK, "rb" if (run_dir / LOCK).exists() else "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def is_alive(run_dir: Path, job: dict[str, Any]) -> bool | None:
    """Whether the job's processes exist; None where this machine cannot know."""
    if job.get("cluster") == "local":
        if job.get("host") != socket.gethostname():
            return None
        if is_held(run_dir):
            return True
        starting = read_json(run_dir / "status.json").get("state") == "starting"
        return starting and time.time() - job["submitted"] < _START_S and _exists(int(job["job_id"]))
    if job.get("cluster") == "slurm" and shutil.which("squeue"):
        command = ["squeue", "--noheader", "--format=%T", f"--jobs={job['job_id']}"]
        answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
        if answer.returncode == 0:
            return bool(answer.stdout.strip())
        return False if "Invalid job id" in answer.stderr else None
    return None


def is_held(run_dir: Path) -> bool:
    """Whether a supervisor of this machine still works on the run: it may have ranks to stop after the last step."""
    if not (run_dir / LOCK).exists():
        return False
    with supervisor_lock(run_dir) as free:
        return not free


def _exists(pid: int) -> bool:
    """Whether a process runs: a zombie that nobody has waited for does not."""
    if not Path("/proc/self/stat").exists():  # not Linux
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def describe(run_dir: Path, ask_slurm: bool = True) -> dict[str, Any]:
    """State of a run: key, path, state, step, steps, attempt, job_id, cluster, heartbeat_age_s, loss, mfu, and for a run
    that ended badly reason, rank and log. Absent = not known. `ask_slurm`: whether squeue is called where files are silent.
    """
    status, job = read_json(run_dir / "status.json"), read_json(run_dir / "job.json")
    state = status.get("state") or ("submitted" if job else "frozen")
    found = {
        "key": re.search(r"[^-]+(-r\d+)?$", run_dir.name).group(),  # -rN: a finished run, run again
        "path": str(run_dir),
        "state": state,
        "step": status.get("step"),
        "steps": status.get("steps") or read_json(run_dir / "run.json").get("train", {}).get("steps"),
        "attempt": attempts(run_dir) or None,
        "job_id": job.get("job_id"),
        "cluster": job.get("cluster"),
        "heartbeat_age_s": round(time.time() - status["heartbeat"], 1) if status.get("heartbeat") else None,
        "loss": status.get("loss"),
        "mfu": status.get("mfu"),
        "reason": status.get("error") or None,
        "rank": status.get("rank"),
        "log": status.get("log"),
    }
    if state not in FINAL and job:
        alive = is_alive(run_dir, job) if job["cluster"] == "local" or ask_slurm else None
        found.update(_unfinished(run_dir, alive, found["heartbeat_age_s"]))
    return {name: value for name, value in found.items() if value is not None}


def _unfinished(run_dir: Path, alive: bool | None, heartbeat_age_s: float | None) -> dict[str, Any]:
    """What to say of a run without a final state, given whether its processes exist."""
    age = "" if heartbeat_age_s is None else f"; last heartbeat {heartbeat_age_s:.0f} s ago"
    if alive is False:
        status = read_json(run_dir / "status.json")  # again: it may have ended between the two looks
        if status.get("state") in FINAL:
            return {"state": status["state"], "reason": status.get("error") or None, "log": status.get("log")}
        if broken := failures(run_dir):
            rank = broken[0]["rank"]
            reason = f"rank {rank} on {broken[0]['host']}: {broken[0]['error']}"
            return {"state": "failed", "rank": rank, "reason": reason, "log": str(log_path(run_dir, rank))}
        log = log_path(run_dir, 0)
        return {
            "state": "lost",
            "reason": f"its processes are gone and left no final state (killed, or the machine restarted){age}",
            "log": str(
                log if log.is_file() else run_dir / "logs" / "launcher.log"
            ),  # before the ranks: the script's own
        }
    if heartbeat_age_s is not None and heartbeat_age_s > _SILENT_S:
        return {"reason": f"no sign of life{age}"}
    return {}


def cancel(run_dir: Path) -> str:
    """Stop a run: the marker first, so that its ranks and status know why; returns what was done, in words."""
    job, state = read_json(run_dir / "job.json"), describe(run_dir)["state"]
    if not job or state in FINAL:
        return f"nothing to cancel, it is {state}"
    write_json(run_dir / CANCEL, {"time": time.time(), "host": socket.gethostname()})
    if job["cluster"] == "slurm":
        if not shutil.which("scancel"):
            return f"scancel is not on PATH here: run `scancel {job['job_id']}` on a login node"
        sent = subprocess.run(["scancel", str(job["job_id"])], check=False, capture_output=True, text=True, timeout=60)
        return f"scancel {job['job_id']} sent" if sent.returncode == 0 else f"scancel failed: {sent.stderr.strip()}"
    if is_alive(run_dir, job) is None:
        return f"it runs on {job['host']}: run this command there"
    os.kill(int(job["job_id"]), signal.SIGTERM)
    return "stopping"
