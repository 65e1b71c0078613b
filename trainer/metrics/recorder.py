"""Everything that one run writes about itself, from global rank 0."""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

from trainer.config import RunConfig
from trainer.metrics.files import cut_rows, known, write_json
from trainer.metrics.wandb_run import WandbRun

SHOWN = ("loss", "mfu", "tokens_per_s_per_gpu", "step_time_s")  # of the last row, in status.json
HEARTBEAT_S = 15.0


class Recorder:
    """Writes metrics.jsonl, status.json, environment.json, result.json and the W&B run; other ranks write nothing.

    Make it before anything that can fail, and `finish` it whatever happens. `step` counts the finished optimizer steps
    of the state that is continued: later rows of metrics.jsonl belong to a course that was given up, and are cut.
    """

    def __init__(
        self,
        run_dir: Path,
        config: RunConfig,
        rank: int,
        world_size: int,
        device_name: str,
        attempt: int,
        step: int = 0,
        heartbeat_s: float = HEARTBEAT_S,
    ):
        self._dir = run_dir
        self._writes = rank == 0
        self._marks = {"attempt": attempt}
        if config.model.num_sparse_layers:
            self._marks["routing"] = config.model.routing  # balanced routing makes another, easier run of it
        self._finished = not self._writes
        if not self._writes:
            return
        self._lock = threading.Lock()  # of the status, which the heartbeat writes too
        self._stop = threading.Event()
        self._status_fails = False
        self._status = {
            "state": "starting",
            "step": step,
            "steps": config.train.steps,
            "attempt": attempt,
            "world_size": world_size,
            "device": device_name,
        }
        self._update_status()
        metrics = run_dir / "metrics.jsonl"
        cut_rows(metrics, step)
        # Unbuffered, one write per row: a row is in the file when row() returns, and survives a kill.
        self._rows = metrics.open("ab", buffering=0)
        self._heartbeat = threading.Thread(target=self._beat, args=(heartbeat_s,), name="heartbeat", daemon=True)
        self._heartbeat.start()
        self._wandb = WandbRun(run_dir, config)

    def start(self, environment: dict[str, Any]) -> None:
        """The model is built and the first step begins."""
        if self._writes:
            write_json(self._dir / "environment.json", environment)
            self._wandb.describe(environment)
            self._update_status(state="running")

    def row(self, step: int, values: dict[str, Any]) -> None:
        """Record finished step `step` (from 1); values that are not known (None, NaN) are left out."""
        if not self._writes:
            return
        row = {"step": step, **self._marks, **known(values)}
        self._rows.write(json.dumps(row, allow_nan=False).encode() + b"\n")
        self._update_status(step=step, progress=time.time(), **{key: row.get(key) for key in SHOWN})
        self._wandb.log(row)

    def finish(self, state: str, result: dict[str, Any] | None = None, error: str = "") -> None:
        """Close everything as done, failed, cancelled or preempted; result.json is written for done only.

        The first call counts: a failure while closing does not turn `done` into `failed`.
        """
        if self._finished:
            return
        if state == "done":
            write_json(self._dir / "result.json", result or {})
        self._finished = True
        self._stop.set()
        self._heartbeat.join()
        self._rows.close()
        self._update_status(state=state, error=error or None)
        self._wandb.finish(state, result or {}, error)

    def _beat(self, interval_s: float) -> None:
        """A step can take minutes: a fresh heartbeat says that the process lives, `progress` when it last got on."""
        while not self._stop.wait(interval_s):
            self._update_status()

    def _update_status(self, **changes: Any) -> None:
        with self._lock:
            self._status = known(self._status | changes)
            try:
                write_json(self._dir / "status.json", self._status | {"heartbeat": time.time()})
            except OSError as error:  # a full disk hides the progress; the rows and the training go on
                if not self._status_fails:
                    print(f"warning: status.json is not up to date: {error}", file=sys.stderr, flush=True)
                self._status_fails = True
