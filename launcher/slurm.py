"""What SLURM says: about jobs through squeue, about those it has forgotten through sacct, about its limits through scontrol."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_TIMEOUT_S = 60.0
_IDS_AT_ONCE = 400  # on one command line
_MAX_ARRAY_SIZE = 1001  # SLURM's default
_UNSAID = ("", "N/A", "None", "(null)", "Unknown")
WAITING = ("PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD")
ENDED = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "BOOT_FAIL")
ENDED += ("DEADLINE", "REVOKED")
_BROKEN = ("down", "fail", "drain", "unknown")  # a node's state; one that does not answer ends in *
GONE = "GONE"  # our word: SLURM does not know the job (any more)


@dataclass(frozen=True)
class Job:
    """A job as SLURM sees it."""

    state: str  # SLURM's word, or GONE
    reason: str = ""  # why it waits, or ended as it did; empty: SLURM does not say
    start: str = ""  # when it started or is expected to (SLURM's local time)

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING

    @property
    def has_ended(self) -> bool:
        return self.state == GONE or self.state in ENDED


class Queue:
    """Answers about jobs, kept for `every_s` seconds: SLURM's controller serves everybody."""

    def __init__(self, every_s: float = 5.0):
        self._every_s = every_s
        self._answers: dict[str, tuple[float, Job | None]] = {}

    def look(self, job_id: str) -> Job | None:
        """What SLURM says about a job; None where it cannot be asked."""
        self.prefetch([job_id])
        return self._answers[job_id][1]

    def prefetch(self, job_ids: Iterable[str]) -> None:
        """Ask about many jobs at once, unless what SLURM said about them is still fresh; `look` then knows the answers."""
        now = time.monotonic()
        job_ids = [one for one in job_ids if one not in self._answers or now - self._answers[one][0] > self._every_s]
        if not job_ids:
            return
        found = ask(job_ids)
        for job_id in job_ids:
            self._answers[job_id] = (time.monotonic(), None if found is None else found[job_id])


def ask(job_ids: Sequence[str]) -> dict[str, Job] | None:
    """What SLURM says about jobs and jobs of arrays (12_3); None where it cannot be asked."""
    if not shutil.which("squeue"):
        return None
    found: dict[str, Job] = {}
    plain = list(dict.fromkeys(job_id.partition("_")[0] for job_id in job_ids))
    for first in range(0, len(plain), _IDS_AT_ONCE):
        ids = ",".join(plain[first : first + _IDS_AT_ONCE])
        options = ["--noheader", "--array", "--states=all", "--format=%i|%T|%r|%S"]
        answer = _call("squeue", *options, f"--jobs={ids}")
        if answer is None or (answer.returncode and "Invalid job id" not in answer.stderr):
            return None
        for line in answer.stdout.splitlines():
            job_id, state, reason, start = (word.strip() for word in line.split("|")[:4])
            found[job_id] = Job(state, _said(reason), _said(start))
    forgotten = [job_id for job_id in job_ids if job_id not in found]
    return {job_id: Job(GONE) for job_id in forgotten} | _recorded(forgotten) | found


def _recorded(job_ids: Sequence[str]) -> dict[str, Job]:
    """What the accounting database knows; empty at the many sites that have none."""
    found: dict[str, Job] = {}
    if not job_ids or not shutil.which("sacct"):
        return found
    for first in range(0, len(job_ids), _IDS_AT_ONCE):
        ids = ",".join(job_ids[first : first + _IDS_AT_ONCE])
        answer = _call("sacct", "--allocations", "--noheader", "--parsable2", "--format=JobID,State", f"--jobs={ids}")
        for line in answer.stdout.splitlines() if answer and answer.returncode == 0 else ():
            job_id, _, state = line.partition("|")
            found[job_id] = Job((state.split() or [GONE])[0])  # "CANCELLED by 0"
    return found


def cancel(job_ids: Sequence[str]) -> str:
    """Send scancel; returns what was done, in words."""
    if not shutil.which("scancel"):
        return f"scancel is not on PATH here: run `scancel {' '.join(job_ids)}` on a login node"
    for first in range(0, len(job_ids), _IDS_AT_ONCE):
        sent = _call("scancel", *job_ids[first : first + _IDS_AT_ONCE])
        if sent is None or sent.returncode:
            return f"scancel failed: {sent.stderr.strip() if sent else 'no answer'}"
    return f"scancel {' '.join(job_ids)} sent" if len(job_ids) < 3 else f"scancel sent for {len(job_ids)} jobs"


def requeue(job_id: str) -> str:
    """Have SLURM end a running job and queue it again; returns why it did not, or nothing."""
    if not shutil.which("scontrol"):
        return "scontrol is not on PATH on the job's first node"
    sent = _call("scontrol", "requeue", job_id)
    return "" if sent and not sent.returncode else f"scontrol requeue: {sent.stderr.strip() if sent else 'no answer'}"


def failed_nodes(nodes: str) -> dict[str, str]:
    """Of nodes in SLURM's spelling, those that it has given up or gets no answer from, each with SLURM's word for it."""
    answer = (
        _call("sinfo", "--noheader", "--Node", f"--nodes={nodes}", "--format=%N %T") if shutil.which("sinfo") else None
    )
    found = dict(line.split() for line in answer.stdout.splitlines() if len(line.split()) == 2) if answer else {}
    return {node: state for node, state in found.items() if state.endswith("*") or state.startswith(_BROKEN)}


def restarts(job_id: str) -> int:
    """How often SLURM has started the job again, a start that it has decided on included; 0 where it does not say."""
    answer = _call("scontrol", "show", "job", "--oneliner", job_id) if shutil.which("scontrol") else None
    words = answer.stdout.split() if answer else []
    return next((int(word.partition("=")[2]) for word in words if re.fullmatch(r"Restarts=\d+", word)), 0)


def max_array_size() -> int:
    """MaxArraySize of this cluster: one more than the highest index; SLURM's default where it does not say."""
    answer = _call("scontrol", "show", "config") if shutil.which("scontrol") else None
    for line in answer.stdout.splitlines() if answer else ():
        name, _, value = line.partition("=")
        if name.strip() == "MaxArraySize" and value.strip().isdigit():
            return int(value)
    return _MAX_ARRAY_SIZE


def _said(text: str) -> str:
    return "" if text in _UNSAID else text


def _call(*command: str) -> subprocess.CompletedProcess | None:
    """A SLURM command's answer; None where there is none in a minute."""
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
