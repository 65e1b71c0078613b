"""What the files of a run directory say about the run. Files first; SLURM is asked only where they are silent."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launcher import slurm
from launcher.slurm import Queue
from trainer.config import ConfigError
from trainer.stop import CANCEL

FINAL = ("done", "failed", "cancelled", "preempted", "lost")
REQUEUED = ("cancelled", "preempted")  # how a run looks that SLURM stopped, and may start again
LOCK = ".supervisor.lock"  # held by launcher.local for as long as it lives: no process id can be mistaken for it
_START_S = 15.0  # within it a submitted job may not hold its lock yet
_TAIL_BYTES = 65536
_RECENT = 10  # steps whose mean time says how long the rest will take
_KILLED_S = 60.0  # without a heartbeat, and queued again: it was killed before it could say more
_SILENT_S = 300.0  # a heartbeat older than this is worth a word


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none. Raises ConfigError, by its path, where it is damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error


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


def archive_failures(run_dir: Path) -> None:
    """Move what the newest attempt left about its failure to its logs: status would take it for the next one's."""
    number = attempts(run_dir)
    for path in run_dir.glob("failure-*.json"):
        path.rename(run_dir / "logs" / f"attempt_{number}" / path.name if number else path.with_suffix(".old"))


def begin_attempt(run_dir: Path) -> int:
    """Open the next attempt: its log directory, and no trace of the former one's end where status is read."""
    archive_failures(run_dir)
    number = attempts(run_dir) + 1
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


def is_alive(run_dir: Path, job: dict[str, Any], queue: Queue | None = None) -> bool | None:
    """Whether the job's processes exist or SLURM will start them; None where this machine cannot know."""
    if job.get("cluster") == "local":
        if job.get("host") != socket.gethostname():
            return None
        if is_held(run_dir):
            return True
        starting = read_json(run_dir / "status.json").get("state") == "starting"
        return starting and time.time() - job["submitted"] < _START_S and _exists(int(job["job_id"]))
    if job.get("cluster") == "slurm":
        known = (queue or Queue()).look(job["job_id"])
        return None if known is None else not known.has_ended
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


def describe(run_dir: Path, queue: Queue | None = None) -> dict[str, Any]:
    """State of a run: key, path, state, step, steps, attempt, job_id, cluster, heartbeat_age_s, loss, mfu, time_left_s; of
    one that SLURM has in its queue waits (why) and expected_start; of one that ended badly reason, rank and log.
    Absent = not known. `queue`: what SLURM has said lately; None: it is asked, where the files are silent.
    """
    status, job = read_json(run_dir / "status.json"), read_json(run_dir / "job.json")
    state = status.get("state") or ("submitted" if job else "frozen")
    found = {
        "key": re.search(r"[^-]*(-r\d+)?$", run_dir.name).group() or run_dir.name,  # -rN: a finished run, run again
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
        "log": _where_it_is_now(run_dir, status.get("log")),
    }
    if job.get("cluster") == "slurm" and (state not in FINAL or state in REQUEUED):
        found.update(_on_slurm(run_dir, state, (queue or Queue()).look(job["job_id"]), found["heartbeat_age_s"]))
    elif job and state not in FINAL:
        alive = is_alive(run_dir, job)
        found.update(_gone(run_dir) if alive is False else _silent(found["heartbeat_age_s"]))
    if found["state"] == "running" and found["steps"]:
        found["time_left_s"] = time_left_s(run_dir, found["step"] or 0, found["steps"])
    return {name: value for name, value in found.items() if value is not None}


def _where_it_is_now(run_dir: Path, log: str | None) -> str | None:
    """The path of a log that was written down before the run directory was moved."""
    inside = run_dir / "logs" / Path(*Path(log).parts[-2:]) if log else None
    return str(inside) if inside and inside.is_file() else log


def describe_all(run_dirs: Sequence[Path], queue: Queue | None = None) -> list[dict[str, Any]]:
    """`describe` of many runs; SLURM is asked about all of them at once."""
    queue = queue or Queue(every_s=60.0)
    jobs = [read_json(run_dir / "job.json") for run_dir in run_dirs]
    states = [read_json(run_dir / "status.json").get("state") for run_dir in run_dirs]
    open_ = [state not in FINAL or state in REQUEUED for state in states]
    asked = [job["job_id"] for job, ask in zip(jobs, open_, strict=True) if ask and job.get("cluster") == "slurm"]
    queue.prefetch(asked)
    return [describe(run_dir, queue) for run_dir in run_dirs]


def has_ended(described: dict[str, Any]) -> bool:
    """Whether nothing more will come: a preempted run that SLURM starts again has not ended."""
    return described["state"] in FINAL and "waits" not in described and "requeued" not in described


def time_left_s(run_dir: Path, step: int, steps: int) -> float | None:
    """Seconds until the last step, from the newest steps' times; None before the first one."""
    rows = [row for row in last_rows(run_dir, _RECENT) if row["step"] <= step]
    times = [row["step_time_s"] for row in rows if "step_time_s" in row]
    return round(sum(times) / len(times) * (steps - step), 1) if times else None


def failure_words(failure: dict[str, Any]) -> str:
    """Rank, host, error, and the line of our code at which it happened."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', failure.get("traceback", ""))
    own = [frame for frame in frames if "site-packages" not in frame[0] and not frame[0].startswith("<")] or frames
    where = f" ({'/'.join(Path(own[-1][0]).parts[-2:])}:{own[-1][1]})" if own else ""
    return f"rank {failure['rank']} on {failure['host']}: {failure['error']}{where}"


def _on_slurm(run_dir: Path, state: str, job: slurm.Job | None, heartbeat_age_s: float | None) -> dict[str, Any]:
    """What to say of a run without a final state, or with one after which SLURM may start it again."""
    if job is None:
        return _silent(heartbeat_age_s) if state not in FINAL else {}
    if job.is_waiting:
        has_begun = state in ("starting", "running")
        if has_begun and heartbeat_age_s is not None and heartbeat_age_s < _KILLED_S:
            return {}  # since SLURM was asked
        words = {"waits": job.reason or "not looked at yet", "expected_start": job.start or None}
        if has_begun or state in REQUEUED:
            return words | {"state": "preempted", "reason": "stopped by SLURM, which will start it again"}
        return words | {"state": "queued"}
    if not job.has_ended:
        started = {"state": "starting", "reason": None} if state in ("queued", "submitted", *REQUEUED) else {}
        ending = job.state in ("COMPLETING", "SIGNALING") and state in REQUEUED
        requeued = read_json(run_dir / "status.json").get("requeued") or None
        return {"requeued": requeued} if ending else started | _silent(heartbeat_age_s)
    if state in FINAL and job.state == "CANCELLED" and read_json(run_dir / "status.json").get("requeued"):
        return {"state": "cancelled", "reason": "cancelled by scancel before SLURM had started it again"}
    if state in FINAL:
        return {}
    return _gone(run_dir, job)


def _silent(heartbeat_age_s: float | None) -> dict[str, Any]:
    if heartbeat_age_s is not None and heartbeat_age_s > _SILENT_S:
        return {"reason": f"no sign of life; last heartbeat {heartbeat_age_s:.0f} s ago"}
    return {}


def _gone(run_dir: Path, job: slurm.Job | None = None) -> dict[str, Any]:
    """What to say of a run whose processes are gone; `job`: SLURM's word on it."""
    status = read_json(run_dir / "status.json")  # again: it may have ended between the two looks
    if status.get("state") in FINAL:
        known = {"state": status["state"], "reason": status.get("error"), "rank": status.get("rank")}
        return known | {"step": status.get("step"), "log": status.get("log")}
    if broken := failures(run_dir):
        rank = broken[0]["rank"]
        return {
            "state": "failed",
            "rank": rank,
            "reason": failure_words(broken[0]),
            "log": str(log_path(run_dir, rank)),
        }
    logs = (log_path(run_dir, 0), log_path(run_dir, 0).with_name("slurm.log"), run_dir / "logs" / "launcher.log")
    outer = read_json(run_dir / "job.json").get("log")  # of the job script, before any rank
    log = next((str(path) for path in logs if path.is_file()), outer)
    if job is not None and job.state not in (slurm.GONE, "COMPLETED"):
        if job.state == "CANCELLED" or (run_dir / CANCEL).exists():
            why = "on request" if (run_dir / CANCEL).exists() else "by scancel"
            return {"state": "cancelled", "reason": f"cancelled {why}"}
        state = "preempted" if job.state == "PREEMPTED" else "failed"
        return {"state": state, "reason": f"SLURM says {job.state} {job.reason}".strip(), "log": log}
    if (run_dir / CANCEL).exists():
        return {"state": "cancelled", "reason": "cancelled on request"}
    age = f"; last heartbeat {time.time() - status['heartbeat']:.0f} s ago" if status.get("heartbeat") else ""
    return {
        "state": "lost",
        "reason": f"its processes are gone and left no final state (killed, or the machine restarted){age}",
        "log": log,
    }


def cancel(run_dirs: Sequence[Path]) -> list[str]:
    """Stop runs: the marker first, so that ranks and status know why; returns what was done for each, in words."""
    words, job_ids = [], []
    for run_dir, now in zip(run_dirs, describe_all(run_dirs), strict=True):
        job = read_json(run_dir / "job.json")
        if not job or has_ended(now):
            words.append(f"nothing to cancel, it is {now['state']}")
        elif job["cluster"] == "slurm":
            _mark_cancelled(run_dir)
            job_ids.append(job["job_id"])
            words.append("")
        elif is_alive(run_dir, job) is None:
            words.append(f"it runs on {job['host']}: run this command there")
        else:
            _mark_cancelled(run_dir)
            os.kill(int(job["job_id"]), signal.SIGTERM)
            words.append("stopping")
    sent = slurm.cancel(job_ids) if job_ids else ""
    return [word or sent for word in words]


def _mark_cancelled(run_dir: Path) -> None:
    """The marker that says why the ranks get SIGTERM."""
    write_json(run_dir / CANCEL, {"time": time.time(), "host": socket.gethostname()})
