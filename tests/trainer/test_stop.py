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

from tests.trainer.processes import MODEL, RUN, TWO, course, freeze, rows, start
from trainer.stop import CANCEL, LEFT, PREEMPTED

ROOT = Path(__file__).resolve().parents[2]

# In rank {rank}: the signal comes at the {nth} call of {function}; later ones come during the save.
SIGNALLED = """
import os, signal, time
import trainer.train as t
import trainer.checkpoint.store as store
def signalled(function, number, nth=1):
    calls = []
    def call(*arguments):
        calls.append(1)
        if len(calls) == nth:
            os.kill(os.getpid(), number)
            time.sleep(0.3)
        return function(*arguments)
    return call
if RANK_HERE == {rank}:
    t.{function} = signalled(t.{function}, signal.{signal}, {nth})
for number in (signal.SIGTERM, signal.SIGUSR2):
    store.save = signalled(store.save, number)
"""


def saved(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_run_that_is_stopped_again_and_again_takes_the_course_of_one_that_is_not(tmp_path):
    whole = freeze(tmp_path / "whole", TWO)
    assert [code for code, _ in start(whole, 2)] == [0, 0]
    run_dir = freeze(tmp_path / "stopped-0123456789", TWO)
    stops = [(1, "build", "SIGUSR2"), (0, "evaluate", "SIGTERM")]
    last = 0
    for attempt, (rank, function, name) in enumerate(stops, 1):
        edit = SIGNALLED.format(rank=rank, function=function, signal=name, nth=1)
        results = start(run_dir, 2, edit)
        assert [code for code, _ in results] == [PREEMPTED, PREEMPTED], results
        status = json.loads((run_dir / "status.json").read_text())
        assert status["state"] == "preempted" and status["step"] > last and status["attempt"] == attempt
        last = status["step"]
        assert saved(run_dir)[-1] == f"step_{last:08d}" and len(saved(run_dir)) == min(attempt, TWO.checkpoint.keep)
        assert f"stopped after step {last} by {name} to rank {rank} on " in status["error"]
        assert status["error"].endswith(f"goes on from {run_dir}/checkpoints/step_{last:08d}")
        assert not list(run_dir.glob("failure-*"))
    assert last < TWO.train.steps
    results = start(run_dir, 2)
    assert [code for code, _ in results] == [0, 0] and f"continues after step {last}" in results[0][1]
    assert course(run_dir) == course(whole) and [row["step"] for row in rows(run_dir)] == [1, 2, 3, 4, 5, 6]
    assert max(row["attempt"] for row in rows(run_dir)) == 3


def test_a_signal_in_the_last_step_does_not_keep_the_run_from_being_done(tmp_path):
    run_dir = freeze(tmp_path / "run", RUN)
    edit = SIGNALLED.format(rank=0, function="forward_backward", signal="SIGUSR2", nth=6).replace("RANK_HERE", "0")
    ((code, output),) = start(run_dir, edit=edit)
    assert code == 0, output
    assert (run_dir / "result.json").exists() and not (run_dir / "checkpoints").exists()


def test_balanced_weights_are_not_saved_and_an_error_after_the_signal_is_no_failure(tmp_path):
    run = dataclasses.replace(RUN, model=dataclasses.replace(MODEL, routing="balanced"))
    run_dir = freeze(tmp_path / "balanced", run)
    ((code, _),) = start(run_dir, edit=SIGNALLED.format(rank=0, function="update", signal="SIGTERM", nth=1))
    assert code == PREEMPTED and not (run_dir / "checkpoints").exists()
    error = json.loads((run_dir / "status.json").read_text())["error"]
    assert "goes on from its start: there is no complete checkpoint" in error
    # What signals the ranks signals their helpers, a compiler's say, and the ranks then fail for want of them.
    broken = "\nt.evaluation_is_due = lambda *a: 1 / 0"
    run_dir = freeze(tmp_path / "broken", RUN)
    edit = SIGNALLED.format(rank=0, function="update", signal="SIGTERM", nth=1) + broken
    ((code, output),) = start(run_dir, edit=edit)
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
