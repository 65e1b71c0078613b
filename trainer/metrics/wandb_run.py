"""The copy of a run in Weights & Biases. It never stops the run: whatever goes wrong gives one warning."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.config import LoggingConfig, RunConfig, to_dict

INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0  # a dead network must not hold a finished job's GPUs


def run_id(run_dir: Path) -> str:
    """The run's key, the last part of its directory's name: stable, so that a requeued job continues its W&B run."""
    return re.search(r"[^-]+(-r\d+)?$", run_dir.name).group()


class WandbRun:
    """Rank 0's W&B run. `mode` is decided before submission: online, offline or disabled."""

    def __init__(self, run_dir: Path, config: RunConfig, warn: Callable[[str], None] | None = None):
        self._warn = warn or (lambda text: print(f"warning: {text}", file=sys.stderr, flush=True))
        self._run = None
        mode = config.logging.wandb
        if mode == "disabled":
            return
        try:
            import wandb
        except ImportError as error:
            self._warn(
                f"no W&B run: {error}; metrics.jsonl holds every row. pip install wandb, or logging.wandb=disabled"
            )
            return
        try:
            self._run = _init(wandb, run_dir, config, mode)
        except Exception as error:  # noqa: BLE001  any failure of a logger, of whatever kind, is only worth a warning
            self._fall_back(wandb, run_dir, config, mode, error)

    def _fall_back(self, wandb, run_dir: Path, config: RunConfig, mode: str, error: Exception) -> None:
        reason = f"W&B {mode} run could not start ({type(error).__name__}: {error})"
        if mode == "online":
            try:
                wandb.teardown()  # the failed run keeps its id in W&B's service
                self._run = _init(wandb, run_dir, config, "offline")
            except Exception:  # noqa: BLE001  the first error is the one to report
                self._run = None
        if self._run is None:
            self._warn(f"{reason}; metrics.jsonl holds every row")
        else:
            self._warn(f"{reason}; written offline instead, upload it with: wandb sync {run_dir}/wandb/offline-run-*")

    def _guarded(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001  see above
            self._run = None
            self._warn(f"W&B {what} failed ({type(error).__name__}: {error}); metrics.jsonl holds every row")

    def describe(self, environment: dict[str, Any]) -> None:
        """Add what the run runs on to its configuration."""
        if self._run is not None:
            given = {"environment": environment}
            self._guarded("config", lambda: self._run.config.update(given, allow_val_change=True))

    def log(self, row: dict[str, Any]) -> None:
        """Copy one row. W&B's own step counter restarts or is renumbered on a resumed run, so the step is a metric."""
        if self._run is not None:
            values = {"train/step": row["step"], **{key: value for key, value in row.items() if key != "step"}}
            self._guarded("log", lambda: self._run.log(values))

    def finish(self, state: str, result: dict[str, Any], error: str = "") -> None:
        """Close the run as `state` says, with the result in its summary."""
        run, self._run = self._run, None
        if run is None:
            return

        def close() -> None:
            run.summary.update({"state": state, **({"error": error} if error else {}), **_flat(result, "result/")})
            if state == "preempted":
                run.mark_preempting()
            run.finish(exit_code=0 if state == "done" else 1)

        self._guarded("finish", close)


def _init(wandb, run_dir: Path, config: RunConfig, mode: str):
    logging: LoggingConfig = config.logging
    # Silent before init, not only in it: with a terminal and without a key it would wait for an answer for ever.
    wandb.setup(settings=wandb.Settings(silent=True))
    run = wandb.init(
        project=logging.project,
        entity=logging.entity or None,
        id=run_id(run_dir),
        name=logging.run_name or run_dir.name,
        group=logging.group or None,
        job_type="train",
        tags=list(logging.tags),
        config=to_dict(config),
        mode=mode,
        resume="allow" if mode == "online" else None,  # offline files know nothing of each other: the id joins them
        dir=run_dir,
        settings=wandb.Settings(
            console="off",  # every rank has its log in the run directory
            disable_git=True,  # source.json holds the code that ran; the working directory's may be another
            disable_code=True,
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            finish_timeout_raises=True,
            # Private, hence wandb's pin: without it a killed job loses its last 15 s of rows, or all of them.
            x_transaction_log_flush_interval=1,
        ),
    )
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    if run.url:
        print(f"W&B: {run.url}", flush=True)
    return run


def _flat(data: dict[str, Any], prefix: str) -> dict[str, Any]:
    flat = {}
    for key, value in data.items():
        flat.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return flat
