"""Jobs of a real SLURM, with a fake trainer: every kind of death frees the nodes in seconds and is named; nothing leaks in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import slurm, status, submit
from launcher.status import _exists
from multirun.__main__ import main as multirun
from trainer.config import ConfigError

SOONER_S = 20.0  # than KillWait, after which SLURM kills what has not ended by itself: 30 s here and by default


def pids(run) -> list[int]:
    return [int(path.read_text()) for path in run.path.glob("pid-*")]


def started(run, wait_for) -> None:
    """Wait until every rank is in its work."""
    wait_for(lambda: len(pids(run)) == run.config.parallelism.world_size)


@pytest.mark.parametrize(
    ("todo", "words", "nodes", "gpus_per_node"),
    [
        ("raise", "ValueError: boom on purpose (trainer/__main__.py:", 4, 2),
        ("exit", "exited with code 3", 4, 2),
        ("kill", "was killed by SIGKILL", 4, 8),
        ("sys_exit", "SystemExit: 0", 2, 1),
        ("stubborn", "exited with code 3", 2, 2),  # rank 0 ignores SIGTERM
    ],
)
def test_a_dying_rank_fails_the_job_and_frees_the_nodes(
    cluster, make_run, wait_for, capsys, todo, words, nodes, gpus_per_node
):
    run = make_run(todo, nodes, gpus_per_node, name="slurm")
    (job,) = submit.submit([run])
    wait_for(lambda: (run.path / "pid-1").exists())
    wait_for(lambda: cluster.is_free_of(job["job_id"]), SOONER_S)
    assert cluster.state(job["job_id"]) == "FAILED" and not any(_exists(pid) for pid in pids(run))
    failure, now = status.read_json(run.path / "failure-1.json"), status.describe(run.path)
    host = cluster.nodes[1 // gpus_per_node]
    assert (failure["rank"], failure["host"]) == (1, host)
    assert (now["state"], now["rank"]) == ("failed", 1) and now["reason"].startswith(f"rank 1 on {host}: ")
    assert words in now["reason"]
    log = Path(now["log"]).read_text()
    assert f"rank 1 on {host}" in log and ("Traceback" in log) == (todo in ("raise", "sys_exit"))
    assert submit.wait([run]) == 1 and words.partition(" (")[0] in capsys.readouterr().out


def test_an_import_error_is_named(cluster, make_run, wait_for):
    run = make_run("fine", name="slurm")
    (run.snapshot / "trainer" / "__main__.py").write_text("import no_such_module\n")
    submit.submit([run])
    assert submit.wait([run]) == 1
    now = status.describe(run.path)
    assert "No module named 'no_such_module'" in now["reason"] and "Traceback" in Path(now["log"]).read_text()


def test_a_job_whose_script_fails_before_any_rank_says_where_its_log_is(cluster, make_run, wait_for, capsys):
    run = make_run("fine", name="slurm", setup=["echo no such module: cuda >&2", "exit 7"])
    (job,) = submit.submit([run])
    wait_for(lambda: cluster.is_free_of(job["job_id"]))
    now = status.describe(run.path)
    assert now["state"] == "failed" and "SLURM says FAILED" in now["reason"]
    assert "no such module: cuda" in Path(now["log"]).read_text()
    assert multirun(["logs", str(run.path)]) == 0 and "no such module: cuda" in capsys.readouterr().out


def test_what_sbatch_says_against_a_job_is_passed_on(cluster, make_run):
    run = make_run("fine", name="slurm", partition="nope")
    with pytest.raises(ConfigError, match="invalid partition specified: nope"):
        submit.submit([run])
    assert status.describe(run.path)["state"] == "frozen"


@pytest.mark.parametrize("how", ["multirun cancel", "scancel", "multirun cancel without scancel"])
def test_a_cancelled_job_frees_the_nodes(cluster, make_run, wait_for, capsys, monkeypatch, how):
    run = make_run("hang", 4, 4, name="slurm")
    (job,) = submit.submit([run])
    started(run, wait_for)
    assert status.describe(run.path)["state"] == "starting"
    if how == "scancel":
        subprocess.run(["scancel", job["job_id"]], check=True)
    else:
        if how.endswith("without scancel"):  # say, on a machine that only shares the files
            monkeypatch.setattr(slurm.shutil, "which", lambda name: None if name == "scancel" else name)
        assert multirun(["cancel", str(run.path)]) == 0
    wait_for(lambda: cluster.is_free_of(job["job_id"]), SOONER_S)
    ended = "FAILED" if how.endswith("without scancel") else "CANCELLED"
    assert cluster.state(job["job_id"]) == ended and not any(_exists(pid) for pid in pids(run))
    now = status.describe(run.path)
    asked = "on request" if how.startswith("multirun cancel") else "by SLURM"
    assert now["state"] == "cancelled" and asked in now["reason"] and not list(run.path.glob("failure-*"))
    assert submit.wait([run]) == 130


def test_a_job_in_the_queue_says_why_it_waits_and_is_cancelled_there(cluster, make_run, wait_for, capsys):
    run = make_run("fine", name="slurm", sbatch_args=["--begin=now+3600"])
    (job,) = submit.submit([run])
    wait_for(lambda: "waits" in status.describe(run.path) and status.describe(run.path)["waits"] == "BeginTime")
    now = status.describe(run.path)
    assert now["state"] == "queued" and now["expected_start"]
    assert any("expected start" in line for line in submit.announce("RUN", [job]))
    assert multirun(["status", str(run.path)]) == 0 and "queued (BeginTime, expected start" in capsys.readouterr().out
    assert multirun(["cancel", str(run.path)]) == 0
    wait_for(lambda: status.describe(run.path)["state"] == "cancelled")
    assert multirun(["retry", str(run.path)]) == 2  # its code is named in source.json, which a fake run has not


def test_two_jobs_on_the_same_nodes_meet_at_different_ports_and_inherit_nothing_stale(
    cluster, make_run, wait_for, monkeypatch
):
    for name in ("MASTER_ADDR", "MASTER_PORT", "SLURM_NTASKS", "SLURM_CPU_BIND", "SLURM_STEP_NODELIST", "RANK"):
        monkeypatch.setenv(name, "1")
    runs = [make_run("hang", 2, 2, name="slurm", env={"A": "b c,d"}, cpus_per_task=3) for _ in range(2)]
    jobs = submit.submit(runs)
    assert jobs[0]["job_id"].partition("_")[0] == jobs[1]["job_id"].partition("_")[0]
    for run in runs:
        started(run, wait_for)
    seen = [[json.loads((run.path / f"env-{rank}.json").read_text()) for rank in range(4)] for run in runs]
    ports = [{one["MASTER_PORT"] for one in ranks} for ranks in seen]
    assert len(ports[0]) == len(ports[1]) == 1 and ports[0] != ports[1]
    for ranks in seen:
        assert {one["MASTER_ADDR"] for one in ranks} == {ranks[0]["SLURMD_NODENAME"]}
        assert [one["LOCAL_RANK"] for one in ranks] == ["0", "1", "0", "1"]
        assert {(one["A"], one["SLURM_CPUS_PER_TASK"], one["WORLD_SIZE"]) for one in ranks} == {("b c,d", "3", "4")}
        assert "CUDA_VISIBLE_DEVICES" not in ranks[0]
    status.cancel([run.path for run in runs])


def test_every_rank_sees_all_gpus_of_its_node(cluster, make_run):
    run = make_run("fine", 2, 8, name="slurm", device="cuda")
    submit.submit([run])
    assert submit.wait([run]) == 0
    masks = {json.loads(path.read_text())["CUDA_VISIBLE_DEVICES"] for path in run.path.glob("env-*.json")}
    assert masks == {"0,1,2,3,4,5,6,7"} and len(list(run.path.glob("env-*.json"))) == 16


def test_a_job_can_be_submitted_from_inside_a_job(cluster, make_run, wait_for):
    run = make_run("fine", 2, 2, name="slurm")
    code = (
        "import sys\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from launcher import submit\nfrom trainer.config import load\n"
        "path, snapshot = Path(sys.argv[1]), Path(sys.argv[2])\n"
        "submit.submit([SimpleNamespace(key='k', path=path, config=load(path), snapshot=snapshot)])\n"
    )
    inside = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", sys.executable, "-c", code]
    root = str(Path(__file__).resolve().parents[2])
    subprocess.run([*inside, str(run.path), str(run.snapshot)], cwd=root, check=True, timeout=60)
    assert submit.wait([run]) == 0
    ranks = [json.loads((run.path / f"env-{rank}.json").read_text()) for rank in range(4)]
    assert {one["SLURM_JOB_NUM_NODES"] for one in ranks} == {"2"} and "SLURM_CPUS_PER_TASK" not in ranks[0]


def test_a_requeued_job_is_the_next_attempt_of_the_same_run(cluster, make_run, wait_for):
    run = make_run("hang", 2, 1, name="slurm", grace_s=1)
    (job,) = submit.submit([run])
    started(run, wait_for)
    (run.path / "pid-0").unlink()
    subprocess.run(["scontrol", "requeue", job["job_id"]], check=True)
    wait_for(lambda: "waits" in status.describe(run.path))
    now = status.describe(run.path)
    assert now["state"] == "preempted" and not status.has_ended(now) and "start it again" in now["reason"]
    assert "starts it again" in status.read_json(run.path / "status.json")["error"]
    wait_for(lambda: (run.path / "pid-0").exists(), 60)
    now = status.describe(run.path)
    assert (now["state"], now["attempt"]) == ("starting", 2) and "reason" not in now
    assert (run.path / "logs" / "attempt_2" / "rank_0.log").exists()
    status.cancel([run.path])
    wait_for(lambda: cluster.is_free_of(job["job_id"]))


def test_a_killed_first_node_is_said_by_slurm(cluster, make_run, wait_for):
    """launcher.batch is killed and leaves no word: SLURM's own state is what is left."""
    run = make_run("hang", 2, 1, name="slurm", grace_s=1)
    (job,) = submit.submit([run])
    started(run, wait_for)
    batch = subprocess.run(["pgrep", "-f", f"launcher.batch {run.path}"], capture_output=True, text=True, check=True)
    os.kill(int(batch.stdout.split()[0]), signal.SIGKILL)
    wait_for(lambda: cluster.is_free_of(job["job_id"]))
    assert slurm.ask([job["job_id"]])[job["job_id"]].has_ended
    now = status.describe(run.path)
    assert now["state"] == "failed" and "SLURM says FAILED" in now["reason"]
