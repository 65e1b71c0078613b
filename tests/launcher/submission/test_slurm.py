"""The job script for SLURM says what was configured and nothing else; sbatch gets it, in a clean environment."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import status, submit
from launcher.job_script import container_mounts
from trainer.config import ConfigError, DataConfig, LaunchConfig, ModelConfig, RunConfig

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
    "mail_type": "END,FAIL",
    "mail_user": "me@here",
    "setup": ["module load cuda"],
    "sbatch_args": ["--exclude=node7", "--nice"],
    "srun_args": ["--mpi=none"],
    "python": "/site/bin/python",
    "env": {"A": "b c"},
}


def directives(text: str) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")}


def command(text: str) -> str:
    """The script's last line, from srun on."""
    return text.strip().splitlines()[-1].partition(' "$run_dir" ')[2]


def test_the_script_says_all_that_was_configured_and_nothing_else(make_run):
    run = make_run("fine", **SLURM)
    text = submit.script(run)
    assert directives(text) >= {
        *("--partition=gpu", "--account='team a'", "--qos=high", "--constraint=h100", "--reservation=night"),
        *("--exclusive", "--mem=0", "--cpus-per-task=12", "--time=90", "--nodes=1", "--ntasks-per-node=2"),
        *("--gpus-per-node=2", f"--chdir={run.snapshot}", f"--job-name={run.path.name}", "--requeue"),
        *("--mail-type=END,FAIL", "--mail-user=me@here", "--exclude=node7", "--nice"),
        f"--output={run.path}/logs/slurm_%j.log",
    }
    assert not any(option.startswith(("--wckey", "--gres", "--array")) for option in directives(text))
    assert f"run_dir={run.path}" in text and "export A='b c'" in text and "module load cuda" in text
    assert f"exec {sys.executable} -u -m launcher.batch " in text
    srun = command(text)
    for argument in ("--kill-on-bad-exit=1", "--cpus-per-task=12", "--mpi=none"):
        assert f" {argument} " in srun
    assert srun.endswith(' /site/bin/python -u -m launcher.job "$run_dir"')
    assert list(run.path.iterdir()) == [run.path / "run.json"]


def test_what_is_not_configured_is_not_in_the_script(make_run):
    text = submit.script(make_run("fine", name="slurm", device="cpu"))
    names = {option.partition("=")[0] for option in directives(text)}
    assert names == {
        *("--chdir", "--job-name", "--nodes", "--ntasks-per-node", "--open-mode", "--output"),
        *("--requeue", "--signal", "--time"),
    }
    assert "False" not in text and "None" not in text and "apptainer" not in text and "container" not in text
    assert "--gres=gpu:8" in directives(submit.script(make_run("fine", name="slurm", device="cuda", gres="gpu:8")))
    per_cpu = submit.script(make_run("fine", name="slurm", device="cuda", gres="none", mem_per_cpu="4G"))
    assert directives(per_cpu) >= {"--gres=none", "--mem-per-cpu=4G"} and "gpus-per-node" not in per_cpu


def test_ranks_run_in_a_container_that_sees_runs_code_and_data(make_run):
    container = {
        "name": "slurm",
        "device": "cuda",
        "container_image": "nvcr.io#nvidia/pytorch",
        "container_mounts": ["/x:/y"],
    }
    run = make_run("fine", container="pyxis", **container)
    runs_dir = run.config.launch.runs_dir
    pyxis = command(submit.script(run))
    for argument in (
        *("--container-image=nvcr.io#nvidia/pytorch", f"--container-mounts={runs_dir}:{runs_dir},/x:/y"),
        *(f"--container-workdir={run.snapshot}", "--kill-on-bad-exit=1"),
    ):
        assert argument in shlex.split(pyxis)
    assert pyxis.endswith(' python -u -m launcher.job "$run_dir"')
    apptainer = command(submit.script(make_run("fine", container="apptainer", **container)))
    inside = f"apptainer exec --nv --bind {runs_dir},/x:/y --pwd {run.snapshot} nvcr.io#nvidia/pytorch python -u -m launcher.job"
    assert shlex.split(inside) == shlex.split(apptainer)[-len(shlex.split(inside)) - 1 : -1]
    on_cpus = command(submit.script(make_run("fine", container="apptainer", **container | {"device": "cpu"})))
    assert "--nv" not in on_cpus
    own = command(submit.script(make_run("fine", container="pyxis", python="/opt/python", **container)))
    assert own.endswith(' /opt/python -u -m launcher.job "$run_dir"')


def test_a_container_also_sees_the_files_that_the_run_reads():
    config = RunConfig(
        data=DataConfig(name="chat", path="/data/chat/a.jsonl"),
        model=ModelConfig(weights="/models/qwen"),
        launch=LaunchConfig(runs_dir="/scratch/runs"),
    )
    assert container_mounts(config) == ["/scratch/runs", "/data/chat", "/models/qwen"]
    by_name = replace(config, data=DataConfig(name="chat", path="someone/chats"))
    assert container_mounts(by_name) == ["/scratch/runs", "/models/qwen"]


@pytest.mark.parametrize("key", ["partition", "account", "env", "setup", "sbatch_args", "mail_user"])
def test_line_ends_are_refused_by_key(make_run, key):
    value = {"env": {"A": "x\ny"}, "setup": ["x\ny"], "sbatch_args": ["--nice\n"]}.get(key, "a\nb")
    with pytest.raises(ConfigError, match=f"cluster.{key}"):
        submit.script(make_run("fine", name="slurm", **{key: value}))


def test_sbatch_gets_the_script_and_a_clean_environment(make_run, fake_slurm, tmp_path, monkeypatch):
    stale = ("SLURM_CPU_BIND", "SBATCH_PARTITION", "PMI_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE")
    for name in stale:
        monkeypatch.setenv(name, "stale")
    monkeypatch.setenv("SLURM_CONF", "/this/cluster.conf")
    run = make_run("fine", **SLURM)
    expected = submit.script(run)
    monkeypatch.chdir(tmp_path)
    (job,) = submit.submit([run])
    assert job["job_id"] == "4711" and status.read_json(run.path / "job.json") == job
    assert fake_slurm.scripts == [expected] and (run.path / "submission.sh").read_text() == expected
    environment = fake_slurm.read("4711.env")
    assert not any(f"{name}=" in environment for name in stale) and "SLURM_CONF=/this/cluster.conf" in environment
    assert all(os.environ[name] == "stale" for name in stale)
    assert (run.path / "logs").is_dir() and job["log"] == str(run.path / "logs" / "slurm_4711.log")
    assert status.describe(run.path)["state"] == "queued"


def test_runs_of_one_shape_are_one_array_in_which_each_job_finds_its_run(make_run, fake_slurm, tmp_path):
    small = [make_run("fine", **SLURM, array_parallelism=2) for _ in range(3)]
    other = make_run("fine", **SLURM | {"time_limit_min": 5})
    jobs = submit.submit([small[0], other, *small[1:]])
    assert [job["job_id"] for job in jobs] == ["4711_0", "4712", "4711_1", "4711_2"]
    assert [job["path"] for job in jobs] == [str(run.path) for run in (small[0], other, *small[1:])]
    array, single = fake_slurm.scripts
    assert directives(array) >= {"--array=0-2%2", "--job-name=sweep", "--time=90"} and "--array" not in single
    for index, run in enumerate(small):
        assert (run.path / "submission.sh").read_text() == array
        lines = "\n".join(line for line in array.splitlines() if not line.startswith(("exec", "module")))
        shown = subprocess.run(
            ["bash", "-c", f"{lines}\necho $run_dir"],
            env={"SLURM_ARRAY_TASK_ID": str(index)}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert shown.stdout.strip() == str(run.path)
    assert jobs[2]["log"] == str(small[1].path.parent / "logs" / "slurm_4711_1.log")


def test_an_array_is_cut_at_what_the_cluster_takes(make_run, fake_slurm):
    (fake_slurm.path / "max_array_size").write_text("3")
    runs = [make_run("fine", **SLURM) for _ in range(7)]
    jobs = submit.submit(runs)
    arrays = [option for text in fake_slurm.scripts for option in directives(text) if "--array" in option]
    assert arrays == ["--array=0-2", "--array=0-2"] and len(fake_slurm.scripts) == 3  # indices below MaxArraySize
    assert [job["job_id"] for job in jobs] == [f"47{a}_{i}" for a in (11, 12) for i in range(3)] + ["4713"]
    assert [status.read_json(run.path / "job.json")["job_id"] for run in runs] == [job["job_id"] for job in jobs]


def test_when_sbatch_refuses_one_run_the_others_are_taken_back(make_run, fake_slurm):
    fake_slurm.install("sbatch", "[ -e 1.sh ] && { echo 'invalid partition' >&2; exit 1; }; touch 1.sh\necho job 4711")
    runs = [make_run("fine", **SLURM), make_run("fine", **SLURM | {"time_limit_min": 5})]
    with pytest.raises(ConfigError, match="invalid partition"):
        submit.submit(runs)
    assert fake_slurm.read("cancelled") == "4711\n"
    assert status.describe(runs[1].path)["state"] == "frozen"


def test_a_refused_retry_leaves_the_run_as_it_was(make_run, fake_slurm):
    run = make_run("fine", **SLURM)
    status.write_json(run.path / "status.json", {"state": "failed", "error": "of old"})
    (fake_slurm.path / "refuse").write_text("no")
    with pytest.raises(ConfigError, match="sbatch did not take .*: .*no"):
        submit.submit([run])
    assert status.describe(run.path)["state"] == "failed" and status.describe(run.path)["reason"] == "of old"


def test_a_run_that_slurm_still_has_is_not_submitted_again(make_run, fake_slurm):
    run = make_run("fine", **SLURM)
    submit.submit([run])
    fake_slurm.says("4711|PENDING|Resources|N/A")
    with pytest.raises(ConfigError, match="running already"):
        submit.submit([run])
    fake_slurm.says("4711|CANCELLED|None|N/A")
    assert submit.submit([run])[0]["job_id"] == "4712"


def test_without_sbatch_slurm_is_refused_before_anything_is_written(make_run, monkeypatch):
    monkeypatch.setenv("PATH", "/nonexistent")
    run = make_run("fine", **SLURM)
    with pytest.raises(ConfigError, match="sbatch is not on PATH"):
        submit.submit([run])
    assert list(run.path.iterdir()) == [run.path / "run.json"]


def test_what_follows_a_submission_is_said_with_the_expected_start(make_run, fake_slurm):
    (job,) = submit.submit([make_run("fine", **SLURM)])
    fake_slurm.says("4711|PENDING|Priority|2026-12-02T08:00:00")
    lines = submit.announce("RUN", [job])
    assert lines[0].endswith("queued (Priority, expected start 2026-12-02 08:00:00)")
    assert [line.split("multirun ")[1] for line in lines[1:]] == [
        f"{verb} RUN" for verb in ("status", "logs -f", "results", "retry", "cancel")
    ]
    fake_slurm.says()
    assert len(submit.announce("RUN", [job])) == 5


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
    stale = {"MASTER_ADDR": "elsewhere", "SLURM_CPUS_PER_TASK": "6"}
    clean = {
        name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "MASTER_PORT")
    } | slurm
    arguments = {"args": [sys.executable, "-c", code], "cwd": ROOT, "capture_output": True}
    done = subprocess.run(**arguments, env=clean | stale | {"MASTER_PORT": "1234"}, check=True)
    found = json.loads(done.stdout)
    assert found.pop("OMP_NUM_THREADS") == "6"
    alone = subprocess.run(**arguments, env=clean, check=False)
    assert alone.returncode == 1 and b"MASTER_PORT is not set" in alone.stderr
    assert found == {
        "RANK": "17", "LOCAL_RANK": "1", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "node03"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["failure-1.json", "cancel.json"])
def test_a_rank_leaves_for_another_ones_failure_in_this_attempt_only(make_run, name):
    """A shared file system may show the former attempt's files for a while."""
    run = make_run("fine", name="slurm")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom launcher import job\njob._LOOK_S = job.line.LEAVE_S = 0.05\n"
        "job.leave_with_the_others(Path(sys.argv[1]), 0, float(sys.argv[2]))\ntime.sleep(0.5)\nprint('still here', flush=True)\ntime.sleep(60)\n"
    )
    (run.path / name).write_text("{}")
    begun = (run.path / name).stat().st_mtime + 5
    (run.path / "failure-0.json").write_text("{}")  # its own: it is about to leave by itself
    os.utime(run.path / "failure-0.json", (begun + 5, begun + 5))
    command = [sys.executable, "-c", code, str(run.path), str(begun)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "still here\n" and process.poll() is None
    os.utime(run.path / name, (begun + 1, begun + 1))
    assert process.wait(timeout=20) == 143
    process.stdout.close()
