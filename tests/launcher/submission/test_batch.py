"""launcher.batch: what srun says becomes failure files, the right rank's name and the run's final state."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher import batch, status

FAKE_SRUN = """#!/bin/bash
echo "$@" > "$RUN/srun.arguments"; env > "$RUN/srun.env"
{body}
"""


@pytest.fixture
def supervise(make_run, tmp_path, monkeypatch):
    """`supervise(body)`: launcher.batch around a bash script in place of srun; returns its exit code and the run."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    def run(body: str, before=lambda path: None, meanwhile=lambda process: None, **cluster):
        made = make_run("fine", name="slurm", **cluster)
        script = tmp_path / "bin" / "srun"
        script.write_text(FAKE_SRUN.format(body=body))
        script.chmod(0o755)
        before(made.path)
        environment = os.environ | {"SLURM_JOB_ID": "5", "RUN": str(made.path)}
        command = [sys.executable, "-m", "launcher.batch", str(made.path), "srun", "--kill-on-bad-exit=1", "rank"]
        process = subprocess.Popen(command, cwd=made.snapshot, env=environment)
        meanwhile(process)
        return process.wait(timeout=30), made.path

    return run


DONE = """echo '{"state": "done", "step": 2, "steps": 2}' > "$RUN/status.json" """
OWN_WORD = (
    """echo '{"rank": 0, "host": "n0", "error": "RuntimeError: peer", "traceback": ""}' > "$RUN/failure-0.json" """
)


def test_srun_gets_the_logs_of_the_attempt_and_a_port(supervise):
    code, path = supervise(DONE)
    assert code == 0 and status.describe(path)["state"] == "done"
    assert (path / "srun.arguments").read_text() == (
        f"--output={path}/logs/attempt_1/rank_%t.log --kill-on-bad-exit=1 rank\n"
    )
    assert "MASTER_PORT=" in (path / "srun.env").read_text()
    assert status.read_json(path / "job.json")["job_id"] == "5"  # had the submitting command been killed


@pytest.mark.parametrize(
    ("said", "node", "rank", "exit_code", "words"),
    [
        ("srun: error: n1: task 9: Exited with exit code 3", "n1", 9, 3, "exited with code 3"),
        ("srun: error: n3: task 25: Killed", "n3", 25, -9, "killed by SIGKILL"),
        ("srun: error: n0: tasks 2-4,7: Segmentation fault (core dumped)", "n0", 2, -11, "killed by SIGSEGV"),
        ("srun: error: n1: task 8: Out Of Memory", "n1", 8, -9, "killed by SIGKILL"),
        ("srun: error: n[0-1]: tasks 0-15: Exited with exit code 127", "n[0-1]", 0, 127, "exited with code 127"),
    ],
)
def test_a_rank_that_left_no_word_is_named_with_its_host(supervise, said, node, rank, exit_code, words):
    stopped = "srun: error: n2: tasks 16-23: Terminated"
    code, path = supervise(f"echo '{stopped}' >&2; echo '{said}' >&2; exit 1")
    failure = status.read_json(path / f"failure-{rank}.json")
    assert (code, failure["rank"], failure["host"], failure["exit_code"]) == (1, rank, node, exit_code)
    now = status.describe(path)
    assert (now["state"], now["rank"]) == ("failed", rank) and words in now["reason"]
    assert now["reason"].startswith(f"rank {rank} on {node}: ")
    assert f"rank {rank} on {node}" in Path(now["log"]).read_text() and not (path / "failure-16.json").exists()
    assert said in (path / "logs" / "attempt_1" / "slurm.log").read_text()


def test_a_rank_that_lost_its_peer_is_not_taken_for_the_cause(supervise):
    code, path = supervise(
        f"{OWN_WORD}; echo 'srun: error: n0: task 0: Exited with exit code 1' >&2; "
        "echo 'srun: error: n1: task 1: Killed' >&2; exit 1"
    )
    assert code == 1 and status.describe(path)["rank"] == 1
    assert status.read_json(path / "failure-0.json")["error"] == "RuntimeError: peer"  # its own word stays


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 0", "every rank exited with code 0"),
        ("echo 'srun: error: no such option' >&2; exit 2", "srun exited with code 2"),
        (f"{DONE}; echo 'srun: error: n0: task 1: Killed' >&2; exit 1", "rank 1 on n0"),
    ],
)
def test_only_done_and_code_0_together_are_done(supervise, body, words):
    code, path = supervise(body)
    now = status.describe(path)
    assert code == 1 and now["state"] == "failed" and words in now["reason"] and Path(now["log"]).parent.is_dir()


def terminate(process: subprocess.Popen) -> None:
    """What SLURM does to every process of a job that it stops."""
    run = Path(process.args[3])
    deadline = time.monotonic() + 20
    while not (run / "ready").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    (run / "go").touch()


def says(directory: Path, command: str, body: str) -> None:
    """A SLURM command of the test's own."""
    (directory / command).write_text(f"#!/bin/bash\n{body}\n")
    (directory / command).chmod(0o755)


STOPPED = """touch $RUN/ready; while ! [ -e $RUN/go ]; do sleep 0.02; done; sleep 0.5
echo 'srun: error: n0: tasks 0-1: Terminated' >&2; {after} exit 143"""
FAILED_SINCE = "echo 'srun: error: n1: task 2: Exited with exit code 1' >&2;"
SAVED = """echo '{"state": "preempted", "error": "stopped after step 3"}' > $RUN/status.json;
echo 'srun: error: n0: tasks 0-1: Exited with exit code 75' >&2;"""


@pytest.mark.parametrize(
    ("cluster", "marker", "squeue", "after", "state", "words"),
    [
        ({}, True, "COMPLETING", "", "cancelled", "stopped on request"),
        ({}, True, "COMPLETING", SAVED, "cancelled", "stopped on request"),
        ({}, False, "COMPLETING", "", "cancelled", "stopped by SLURM (scancel"),
        ({}, False, "COMPLETING", FAILED_SINCE, "cancelled", "stopped by SLURM (scancel"),
        ({}, False, "", "", "cancelled", "stopped by SLURM"),
        ({"time_limit_min": 0}, False, "COMPLETING", "", "failed", "time limit"),
        ({"time_limit_min": 0}, False, "COMPLETING", SAVED, "preempted", "stopped after step 3"),
        ({}, False, "RUNNING", SAVED, "preempted", "stopped after step 3"),
        ({}, False, "RUNNING", FAILED_SINCE, "failed", "rank 2 on n1"),
    ],
)
def test_a_stopped_job_says_why(supervise, tmp_path, cluster, marker, squeue, after, state, words):
    def prepare(path: Path) -> None:
        if marker:
            status.write_json(path / status.CANCEL, {"time": 0})
        if squeue:
            says(tmp_path / "bin", "squeue", f"echo '5|{squeue}|None|N/A'")

    code, path = supervise(STOPPED.replace("{after}", after), prepare, terminate, **cluster)
    found = json.loads((path / "status.json").read_text())
    assert code != 0 and found["state"] == state and words in found.get("error", "")
    assert bool(list(path.glob("failure-*"))) == (state == "failed" and after == FAILED_SINCE)


@pytest.mark.parametrize(("squeue", "state"), [("RUNNING", "preempted"), ("COMPLETING", "cancelled")])
def test_a_job_of_an_array_is_known_by_its_place_in_it(supervise, tmp_path, monkeypatch, squeue, state):
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "4")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    says(tmp_path / "bin", "squeue", f"[[ $* == *--jobs=4* ]] && echo '4_1|{squeue}|None|N/A'")
    says(tmp_path / "bin", "scontrol", "exit 0")
    _, path = supervise(STOPPED.replace("{after}", SAVED), meanwhile=terminate)
    assert status.read_json(path / "status.json")["state"] == state
    assert status.read_json(path / "job.json")["job_id"] == "4_1"


def test_a_job_that_slurm_starts_again_is_preempted(supervise, tmp_path):
    says(tmp_path / "bin", "scontrol", "[ $2$4 = job5 ] && echo 'JobState=COMPLETING Restarts=1 x=y'")
    code, path = supervise(STOPPED.replace("{after}", FAILED_SINCE), meanwhile=terminate)
    found = json.loads((path / "status.json").read_text())
    assert code != 0 and found["state"] == "preempted" and "starts it again" in found["error"] and found["requeued"]


@pytest.mark.parametrize(
    ("limit", "scontrol", "requeued", "words"),
    [
        (2, "echo $@ >> $RUN/called", True, "stopped after step 3; SLURM starts it again (2 of 2)"),
        (
            1,
            "echo $@ >> $RUN/called",
            False,
            "cluster.requeue_limit=1 is reached. Go on with: python -m multirun retry",
        ),
        (2, "echo no such job >&2; exit 1", False, "not started again: scontrol requeue: no such job"),
    ],
)
def test_a_run_that_was_asked_to_stop_is_started_again(
    supervise, tmp_path, monkeypatch, limit, scontrol, requeued, words
):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    says(tmp_path / "bin", "scontrol", scontrol)
    code, path = supervise(f"{SAVED} exit 75", requeue_limit=limit)
    found = json.loads((path / "status.json").read_text())
    assert code == 1 and found["state"] == "preempted" and words in found["error"]
    assert bool(found.get("requeued")) == requeued == (path / "called").exists()
    assert not requeued or (path / "called").read_text() == "requeue 5\n"
    assert not list(path.glob("failure-*"))


def test_ranks_that_cannot_agree_are_started_again_and_those_that_lose_them_are_no_failure(supervise, tmp_path):
    says(tmp_path / "bin", "scontrol", "exit 0")
    gone = "echo 'srun: error: n0: task 1: Exited with exit code 75' >&2; sleep 0.3;"
    _, path = supervise(f"{gone} echo 'srun: error: n0: task 0: Exited with exit code 1' >&2; exit 75")
    found = json.loads((path / "status.json").read_text())
    assert found["state"] == "preempted" and "no optimizer step ended within cluster.grace_s" in found["error"]
    assert "goes on from its start" in found["error"] and not list(path.glob("failure-*"))


@pytest.mark.parametrize("sinfo", ["n0 mixed\nn1 mixed*", "n0 mixed\nn1 down", "n0 mixed\nn1 allocated"])
def test_a_failure_while_a_node_is_down_is_started_again(supervise, tmp_path, monkeypatch, sinfo):
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[0-1]")
    says(tmp_path / "bin", "sinfo", f"echo $@ > $RUN/asked; echo '{sinfo}'")
    says(tmp_path / "bin", "scontrol", "exit 0")
    _, path = supervise("echo 'srun: error: n0: task 0: Exited with exit code 1' >&2; exit 1")
    found = json.loads((path / "status.json").read_text())
    assert "--nodes=n[0-1]" in (path / "asked").read_text()
    if "allocated" in sinfo:
        assert found["state"] == "failed" and "requeued" not in found
    else:
        assert found["state"] == "preempted" and found["requeued"]
        assert found["error"].startswith(f"failed node: n1 is {sinfo.split()[-1]}; rank 0 on n0: exited with code 1")


@pytest.mark.parametrize(
    ("said", "squeue", "heard"),
    [
        ("echo 'srun: error: n1: task 1: Exited with exit code 3' >&2;", "RUNNING", "2"),
        ("touch $RUN/ready;", "COMPLETING", "0"),
        ("touch $RUN/ready;", "RUNNING", ""),  # a warning: they may save
    ],
)
def test_ranks_hear_at_once_that_the_run_is_over(supervise, tmp_path, said, squeue, heard):
    says(tmp_path / "bin", "squeue", f"echo '5|{squeue}|None|N/A'")
    stop = terminate if "ready" in said else lambda process: None
    listen = "timeout 3 head -c 1 < /dev/tcp/127.0.0.1/$MOE_LAUNCHER_LINE_PORT > $RUN/heard"
    _, path = supervise(f"{said} {listen}; exit 1", meanwhile=stop)
    assert (path / "heard").read_text() == heard


def test_the_signal_before_the_limit_is_passed_on_where_this_process_gets_it(supervise):
    def warn(process: subprocess.Popen) -> None:
        while not (Path(process.args[3]) / "ready").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR2)

    _, path = supervise(
        "trap 'touch $RUN/passed_on; exit 75' USR2; touch $RUN/ready; while true; do sleep 0.1; done", meanwhile=warn
    )
    assert (path / "passed_on").exists()


def test_lines_that_name_no_rank_are_left_alone():
    for line in ("srun: Force Terminated StepId=5.0", "srun: error: Unable to create step", "task 3: Killed"):
        assert batch.parse(line) is None
