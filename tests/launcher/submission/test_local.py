"""A run on this machine: one process per rank, every kind of death ends it in seconds, nothing leaks in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launcher import local, status, submit
from launcher.environment import scrubbed
from trainer.config import ConfigError, to_dict

ROOT = Path(__file__).resolve().parents[3]


def end(run: Any, timeout_s: float = 20) -> dict[str, Any]:
    """The run's description once it has ended."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        now = status.describe(run.path)
        if now["state"] in status.FINAL and not status.is_held(run.path):
            return now
        time.sleep(0.05)
    raise AssertionError(f"still {status.describe(run.path)} after {timeout_s} s")


def wait_for(condition, timeout_s: float = 15) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


def alive(path: Path) -> bool:
    return status._exists(int(path.read_text()))


def test_a_run_ends_done_with_real_text_logs_and_a_result(make_run, capsys):
    run = make_run("fine")
    (job,) = submit.submit([run])
    assert submit.wait([run]) == 0
    assert status.describe(run.path)["state"] == "done"
    assert job["job_id"].isdigit() and json.loads((run.path / "job.json").read_text()) == job
    for rank in (0, 1):
        assert f"rank {rank} says fine" in (run.path / f"logs/attempt_1/rank_{rank}.log").read_text()
    shown = capsys.readouterr().out
    assert "last 3" in shown and str(run.path) in shown
    assert (run.path / "submission.sh").read_text() == submit.script(run)


@pytest.mark.parametrize(
    ("todo", "words"),
    [
        ("raise", "ValueError: boom on purpose"),
        ("exit", "exited with code 3"),
        ("kill", "killed by SIGKILL"),
        ("sys_exit", "SystemExit: 0"),
        ("stubborn", "exited with code 3"),  # rank 0 ignores SIGTERM
    ],
)
def test_a_dying_rank_fails_the_run_and_stops_the_others(make_run, capsys, todo, words):
    run = make_run(todo)
    submit.submit([run])
    start = time.monotonic()
    assert submit.wait([run]) == 1
    assert time.monotonic() - start < 10
    now = status.describe(run.path)
    assert (now["state"], now["rank"]) == ("failed", 1) and words in now["reason"]
    assert now["log"] == str(run.path / "logs/attempt_1/rank_1.log")
    assert not alive(run.path / "pid-0") and not alive(run.path / "pid-1")
    shown = capsys.readouterr().out
    assert words in shown and now["log"] in shown
    if todo == "raise":
        assert "Traceback" in Path(now["log"]).read_text() and "boom on purpose" in Path(now["log"]).read_text()


def test_an_import_error_fails_the_run_with_its_traceback(make_run):
    run = make_run("fine")
    (run.snapshot / "trainer" / "__main__.py").write_text("import no_such_module\n")
    submit.submit([run])
    now = end(run)
    assert now["state"] == "failed" and "no_such_module" in now["reason"]
    assert "no_such_module" in Path(now["log"]).read_text()


def test_a_run_outlives_the_command_that_submitted_it_and_cancel_leaves_no_process(make_run):
    run = make_run("hang")
    code = (
        "import json, sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from launcher import submit\nfrom trainer.config import load\n"
        "path, snapshot = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "submit.submit([SimpleNamespace(key='k', path=path, config=load(path), snapshot=snapshot)])\n"
    )
    subprocess.run([sys.executable, "-c", code, str(run.path), str(run.snapshot)], cwd=ROOT, check=True, timeout=30)
    wait_for(lambda: (run.path / "pid-0").exists() and (run.path / "pid-1").exists())
    job = status.read_json(run.path / "job.json")
    assert status.is_alive(run.path, job) and os.getsid(int(job["job_id"])) == int(job["job_id"])
    with pytest.raises(ConfigError, match="running already"):
        submit.submit([run])
    assert status.cancel([run.path]) == ["stopping"]
    assert end(run)["state"] == "cancelled"
    assert not alive(run.path / "pid-0") and not alive(run.path / "pid-1")


def failure(run: Any, rank: int, error: str, when: float) -> None:
    path = run.path / f"failure-{rank}.json"
    path.write_text(json.dumps({"rank": rank, "host": "here", "error": error, "traceback": error}))
    os.utime(path, (when, when))


def test_the_rank_that_died_first_is_named_not_those_that_lost_it(make_run):
    run = make_run("fine")
    failure(run, 0, "connection closed by peer", when=20)
    killed = local.verdict(run.path, {0: 1, 1: -9})
    assert killed["rank"] == 1 and killed["exit_code"] == -9 and "SIGKILL" in killed["error"]
    failure(run, 1, "the cause", when=10)
    raised = local.verdict(run.path, {0: 1, 1: 1})
    assert raised["rank"] == 1 and "the cause" in raised["error"]
    failure(run, 1, "the consequence", when=30)
    assert local.verdict(run.path, {0: 1, 1: 1})["rank"] == 0


def test_exit_codes_of_zero_are_not_enough(make_run):
    run = make_run("fine")
    status.write_json(run.path / "status.json", {"state": "running"})
    assert local.verdict(run.path, {0: 0, 1: 0})["state"] == "failed"
    status.write_json(run.path / "status.json", {"state": "done"})
    assert local.verdict(run.path, {0: 0, 1: 0})["state"] == "done"
    assert local.verdict(run.path, {0: 0, 1: 139})["state"] == "failed"


def test_the_script_can_be_run_again_by_hand_from_any_shell(make_run):
    run = make_run("fine")
    submit.submit([run])
    assert end(run)["state"] == "done"
    stale = os.environ | {"MASTER_ADDR": "elsewhere", "SLURM_PROCID": "4", "SUBMITIT_EXECUTOR": "slurm"}
    by_hand = subprocess.run(["bash", run.path / "submission.sh"], env=stale, cwd="/", check=False, timeout=30)
    assert by_hand.returncode == 0 and status.describe(run.path)["attempt"] == 2
    seen = status.read_json(run.path / "env-1.json")
    assert seen["MASTER_ADDR"] == "127.0.0.1" and seen["RANK"] == "1" and "SLURM_PROCID" not in seen


def test_ctrl_c_on_a_waiting_command_cancels_the_run(make_run):
    run = make_run("hang")
    submit.submit([run])
    wait_for(lambda: (run.path / "pid-1").exists())
    code = "import sys; from pathlib import Path; from launcher.watch import wait; sys.exit(wait([Path(sys.argv[1])]))"
    waiting = subprocess.Popen([sys.executable, "-c", code, str(run.path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    time.sleep(1)
    waiting.send_signal(signal.SIGINT)
    out, _ = waiting.communicate(timeout=20)
    assert waiting.returncode == 130 and "cancelled" in out
    assert status.describe(run.path)["state"] == "cancelled"
    assert not alive(run.path / "pid-0") and not alive(run.path / "pid-1")


def test_ranks_die_with_their_supervisor_and_the_run_is_lost(make_run):
    run = make_run("hang")
    (job,) = submit.submit([run])
    wait_for(lambda: (run.path / "pid-0").exists() and (run.path / "pid-1").exists())
    os.kill(int(job["job_id"]), signal.SIGKILL)
    wait_for(lambda: not alive(run.path / "pid-0") and not alive(run.path / "pid-1"), 5)
    os.waitpid(int(job["job_id"]), 0)
    job["submitted"] -= 60
    status.write_json(run.path / "job.json", job)
    now = status.describe(run.path)
    assert now["state"] == "lost" and "processes are gone" in now["reason"]


def test_later_edits_of_the_source_change_nothing(make_run, tmp_path, monkeypatch):
    run = make_run("fine")
    source = tmp_path / "source"
    shutil.copytree(run.snapshot, source)
    trainer = source / "trainer" / "__main__.py"
    trainer.write_text(trainer.read_text().replace("VALUE = 1", "VALUE = 2"))
    monkeypatch.chdir(source)
    monkeypatch.setenv("PYTHONPATH", str(source))
    submit.submit([run])
    assert end(run)["state"] == "done"
    assert status.read_json(run.path / "result.json")["answer"] == 1
    assert sorted(path.name for path in source.iterdir()) == ["launcher", "trainer"]


def test_ranks_see_the_users_variables_but_no_other_jobs(make_run, monkeypatch):
    stale = {
        "MASTER_ADDR": "elsewhere",
        "MASTER_PORT": "1",
        "RANK": "7",
        "WORLD_SIZE": "64",
        "SLURM_CPUS_PER_TASK": "3",
        "SLURM_NTASKS": "1",
        "PMI_RANK": "2",
        "SBATCH_ACCOUNT": "x",
    }
    for name, value in (stale | {"CUDA_VISIBLE_DEVICES": "5,3", "MY_OWN": "kept"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run = make_run("fine", env={"NCCL_IB_HCA": "mlx5_0:1,mlx5_3:1", "QUOTED": "a 'b' \"c\" $HOME; echo x"})
    submit.submit([run])
    assert end(run)["state"] == "done"
    seen = [status.read_json(run.path / f"env-{rank}.json") for rank in (0, 1)]
    for rank, environment in enumerate(seen):
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1" and environment["MASTER_PORT"] == seen[0]["MASTER_PORT"] != "1"
        assert not {"SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "PMI_RANK", "SBATCH_ACCOUNT"} & set(environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == "5,3" and environment["MY_OWN"] == "kept"
        assert environment["NCCL_IB_HCA"] == "mlx5_0:1,mlx5_3:1"
        assert environment["QUOTED"] == "a 'b' \"c\" $HOME; echo x"
        assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2)


def test_scrubbing_keeps_where_the_cluster_is():
    assert scrubbed({"SLURM_CONF": "/etc/s.conf", "SLURM_JOB_ID": "1", "HOME": "/h"}) == {
        "SLURM_CONF": "/etc/s.conf",
        "HOME": "/h",
    }


def test_a_second_attempt_has_its_own_logs_and_no_failures_of_the_first(make_run):
    run = make_run("raise")
    submit.submit([run])
    assert end(run)["state"] == "failed"
    fine = replace(run.config, model=replace(run.config.model, name="fine"))
    (run.path / "run.json").write_text(json.dumps(to_dict(fine)))
    submit.submit([run])
    now = end(run)
    assert now["state"] == "done" and now["attempt"] == 2 and "reason" not in now
    assert not list(run.path.glob("failure-*.json")) and (run.path / "logs/attempt_1/failure-1.json").exists()
    assert "says fine" in (run.path / "logs/attempt_2/rank_0.log").read_text()


def test_at_the_time_limit_a_run_is_asked_to_stop(make_run):
    run = make_run("hang", time_limit_min=0, grace_s=0.5)
    submit.submit([run])
    now = end(run)
    assert now["state"] == "preempted" and "cluster.time_limit_min=0: asked to stop; no optimizer" in now["reason"]


def test_ranks_that_cannot_agree_leave_by_themselves_and_name_what_survives(make_run):
    run = make_run("hang", grace_s=0.5)
    (job,) = submit.submit([run])
    wait_for(lambda: (run.path / "pid-0").exists() and (run.path / "pid-1").exists())
    os.kill(int(job["job_id"]), signal.SIGTERM)
    now = end(run)
    assert now["state"] == "preempted" and now["reason"].startswith("SIGTERM: asked to stop; no optimizer step ended")
    logs = [(run.path / "logs" / "attempt_1" / f"rank_{rank}.log").read_text() for rank in (0, 1)]
    assert any("no optimizer step ended within cluster.grace_s=0.5 s after SIGTERM" in log for log in logs)
    assert not alive(run.path / "pid-0") and not alive(run.path / "pid-1")


def test_a_script_that_cannot_start_is_lost_and_its_own_log_says_why(make_run):
    run = make_run("fine")
    shutil.rmtree(run.snapshot)
    submit.submit([run])
    now = end(run)
    assert now["state"] == "lost" and str(run.snapshot) in Path(now["log"]).read_text()
