"""A real SLURM of 4 virtual nodes with 8 GPUs each, for one session; only where `-m slurm` asks for it (make test-slurm)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from launcher import status
from tests.fake_runs import make_run

__all__ = ["make_run"]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(config, items):
    wanted = "slurm" in config.option.markexpr
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.slurm)
            if not wanted:
                item.add_marker(pytest.mark.skip(reason="starts a real SLURM: make test-slurm"))


@dataclass(frozen=True)
class Cluster:
    """The running SLURM; its variables are in os.environ."""

    nodes: tuple[str, ...]

    def state(self, job_id: str) -> str:
        """What SLURM says of a job: PENDING, RUNNING, FAILED ..."""
        command = ["squeue", "--noheader", "--array", "--states=all", "--format=%T", f"--jobs={job_id}"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def is_free_of(self, job_id: str) -> bool:
        """Whether no node works for the job any more."""
        return self.state(job_id) not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("slurm")
    script, environment = str(HERE / "cluster.sh"), os.environ | {"SLURM_TEST_DIR": str(directory)}
    started = subprocess.run([script, "up", "4", "8"], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    name, _, value = started.stdout.strip().removeprefix("export ").partition("=")
    os.environ[name] = value
    yield Cluster(tuple((directory / "nodes").read_text().split()))
    del os.environ[name]
    subprocess.run([script, "down"], env=environment, check=True, timeout=120)


@pytest.fixture
def wait_for() -> Callable[..., None]:
    """`wait_for(condition, timeout_s)`: returns once it holds."""

    def wait(condition: Callable[[], object], timeout_s: float = 60) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s"
            time.sleep(0.05)

    return wait


@pytest.fixture
def command(cluster, tmp_path) -> Iterator[Callable[..., subprocess.CompletedProcess]]:
    """`command("launcher", ...)`: the real command, in an empty directory; its runs are stopped in the end."""

    def run(package: str, *arguments: str, timeout_s: float = 800, **environment: str) -> subprocess.CompletedProcess:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HYDRA_", "WANDB_"))}
        return subprocess.run(
            [sys.executable, "-m", package, *arguments], cwd=tmp_path, env=clean | {"PYTHONPATH": str(ROOT)} | environment,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip

    yield run
    status.cancel(sorted(path.parent for path in tmp_path.glob("runs/*/*/job.json")))
