"""`make_run`: a frozen run, of two ranks unless told otherwise, whose snapshot holds a fake trainer without torch."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from launcher import status
from trainer.config import ClusterConfig, ModelConfig, ParallelismConfig, RunConfig, TrainConfig, to_dict

ROOT = Path(__file__).resolve().parents[1]

# What launcher and multirun share with the trainer.
SHARED = (
    "__init__.py",
    "config.py",
    "flops.py",
    "failure.py",
    "stop.py",
    "checkpoint/__init__.py",
    "checkpoint/directory.py",
)

# Stands in for trainer/__main__.py in a snapshot: does what the run's name asks for on rank 1, and lets rank 0 hang
# as it would in a collective.
FAKE_TRAINER = """
import json, os, signal, sys, time
from pathlib import Path

def main(run_dir, stop):
    rank = int(os.environ["RANK"])
    todo = json.loads((run_dir / "run.json").read_text())["model"]["name"]
    (run_dir / f"env-{rank}.json").write_text(json.dumps(dict(os.environ)))
    (run_dir / f".pid-{rank}").write_text(str(os.getpid()))
    os.replace(run_dir / f".pid-{rank}", run_dir / f"pid-{rank}")  # who waits for the file finds it filled
    print(f"rank {rank} says {todo}")
    if rank == 1:
        while not (run_dir / "pid-0").exists():  # rank 0 is in its collective by then
            time.sleep(0.02)
        if todo == "raise":
            raise ValueError("boom on purpose")
        if todo == "exit":
            os._exit(3)
        if todo == "sys_exit":
            sys.exit(0)
        if todo == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if todo == "stubborn":
            os._exit(3)
    if todo in ("raise", "exit", "kill", "sys_exit", "stubborn", "hang"):
        if todo == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if rank == 0:
        for step in (1, 2):
            row = {"step": step, "loss": 5.0 - step, "tokens_per_s_per_gpu": 100.0, "step_time_s": 0.1}
            with open(run_dir / "metrics.jsonl", "a") as file:
                file.write(json.dumps(row) + "\\\\n")
            content = {"state": "running", "step": step, "steps": 2, "heartbeat": time.time()}
            write(run_dir / "status.json", content)
            time.sleep(0.3)
        result = {"status": "done", "steps": 2, "loss": {"first": 4.0, "last": 3.0}, "answer": VALUE}
        (run_dir / "result.json").write_text(json.dumps(result))
        write(run_dir / "status.json", content | {"state": "done"})

def write(path, content):
    path.with_suffix(".partial").write_text(json.dumps(content))
    path.with_suffix(".partial").rename(path)

VALUE = 1
""".replace("\\\\", "\\")


def fake_trainer(project: Path, main: str) -> None:
    """A package trainer that needs no torch: what is shared with the launcher, and a `__main__` of the test's own."""
    (project / "trainer" / "checkpoint").mkdir(parents=True)
    for name in SHARED:
        shutil.copy(ROOT / "trainer" / name, project / "trainer" / name)
    (project / "trainer" / "__main__.py").write_text(main)


@dataclass(frozen=True)
class FakeRun:
    """The part of launcher.run.Run that submission reads."""

    key: str
    path: Path
    config: RunConfig
    snapshot: Path


@pytest.fixture
def make_run(tmp_path):
    """`make_run(todo, nodes, gpus_per_node, **cluster)`: a frozen run whose snapshot holds a fake trainer."""
    made: list[FakeRun] = []

    def make(todo: str, nodes: int = 1, gpus_per_node: int = 2, **cluster: Any) -> FakeRun:
        snapshot = tmp_path / "code" / "tree"
        if not snapshot.exists():
            shutil.copytree(ROOT / "launcher", snapshot / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
            fake_trainer(snapshot, FAKE_TRAINER)
        config = RunConfig(
            model=ModelConfig(name=todo),
            parallelism=ParallelismConfig(
                nodes=nodes, gpus_per_node=gpus_per_node, dp_shard=nodes * gpus_per_node, ep=1
            ),
            train=TrainConfig(steps=2),
            cluster=ClusterConfig(**({"name": "local", "device": "cpu"} | cluster)),
        )
        path = tmp_path / "runs" / "sweep" / f"{todo}-{len(made):010x}"
        path.mkdir(parents=True)
        (path / "run.json").write_text(json.dumps(to_dict(config)))
        made.append(FakeRun(path.name.rpartition("-")[2], path, config, snapshot))
        return made[-1]

    yield make
    for run in made:
        if (run.path / "job.json").exists():
            status.cancel([run.path])
            deadline = time.monotonic() + 15
            while status.is_held(run.path) and time.monotonic() < deadline:
                time.sleep(0.05)
