"""The command as a user meets it: exit codes, one clear line, JSON, nothing left behind, and fast."""

import json
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFUSED = 2


def written(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    "arguments",
    [
        ["offload=null"],
        ["compile=off"],
        ["offload=optimzer"],
        ["model="],
        ["+optimizer.lrr=1"],
        ["model.optim_cpu_offload=true"],
        ["train.steps=abc"],
        ["train.steps=1.5"],
        ["launch.json=1"],
        ["optimizer.lr="],
        ["parallelism.ep=5"],
        ["offload=full", "optimizer=muon"],
        ["logging.run_name=${nope}"],
        ["cluster.env.A=a\nb"],
    ],
    ids=" ".join,
)
def test_a_refusal_is_one_line_without_a_traceback_and_leaves_nothing(command, tmp_path, arguments):
    done = command(*arguments)
    assert done.returncode == REFUSED, done.stderr
    assert done.stderr.startswith("refused: ") and len(done.stderr.splitlines()) == 1
    assert done.stdout == "" and written(tmp_path) == []


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["model=tiny,qwen3_4b"], "--multirun"),
        (["optimizer.lr=1,2"], "--multirun"),
        (["optimizer.lr=)"], "optimizer.lr"),
        (["train.steps==5"], "train.steps==5"),
        (["--config-dir", "/nowhere"], "/nowhere"),
        (["--config-name", "nope"], "nope"),
        (["--multirun", "optimizer.lr=interval(0,1)"], "INTERVAL"),
        (["--multirun", "train.seed=1,2", "launch.runs_dir=/proc/none"], "/proc/none"),
    ],
)
def test_what_hydra_refuses_is_a_refusal_too(command, tmp_path, arguments, part):
    done = command(*arguments)
    assert done.returncode == REFUSED
    assert done.stderr.startswith("refused: ") and len(done.stderr.splitlines()) == 1, done.stderr
    assert part in done.stderr and written(tmp_path) == []
    as_json = command("launch.json=true", *arguments)
    assert json.loads(as_json.stdout)["refused"] == [done.stderr.removeprefix("refused: ").strip()]


@pytest.mark.parametrize(
    "content, part",
    [
        (b"name: local\npartition: [gpu\n", "line 3"),
        (b"env:\n\tA: 1\n", "line 2"),
        (b"mem: 1G\nmem: 2G\n", "mem"),
        (b"\xff\xfe", "utf-8"),
        (b"mem: \x01\n", "big.yaml"),
        (b"defaults: [slurmy, _self_]\n", "slurmy"),
    ],
)
def test_a_broken_file_of_a_site_is_refused_by_its_name(command, tmp_path, content, part):
    site = tmp_path / "sites" / "cluster" / "big.yaml"
    site.parent.mkdir(parents=True)
    site.write_bytes(content)
    done = command("cluster=big", "--config-dir", "sites", "launch.dry_run=true")
    assert done.returncode == REFUSED and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("refused: ") and part in done.stderr and "cluster/" in done.stderr
    traced = command("cluster=big", "--config-dir", "sites", "launch.dry_run=true", HYDRA_FULL_ERROR="1")
    assert traced.returncode != 0 and "Traceback" in traced.stderr


def test_what_cannot_be_written_is_refused_by_its_path(command, tmp_path):
    (tmp_path / "runs").mkdir()
    day = tmp_path / "runs" / time.strftime("%Y-%m-%d")
    day.write_text("a file")
    done = command("launch.submit=false")
    assert done.returncode == REFUSED and len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(f"refused: {day}: ") and "launch.runs_dir" in done.stderr
    (tmp_path / "scan").write_text("a file")
    sweep = command("--multirun", "train.seed=1,2", "launch.name=scan", "launch.runs_dir=.")
    assert sweep.returncode == REFUSED and sweep.stderr.startswith("refused: ") and "scan: " in sweep.stderr


@pytest.mark.parametrize("module", [["launcher"], ["multirun", "status", "x"]])
def test_a_current_directory_that_is_gone_is_named(tmp_path, module):
    script = 'mkdir gone; cd gone; rmdir ../gone; exec "$0" -m "$@"'
    done = subprocess.run(
        ["bash", "-c", script, sys.executable, *module],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == REFUSED and "current directory" in done.stderr and len(done.stderr.splitlines()) == 1


def test_every_broken_rule_is_a_line(command):
    done = command("model.head_dim=33", "offload=full", "optimizer=muon", "parallelism.ep=5")
    assert done.returncode == REFUSED and len(done.stderr.splitlines()) == 3


def test_the_headline_command_without_slurm_shows_its_plan_and_is_refused(command, tmp_path):
    done = command("model=qwen3_235b", "offload=none", "compile=fullgraph")
    assert done.returncode == REFUSED
    assert "4 x 8 GPUs" in done.stdout and "235.09 B" in done.stdout
    assert "cluster=slurm launch.dry_run=true" in done.stderr and "model.num_hidden_layers=2" in done.stderr
    assert written(tmp_path) == []


def test_the_plan_for_slurm_is_made_on_a_machine_without_it(command, tmp_path):
    done = command("model=qwen3_235b", "offload=none", "compile=fullgraph", "cluster=slurm", "launch.dry_run=true")
    assert done.returncode == 0, done.stderr
    assert "768.0 GPU-hours" in done.stdout and "#SBATCH --nodes=4" in done.stdout
    assert written(tmp_path) == []


def test_dry_run_as_json_is_the_plan_and_nothing_else(command, tmp_path):
    done = command("launch.dry_run=true", "launch.json=true")
    plan = json.loads(done.stdout)
    assert (plan["world_size"], plan["axes"]["ep"], done.stderr) == (2, 2, "")
    assert written(tmp_path) == []


def test_a_refusal_as_json_names_the_problems(command):
    for arguments in (["offload=nope"], ["parallelism.ep=5"], ["train.steps=x"]):
        done = command("launch.json=true", *arguments)
        assert done.returncode == REFUSED and len(json.loads(done.stdout)["refused"]) == 1


def test_a_frozen_run_can_be_started_by_hand_and_prints_where_it_is(command, tmp_path):
    done = command("launch.submit=false", "train.steps=3", "logging.run_name=1e5", "cluster.env.A=a,b")
    assert done.returncode == 0, done.stderr
    assert "torchrun --nproc-per-node 2 -m trainer " in done.stdout
    again = command(
        "train.steps=3", "launch.submit=false", "launch.json=true", "logging.run_name=1e5", "cluster.env.A=a,b"
    )
    stored = json.loads(again.stdout)
    run = json.loads((Path(stored["path"]) / "run.json").read_text())
    assert (run["logging"]["run_name"], run["cluster"]["env"]) == ("1e5", {"A": "a,b"})
    assert run["launch"]["runs_dir"] == str(tmp_path / "runs")
    assert stored["path"] in done.stdout and len(list((tmp_path / "runs").glob("*/*/run.json"))) == 1
    assert written(tmp_path) == ["runs"]


def test_the_torchrun_line_can_be_pasted_whatever_the_paths_hold(command, tmp_path):
    stored = json.loads(command("launch.submit=false", "launch.json=true", "launch.runs_dir=my runs;x").stdout)
    line = shlex.split(stored["command"])
    assert line[-1] == stored["path"] and str(tmp_path / "my runs;x") in stored["path"]
    assert line[0] == "cd" and (Path(line[1]) / "trainer").is_dir()


def test_a_finished_run_is_shown_and_not_run_again(command):
    stored = json.loads(command("launch.submit=false", "launch.json=true").stdout)
    path = Path(stored["path"])
    (path / "status.json").write_text(json.dumps({"state": "done", "step": 150, "steps": 150}))
    (path / "result.json").write_text(json.dumps({"status": "done", "steps": 150, "loss": {"first": 6.2, "last": 2.5}}))
    done = command()
    assert done.returncode == 0 and str(path) in done.stdout
    assert "first 6.2, last 2.5" in done.stdout and "launch.again=all" in done.stdout
    found = json.loads(command("launch.json=true").stdout)
    assert (found["state"], found["result"]["steps"]) == ("done", 150)


def test_a_failed_run_is_shown_with_the_way_to_try_again(command):
    path = Path(json.loads(command("launch.submit=false", "launch.json=true").stdout)["path"])
    (path / "status.json").write_text(json.dumps({"state": "failed", "error": "rank 1: boom"}))
    done = command()
    assert done.returncode == 1
    assert "boom" in done.stderr and "launch.again=failed" in done.stderr and str(path) in done.stderr


@pytest.mark.parametrize(
    "arguments, part",
    [
        (["--hydra-help"], "--multirun"),
        (["--cfg", "job", "train.steps=7"], "steps: 7"),
        (["train.steps=7", "--cfg", "job"], "steps: 7"),
        (["--cfg", "hydra", "-p", "hydra.launcher"], "_target_"),
        (["--info", "defaults", "model=qwen3_4b"], "qwen3_4b"),
        (["+experiment=qwen3_235b_max_throughput", "--cfg", "job", "-p", "model"], "routing: balanced"),
        (["-sc", "query=bash"], "offload=full offload=none offload=optimizer"),
        (["-sc", "install=bash"], "complete"),
        (["--version"], "Hydra"),
    ],
)
def test_hydras_own_flags_work_as_ever(command, tmp_path, arguments, part):
    environment = {"COMP_LINE": "launcher offload=", "COMP_POINT": "17"} if "-sc" in arguments else {}
    done = command(*arguments, **environment)
    assert done.returncode == 0, done.stderr
    assert part in done.stdout and written(tmp_path) == []


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["model=tiny", "--help", "-cd", "sites"]])
def test_help_explains_every_option_of_every_group(command, tmp_path, arguments):
    (tmp_path / "sites" / "cluster").mkdir(parents=True)
    (tmp_path / "sites" / "cluster" / "big.yaml").write_text("# Our machine\ndefaults: [slurm, _self_]\n")
    done = command(*arguments)
    assert done.returncode == 0 and done.stderr == ""
    for path in (ROOT / "conf").glob("*/*.yaml"):
        meaning = next(line[2:] for line in path.read_text().splitlines() if line[:2] == "# " and line[:3] != "# @")
        assert any(path.stem in line and meaning in line for line in done.stdout.splitlines()), path
    assert ("Our machine" in done.stdout) is ("-cd" in arguments)


def test_a_site_of_ones_own_is_an_option_among_others(command, tmp_path):
    site = tmp_path / "sites" / "cluster" / "big.yaml"
    site.parent.mkdir(parents=True)
    site.write_text("defaults: [slurm, _self_]\npartition: gpu\nenv:\n  A: '1'\n")
    arguments = ["cluster=big", "--config-dir", "sites", "launch.dry_run=true"]
    done = command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "#SBATCH --partition=gpu" in done.stdout
    site.write_text("defaults: [slurm, _self_]\npartitio: gpu\n")
    assert "cluster.partitio: unknown key, did you mean cluster.partition?" in command(*arguments).stderr
    site.write_text("name: slurm\n")
    assert "defaults: [<option>, _self_]" in command(*arguments).stderr
    site.write_text("defaults: [slurm, _self_]\nenv:\n  A: 1\n")
    assert "cluster.env.A=1" in command(*arguments).stderr
    site.write_text("defaults: [slurm, _self_]\nname: off\n")
    assert "cluster.name=False is not one of auto, local, slurm" in command(*arguments).stderr


def test_a_sweep_with_overrides_on_both_sides_is_refused_whole(command, tmp_path):
    done = command("model=tiny", "--multirun", "parallelism.ep=1,3,5", "launch.runs_dir=r")
    assert done.returncode == REFUSED and len(done.stderr.splitlines()) == 3, done.stderr
    assert "parallelism.ep=3: " in done.stderr and "parallelism.ep=5: " in done.stderr
    assert written(tmp_path) == []


def test_a_sweep_of_an_option_that_does_not_exist_starts_nothing(command, tmp_path):
    done = command("--multirun", "offload=none,optimizer,nope")
    assert done.returncode == REFUSED and "nope" in done.stderr and written(tmp_path) == []


def test_a_sweep_through_a_launcher_that_submits_nothing_is_refused(command):
    done = command("--multirun", "hydra/launcher=basic", "train.seed=1,2", "launch.json=true")
    assert done.returncode == REFUSED and "hydra/launcher=array" in done.stderr and "cluster=local|slurm" in done.stderr
    assert len(json.loads(done.stdout)["refused"]) == 1 == len(done.stderr.splitlines())


def test_a_refusal_after_composing_names_the_key_and_the_value_as_it_was_written(command):
    assert "refused: logging.project: " in command("logging.project=${nope}").stderr
    assert "refused: optimizer.lr=null is not a number" in command("optimizer.lr=null").stderr
    assert "refused: train.steps=true is not a whole number" in command("train.steps=true").stderr


@pytest.mark.parametrize(
    "module", ["launcher.cli", "launcher.run", "launcher.check", "launcher.submit", "multirun.array"]
)
def test_neither_torch_nor_wandb_is_imported(module):
    code = f"import sys, {module}; sys.exit(any(name in sys.modules for name in ('torch', 'wandb', 'pandas')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_a_whole_command_imports_neither_torch_nor_wandb(command, tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit(77)")
    (tmp_path / "wandb.py").write_text("raise SystemExit(78)")
    done = command("launch.submit=false", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "arguments, limit_s",
    [
        (["--help"], 1.0),
        (["offload=optimzer"], 1.0),
        (["model=qwen3_235b", "parallelism.ep=24"], 1.0),
        (["launch.submit=false"], 1.5),
    ],
)
def test_it_is_fast(command, arguments, limit_s):
    """In CPU seconds, the better of two: other tests share the machine."""
    seconds = []
    for _ in range(2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < limit_s, seconds
