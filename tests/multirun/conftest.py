"""A project whose trainer is a fake: sweeps of the real command, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import status
from tests.fake_runs import fake_trainer

ROOT = Path(__file__).resolve().parents[2]

# Seed 2 raises on rank 1 (until its directory has a file `mended`), seed 3 dies there without a word, seed 4 runs until it is stopped. All others are done at once.
FAKE_TRAINER = """
import json, os, time

def main(run_dir, stop):
    rank, config = int(os.environ["RANK"]), json.loads((run_dir / "run.json").read_text())
    seed, steps = config["train"]["seed"], config["train"]["steps"]
    print(f"rank {rank} has seed {seed}")
    seed = 1 if (run_dir / "mended").exists() else seed
    if rank == 1 and seed == 2:
        raise ValueError("boom on purpose")
    if rank == 1 and seed == 3:
        os._exit(3)
    if seed == 4:
        (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    if seed in (2, 3, 4):
        time.sleep(600)
    if rank == 0:
        time.sleep(float(os.environ.get("FAKE_SLEEP", 0)))
        result = {"status": "done", "steps": steps, "loss": {"first": 9.0, "last": 1.0 + seed}, "value": VALUE}
        (run_dir / "result.json").write_text(json.dumps(result))
        end = {"state": "done", "step": steps, "steps": steps, "heartbeat": time.time()}
        (run_dir / ".status").write_text(json.dumps(end))
        (run_dir / ".status").rename(run_dir / "status.json")

VALUE = 1
"""


@dataclass(frozen=True)
class Project:
    """A copy of this project with the fake trainer, and the commands of both packages on it."""

    root: Path
    runs: Path

    def __call__(self, package: str, *arguments: str, cwd: Path | None = None, **environment: str):
        """Run `python -m package arguments`; returns the finished process with its text."""
        return subprocess.run(
            [sys.executable, "-m", package, *arguments],
            cwd=cwd or self.root,
            env=os.environ | {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1", "COLUMNS": "300"} | environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def launch(self, *overrides: str, **environment: str):
        return self("launcher", f"launch.runs_dir={self.runs}", "cluster=local", *overrides, **environment)

    def run_dirs(self) -> list[Path]:
        return sorted(path.parent for path in self.runs.glob("*/*/run.json"))


@pytest.fixture
def project(tmp_path):
    root = tmp_path / "project"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("launcher", "multirun", "hydra_plugins", "conf"):
        shutil.copytree(ROOT / name, root / name, ignore=ignore)
    fake_trainer(root, FAKE_TRAINER)
    made = Project(root, tmp_path / "runs")
    yield made
    for path in made.run_dirs():
        if (path / "job.json").exists():
            status.cancel([path])
