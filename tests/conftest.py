"""Fixtures for every package's tests: a function run on n gloo ranks of this machine, and a SLURM of scripts."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_slurm import FakeSlurm

# Ranks fork from a process that has imported torch and the trainer already (and Dynamo, which FSDP2 imports).
FORKSERVER = multiprocessing.get_context("forkserver")
FORKSERVER.set_forkserver_preload(["torch", "torch._dynamo", "trainer.__main__"])


def _rank_main(function, arguments, rank, world_size, port, results):
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        # Pickled here: tensors sent as such share memory with this process, which may end before they are read.
        results.put((rank, pickle.dumps(function(*arguments)), None))
        dist.barrier()  # nobody tears the connections down while another still talks
    except BaseException:  # noqa: BLE001 (the test shows it)
        results.put((rank, None, traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(n, function, *arguments)` runs a module-level function on n gloo ranks; returns their results in order."""

    def run(world_size: int, function: Callable, *arguments: Any, timeout_s: float = 120) -> list[Any]:
        from torch.distributed import TCPStore

        results = FORKSERVER.Queue()
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # a file of 32 ranks is slow
        processes = [
            FORKSERVER.Process(
                target=_rank_main, args=(function, arguments, rank, world_size, store.port, results), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            answers = [results.get(timeout=timeout_s) for _ in range(world_size)]
            failures = [f"rank {rank}:\n{error}" for rank, _, error in answers if error]
            assert not failures, "\n".join(failures)
            for process in processes:
                process.join(timeout=10)
        finally:
            for process in processes:
                process.kill()
        return [pickle.loads(answer) for _, answer, _ in sorted(answers, key=lambda a: a[0])]

    return run


@pytest.fixture
def fake_slurm(tmp_path, monkeypatch) -> FakeSlurm:
    """sbatch, squeue, sacct, scancel and scontrol on PATH, before a real SLURM's."""
    fake = FakeSlurm(tmp_path / "slurm")
    monkeypatch.setenv("PATH", f"{fake.path / 'bin'}:{os.environ['PATH']}")
    return fake


@pytest.fixture(scope="session", autouse=True)
def _own_index(tmp_path_factory):
    """Runs of tests are not listed among the user's."""
    before = os.environ.get("XDG_STATE_HOME")
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))
    yield
    os.environ.pop("XDG_STATE_HOME") if before is None else os.environ.update(XDG_STATE_HOME=before)
