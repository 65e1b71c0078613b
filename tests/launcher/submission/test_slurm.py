"""The job script for SLURM says what was configured and nothing else; sbatch gets it, in a clean environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher import status, submit
from trainer.config import ConfigError

ROOT = Path(__file__).resolve().parents[3]

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
