"""SIGUSR2 and SIGTERM: the ranks agree after an optimizer step, save once and end, to be started again.

A rank waits in collectives and for its GPU most of the time, where no Python handler of a signal runs. So a thread reads
the signals from the file that Python's own handlers in C write them to (signal.set_wakeup_fd).
"""

from __future__ import annotations

import math
import os
import select
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from trainer.checkpoint.directory import surviving

PREEMPTED = 75  # exit code of a rank that was asked to stop: start it again (EX_TEMPFAIL)
LEFT = 128 + signal.SIGTERM  # of one that left at once because the run is over
CANCEL = "cancel.json"  # in the run directory: somebody wants the run to end now
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


class Stopped(Exception):
    """The ranks have stopped on request."""


def is_over(run_dir: Path, rank: int, begun_s: float) -> bool:
    """Whether the run was cancelled or another rank has failed since `begun_s` (seconds since the epoch)."""

    def is_new(path: Path) -> bool:
        # A shared file system may still show what was moved away before this attempt began.
        try:
            return path.name != f"failure-{rank}.json" and path.stat().st_mtime >= begun_s
        except OSError:
            return False

    return any(is_new(path) for path in (run_dir / CANCEL, *run_dir.glob("failure-*.json")))


def leave(rank: int, code: int, why: str) -> None:
    """End this process at once, whatever its threads wait for."""
    print(f"rank {rank} on {socket.gethostname()} leaves: {why}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(code)


class StopRequest:
    """The wish that a run stops, from a signal to this rank; make it on the main thread, before anything slow.

    A second signal changes nothing, but a SIGTERM to a rank of a run that is over ends it at once. Without `settle`
    within grace_s the process ends with code PREEMPTED and names the checkpoint that the run can go on from.
    """

    def __init__(self, run_dir: Path, rank: int, grace_s: float, begun_s: float | None = None):
        self.words = ""  # which signal came to which rank; empty: none has come
        self._run_dir, self._rank, self._grace_s = run_dir, rank, grace_s
        self._begun_s = time.time() - 5.0 if begun_s is None else begun_s
        self._settled = threading.Event()
        self._inbox, self._outbox = socket.socketpair()
        self._outbox.setblocking(False)
        signal.set_wakeup_fd(self._outbox.fileno(), warn_on_full_buffer=False)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: None)
        threading.Thread(target=self._watch, daemon=True, name="stop request").start()

    @property
    def is_pending(self) -> bool:
        """Whether a signal has come and the ranks have not agreed yet."""
        return bool(self.words) and not self._settled.is_set()

    def settle(self) -> None:
        """The ranks have agreed, or the run is done: from here on no signal changes anything."""
        self._settled.set()

    def _watch(self) -> None:
        deadline_s = math.inf
        while True:
            wait_s = deadline_s - time.monotonic() if self.is_pending else None
            if wait_s is not None and wait_s <= 0:
                self._give_up()
            readable, _, _ = select.select([self._inbox], [], [], wait_s)
            for number in self._inbox.recv(64) if readable else b"":
                if number == signal.SIGTERM and is_over(self._run_dir, self._rank, self._begun_s):
                    leave(self._rank, LEFT, "another one has failed, or the run was cancelled")
                if number in SIGNALS and not self.words and not self._settled.is_set():
                    deadline_s = time.monotonic() + self._grace_s
                    self.words = f"{signal.Signals(number).name} to rank {self._rank} on {socket.gethostname()}"
                    print(f"{self.words}: stops after this optimizer step", file=sys.stderr, flush=True)

    def _give_up(self) -> None:
        why = f"no optimizer step ended within cluster.grace_s={self._grace_s:g} s after {self.words}"
        leave(self._rank, PREEMPTED, f"{why}; the run goes on from {surviving(self._run_dir)}")
