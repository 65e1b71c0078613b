"""SIGUSR2 or SIGTERM to any one rank: all save once after the same step, and the resumed run is as if never stopped."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import trainer.train as train_module
from tests.trainer.processes import MODEL, RUN, TWO, course, freeze, rows, start
from trainer.config import from_dict, to_dict
from trainer.parallel.mesh import build_mesh
from trainer.stop import CANCEL, LEFT, PREEMPTED, SIGNALS, Stopped, StopRequest

ROOT = Path(__file__).resolve().parents[2]


def signalled(function, number, nth=1):
    """The function; its nth call sends a signal to this process first."""
    calls = []

    def call(*arguments):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), number)
            time.sleep(0.3)
        return function(*arguments)

    return call


def attempt(run_dir, config_dict, rank, function, number, nth):
    """Train in this process, rank `rank` gets a signal in `function`, and all get more during a save; says how it ended."""
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    if function and mesh.rank == rank:
        setattr(train_module, function, signalled(getattr(train_module, function), number, nth))
    for again in SIGNALS:
        train_module.store.save = signalled(train_module.store.save, again)
    try:
        train_module.train(config, Path(run_dir), mesh, "digest", StopRequest(Path(run_dir), mesh.rank, grace_s=60))
    except Stopped as reason:
        return str(reason)
    return ""


def test_a_run_that_is_stopped_again_and_again_takes_the_course_of_one_that_is_not(ranks, tmp_path):
    whole, run_dir = tmp_path / "whole-0123456789", tmp_path / "stopped-0123456789"
    for path in (whole, run_dir):
        path.mkdir()
    assert ranks(2, attempt, str(whole), to_dict(TWO), 0, "", 0, 0) == ["", ""]
    stops = [(1, "build", signal.SIGUSR2), (0, "held_out_loss", signal.SIGTERM)]
    last = 0
    for number, (rank, function, sent) in enumerate(stops, 1):
        reasons = ranks(2, attempt, str(run_dir), to_dict(TWO), rank, function, sent, 1)
        status = json.loads((run_dir / "status.json").read_text())
        assert status["state"] == "preempted" and status["step"] > last and status["attempt"] == number
        last = status["step"]
        saved = sorted(path.name for path in (run_dir / "checkpoints").iterdir())
        assert saved[-1] == f"step_{last:08d}" and len(saved) == min(number, TWO.checkpoint.keep)
        assert set(reasons) == {status["error"]}
        assert f"stopped after step {last} by {sent.name} to rank {rank} on " in status["error"]
        assert status["error"].endswith(f"goes on from {run_dir}/checkpoints/step_{last:08d}")
    assert last < TWO.train.steps
    assert ranks(2, attempt, str(run_dir), to_dict(TWO), 0, "", 0, 0) == ["", ""]
    assert course(run_dir) == course(whole) and [row["step"] for row in rows(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert max(row["attempt"] for row in rows(run_dir)) == 3


def test_a_signal_in_the_last_step_does_not_keep_the_run_from_being_done(ranks, tmp_path):
    assert ranks(1, attempt, str(tmp_path), to_dict(RUN), 0, "forward_backward", signal.SIGUSR2, 6) == [""]
    assert (tmp_path / "result.json").exists() and not (tmp_path / "checkpoints").exists()


def test_balanced_weights_are_not_saved(ranks, tmp_path):
    run = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, routing="balanced"))
    (reason,) = ranks(1, attempt, str(tmp_path), to_dict(run), 0, "update", signal.SIGTERM, 1)
    assert not (tmp_path / "checkpoints").exists()
    assert "goes on from its start: there is no complete checkpoint" in reason


def test_the_process_ends_with_a_code_of_its_own_even_if_an_error_follows_the_signal(tmp_path):
    """What signals the ranks signals their helpers, a compiler's say, and the ranks then fail for want of them."""
    send = "import os, signal, time, trainer.train as t\nsend = lambda *a: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.3))\n"
    run_dir = freeze(tmp_path / "saved", RUN)
    edit = send + "build = t.build\nt.build = lambda *a: (send(), build(*a))[1]"
    ((code, output),) = start(run_dir, edit=edit)
    assert code == PREEMPTED and f"goes on from {run_dir}/checkpoints/step_0000000" in output
    run_dir = freeze(tmp_path / "broken", RUN)
    ((code, output),) = start(run_dir, edit=send + "t.build = lambda *a: (send(), 1 / 0)")
    assert code == PREEMPTED and "ZeroDivisionError" in output and not list(run_dir.glob("failure-*"))
    assert "the run goes on from its start" in output


REQUEST = """
import ctypes, sys, time
from pathlib import Path
from trainer.stop import StopRequest
stop = StopRequest(Path(sys.argv[1]), 0, float(sys.argv[2]))
if len(sys.argv) > 3:
    stop.settle()
print("ready", flush=True)
for _ in range(5 if len(sys.argv) > 3 else 60):
    ctypes.CDLL(None).sleep(1)
"""


def request(run_dir, grace_s, *arguments):
    command = [sys.executable, "-c", REQUEST, str(run_dir), str(grace_s), *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_ranks_that_do_not_agree_in_time_leave_and_name_what_survives(tmp_path):
    for step in ("step_00000004", "step_00000010", "step_00000012.partial"):
        (tmp_path / "checkpoints" / step).mkdir(parents=True)
    for step in (4, 10):
        (tmp_path / "checkpoints" / f"step_{step:08d}" / "metadata.json").touch()
    process = request(tmp_path, 0.2)
    process.send_signal(signal.SIGUSR2)
    _, said = process.communicate(timeout=20)
    assert process.returncode == PREEMPTED
    assert "cluster.grace_s=0.2 s after SIGUSR2 to rank 0" in said
    assert f"goes on from {tmp_path}/checkpoints/step_00000010" in said


@pytest.mark.parametrize(
    ("name", "age_s", "number", "leaves"),
    [
        ("failure-1.json", 0, signal.SIGTERM, True),
        (CANCEL, 0, signal.SIGTERM, True),
        ("failure-1.json", 0, signal.SIGUSR2, False),
        ("failure-0.json", 0, signal.SIGTERM, False),  # its own: it is about to leave by itself
        ("failure-1.json", 60, signal.SIGTERM, False),  # of a former attempt
    ],
)
def test_sigterm_to_a_rank_of_a_run_that_is_over_ends_it_at_once(tmp_path, name, age_s, number, leaves):
    (tmp_path / name).write_text("{}")
    os.utime(tmp_path / name, (time.time() - age_s,) * 2)
    process = request(tmp_path, 0.5)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == (LEFT if leaves else PREEMPTED)
    assert ("has failed, or the run was cancelled" in said) == leaves


def test_when_the_ranks_have_agreed_no_signal_changes_anything(tmp_path):
    process = request(tmp_path, 0.1, "settled")
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.1)
    assert process.wait(timeout=20) == 0
    process.communicate()
