"""Submission: one process per rank on this machine, every kind of death ends the run in seconds, nothing leaks in."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from launcher import status, submit
from launcher.environment import scrubbed
from trainer.config import ClusterConfig, ConfigError, ModelConfig, ParallelismConfig, RunConfig, TrainConfig, to_dict

ROOT = Path(__file__).resolve().parents[2]

# Stands in for trainer/__main__.py in a snapshot: does what the run's name asks for on rank 1, and lets rank 0 hang
# as it would in a collective.
FAKE_TRAINER = """
import json, os, signal, sys, time
from pathlib import Path

def main(run_dir):
    rank = int(os.environ["RANK"])
    todo = json.loads((run_dir / "run.json").read_text())["model"]["name"]
    (run_dir / f"env-{rank}.json").write_text(json.dumps(dict(os.environ)))
    (run_dir / f"pid-{rank}").write_text(str(os.getpid()))
    print(f"rank {rank} says {todo}")
    if rank == 1:
        time.sleep(0.3)  # rank 0 is in its collective by now
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


@dataclass(frozen=True)
class FakeRun:
    """The part of launcher.run.Run that submission reads."""

    key: str
    path: Path
    config: RunConfig
    snapshot: Path


@pytest.fixture
def make_run(tmp_path):
    """`make_run(todo, **cluster)`: a frozen two-rank run whose snapshot holds a fake trainer."""
    made: list[FakeRun] = []

    def make(todo: str, **cluster: Any) -> FakeRun:
        snapshot = tmp_path / "code" / "tree"
        if not snapshot.exists():
            shutil.copytree(ROOT / "launcher", snapshot / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
            (snapshot / "trainer").mkdir()
            for name in ("__init__.py", "config.py"):
                shutil.copy(ROOT / "trainer" / name, snapshot / "trainer" / name)
            (snapshot / "trainer" / "__main__.py").write_text(FAKE_TRAINER)
        config = RunConfig(
            model=ModelConfig(name=todo),
            parallelism=ParallelismConfig(nodes=1, gpus_per_node=2, dp_shard=2, ep=1),
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
            status.cancel(run.path)
            end(run, 15)


def end(run: FakeRun, timeout_s: float = 20) -> dict[str, Any]:
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
    assert status.is_alive(run.path, status.read_json(run.path / "job.json"))
    with pytest.raises(ConfigError, match="running already"):
        submit.submit([run])
    assert status.cancel(run.path) == "stopping"
    assert end(run)["state"] == "cancelled"
    assert not alive(run.path / "pid-0") and not alive(run.path / "pid-1")


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
    source = tmp_path / "source"
    shutil.copytree(ROOT / "launcher", source / "launcher", ignore=shutil.ignore_patterns("__pycache__"))
    (source / "trainer").mkdir()
    (source / "trainer" / "__main__.py").write_text(FAKE_TRAINER.replace("VALUE = 1", "VALUE = 2"))
    for name in ("__init__.py", "config.py"):
        shutil.copy(ROOT / "trainer" / name, source / "trainer" / name)
    monkeypatch.chdir(source)
    monkeypatch.setenv("PYTHONPATH", str(source))
    run = make_run("fine")
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


def test_the_time_limit_ends_a_run_as_failed(make_run):
    run = make_run("hang", time_limit_min=0)
    submit.submit([run])
    now = end(run)
    assert now["state"] == "failed" and "cluster.time_limit_min=0" in now["reason"]


SLURM = {
    "name": "slurm",
    "device": "cuda",
    "partition": "gpu",
    "account": "team a",
    "qos": "high",
    "constraint": "h100",
    "reservation": "night",
    "exclusive": True,
    "mem": "0",
    "cpus_per_task": 12,
    "time_limit_min": 90,
    "setup": ["module load cuda"],
    "srun_args": ["--container-image=x.sqsh"],
    "env": {"A": "b c"},
}


def test_the_sbatch_script_says_all_that_was_configured_and_nothing_else(make_run):
    run = make_run("fine", **SLURM)
    text = submit.script(run)
    options = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}
    assert options >= {
        *("--partition=gpu", "--account='team a'", "--qos=high", "--constraint=h100", "--reservation=night"),
        *("--exclusive", "--mem=0", "--cpus-per-task=12", "--time=90", "--nodes=1", "--ntasks-per-node=2"),
        *("--gpus-per-node=2", f"--chdir={run.snapshot}", f"--job-name={run.path.name}"),
    }
    assert not any(option.startswith(("--wckey", "--gres", "--array")) for option in options)
    srun = next(line for line in text.splitlines() if line.startswith("srun "))
    for argument in ("--kill-on-bad-exit=1", "--cpus-per-task=12", "--container-image=x.sqsh"):
        assert f" {argument} " in srun
    assert f"--output={run.path}/logs/attempt_1/rank_%t.log" in srun and f"-m launcher.job {run.path}" in srun
    assert "export A='b c'" in text and "module load cuda" in text
    assert list(run.path.iterdir()) == [run.path / "run.json"]

    plain = submit.script(make_run("fine", name="slurm", device="cpu", gres=""))
    for absent in ("exclusive", "partition", "gpus-per-node", "gres", "cpus-per-task", "mem", "reservation", "False"):
        assert absent not in plain
    assert "--gres=gpu:8" in submit.script(make_run("fine", name="slurm", device="cuda", gres="gpu:8"))


@pytest.mark.parametrize("key", ["partition", "account", "env", "setup"])
def test_line_ends_are_refused_by_key(make_run, key):
    value = {"env": {"A": "x\ny"}, "setup": ["x\ny"]}.get(key, "a\nb")
    with pytest.raises(ConfigError, match=f"cluster.{key}"):
        submit.script(make_run("fine", name="slurm", **{key: value}))


def test_sbatch_gets_the_script_and_a_clean_environment(make_run, tmp_path, monkeypatch):
    fake = tmp_path / "bin" / "sbatch"
    fake.parent.mkdir()
    fake.write_text(
        f"#!/bin/bash\nenv > {tmp_path}/sbatch.env\ncp $1 {tmp_path}/got.sh\necho Submitted batch job 4711\n"
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_CPU_BIND", "quiet")
    run = make_run("fine", **SLURM)
    expected = submit.script(run)
    monkeypatch.chdir(tmp_path)
    (job,) = submit.submit([run])
    assert job["job_id"] == "4711" and status.read_json(run.path / "job.json")["cluster"] == "slurm"
    assert (tmp_path / "got.sh").read_text() == expected == (run.path / "submission.sh").read_text()
    assert "SLURM_CPU_BIND" not in (tmp_path / "sbatch.env").read_text() and os.environ["SLURM_CPU_BIND"] == "quiet"
    assert (run.path / "logs" / "attempt_1").is_dir()
    assert status.describe(run.path)["state"] == "queued"
    (run.path / "job.json").unlink()  # nothing to cancel here


def test_when_sbatch_refuses_one_run_the_others_are_taken_back(make_run, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    sbatch = f"#!/bin/bash\nif [ -e {tmp_path}/once ]; then echo 'invalid partition' >&2; exit 1; fi\n"
    sbatch += f"touch {tmp_path}/once\necho Submitted batch job 4711\n"
    for name, text in {"sbatch": sbatch, "scancel": f"#!/bin/bash\necho $@ > {tmp_path}/cancelled\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    runs = [make_run("fine", **SLURM), make_run("fine", **SLURM)]
    with pytest.raises(ConfigError, match="invalid partition"):
        submit.submit(runs)
    assert (tmp_path / "cancelled").read_text() == "4711\n"
    assert status.describe(runs[1].path)["state"] == "frozen"
    (runs[0].path / "job.json").unlink()


def test_a_script_that_cannot_start_is_lost_and_its_own_log_says_why(make_run):
    run = make_run("fine")
    shutil.rmtree(run.snapshot)
    submit.submit([run])
    now = end(run)
    assert now["state"] == "lost" and str(run.snapshot) in Path(now["log"]).read_text()


def test_without_sbatch_slurm_is_refused_before_anything_is_written(make_run, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    run = make_run("fine", **SLURM)
    with pytest.raises(ConfigError, match="sbatch is not on PATH"):
        submit.submit([run])
    assert list(run.path.iterdir()) == [run.path / "run.json"]


def test_submission_imports_submitit_only_when_it_submits():
    code = "import sys, launcher.submit; sys.exit(bool({'submitit', 'torch', 'wandb', 'hydra'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_slurm_task_names_the_packages_it_lacks(make_run, tmp_path):
    run = make_run("fine", **SLURM)
    code = (
        "import importlib.util as u, sys, runpy\nfind = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name in ('submitit', 'wandb') else find(name, *a)\n"
        "sys.argv = ['launcher.job', sys.argv[1]]\nrunpy.run_module('launcher.job', run_name='__main__')\n"
    )
    environment = os.environ | {"SLURM_JOB_ID": "5", "SLURM_PROCID": "3"}
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], cwd=run.snapshot, env=environment, check=False)
    assert done.returncode == 1
    assert "lacks submitit, wandb" in status.read_json(run.path / "failure-3.json")["error"]


def test_a_slurm_task_finds_its_rank_and_meeting_point(make_run, tmp_path):
    code = "import json, launcher.job; print(json.dumps(launcher.job.rank_variables()))"
    slurm = {
        "SLURM_JOB_ID": "36083788",
        "SLURM_NTASKS": "32",
        "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NODEID": "2",
        "SLURM_PROCID": "17",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_NODELIST": "node[03-06]",
        "SUBMITIT_EXECUTOR": "slurm",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | slurm, capture_output=True, check=True
    )
    found = json.loads(done.stdout)
    assert found.pop("MASTER_PORT").isdigit()
    assert found == {
        "RANK": "17", "LOCAL_RANK": "1", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node03"
    }  # fmt: skip
