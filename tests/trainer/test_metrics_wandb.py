"""The W&B copy holds every row, survives a kill, and never stops a run. Read back with W&B's own reader."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from trainer.config import (
    BenchmarkConfig,
    ClusterConfig,
    CompileConfig,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    OffloadConfig,
    ParallelismConfig,
    RunConfig,
    TrainConfig,
    to_dict,
)
from trainer.flops import flops_per_token
from trainer.metrics.files import read_rows
from trainer.metrics.recorder import Recorder
from trainer.metrics.wandb_run import WandbRun, run_id

ROOT = Path(__file__).parents[2]
RUN = "tiny-0123456789"


def config_of(mode: str, **logging) -> RunConfig:
    return RunConfig(
        model=ModelConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, routing="balanced"),
        train=TrainConfig(steps=3),
        logging=LoggingConfig(wandb=mode, group="a-sweep", tags=["bench", "b300"], **logging),
    )


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Iterator[Path]:
    """A run directory, and a machine without a W&B account."""
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / RUN).mkdir()
    wandb.teardown()  # it reads its environment once in a process
    yield tmp_path / RUN
    wandb.teardown()


def read_back(run_dir: Path, directory: str = "*run-*") -> dict[str, list[dict]]:
    """Records of the only W&B file of a run, by type."""
    (path,) = run_dir.glob(f"wandb/{directory}/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records = {}
    for record in map(json.loads, shown.splitlines()):
        records.setdefault(record["type"], []).append(record[record["type"]])
    return records


def history(records: dict[str, list[dict]]) -> list[dict]:
    """Logged rows without W&B's own columns."""
    return [
        {key: value for key, value in record["item"].items() if not key.startswith("_")}
        for record in records.get("history", [])
    ]


def logged(run_dir: Path, steps: range, config: RunConfig) -> Recorder:
    recorder = Recorder(run_dir, config, 0, 4, "cpu", 1)
    for step in steps:
        recorder.row(step, {"loss": 5.5 - step, "mfu": 0.25, "load_balance/0": 1.5, "grad_norm": float("nan")})
    return recorder


def test_offline_file_holds_every_row_the_plain_config_and_the_identity(run_dir):
    config = config_of("offline")
    logged(run_dir, range(1, 4), config).finish("done", {"status": "done", "step_time_s": {"median": 0.5}})
    records = read_back(run_dir)
    rows = read_rows(run_dir / "metrics.jsonl")
    assert len(rows) == 3
    assert history(records) == [
        {"train/step": row["step"], **{k: v for k, v in row.items() if k != "step"}} for row in rows
    ]
    (run,) = records["run"]
    assert (run["run_id"], run["display_name"], run["run_group"]) == ("0123456789", RUN, "a-sweep")
    assert run["tags"] == ["bench", "b300"] and run["project"] == "moe" and run["job_type"] == "train"
    found = {key: value for key, value in run["config"]["update"].items() if key != "_wandb"}
    assert found == to_dict(config)
    assert {metric.get("name") or metric["glob_name"]: metric.get("step_metric") for metric in records["metric"]} == {
        "train/step": None,
        "*": "train/step",
    }
    summary = {}
    for record in records["summary"]:
        summary.update(record["update"])
    assert (summary["state"], summary["result/step_time_s.median"]) == ("done", 0.5)
    assert records["exit"][0].get("exit_code", 0) == 0


def test_a_failed_run_is_failed_in_wandb_too(run_dir):
    logged(run_dir, range(1, 2), config_of("offline")).finish("failed", error="step 2: loss nan")
    records = read_back(run_dir)
    assert records["exit"][0]["exit_code"] == 1
    assert any(record["update"].get("error") == "step 2: loss nan" for record in records["summary"])


def test_the_mfu_of_a_trained_run_is_in_its_offline_file(run_dir):
    """The number of every step and of the result, equal to those of metrics.jsonl and result.json."""
    small = ModelConfig(hidden_size=16, num_hidden_layers=1, head_dim=8, intermediate_size=16)
    config = RunConfig(
        model=small,
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=1, dp_shard=1, ep=1),
        offload=OffloadConfig(mode="none"),
        compile=CompileConfig(mode="none"),
        data=DataConfig(name="random", seq_len=32, document_len=8, global_batch_size=2),
        train=TrainConfig(steps=3, param_dtype="fp32"),
        logging=LoggingConfig(wandb="offline"),
        benchmark=BenchmarkConfig(peak_flops="1e12"),
        cluster=ClusterConfig(name="local", device="cpu"),
    )
    (run_dir / "run.json").write_text(json.dumps(to_dict(config)))
    secrets = {"HF_TOKEN": "hf_hush-hush-hush", "WANDB_API_KEY": "0bada55c0ffee" * 4, "NCCL_API_KEY": "hush-hush-hush"}
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "NCCL_DEBUG": "WARN", **secrets}
    command = [sys.executable, "-m", "trainer", str(run_dir)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rows, records = read_rows(run_dir / "metrics.jsonl"), read_back(run_dir, "offline-run-*")
    flops = flops_per_token(config, [8] * 4)
    for row, copy in zip(rows, history(records), strict=True):
        assert row["mfu"] == pytest.approx(row["tokens_per_s_per_gpu"] * flops.per_token / 1e12)
        assert row["mfu_causal"] == pytest.approx(row["tokens_per_s_per_gpu"] * flops.per_token_causal / 1e12)
        assert row["mfu"] > row["hfu"] > row["mfu_causal"]  # recomputed, but only a quarter of the attention
        for name in ("mfu", "mfu_causal", "hfu", "tokens_per_s_per_gpu", "step_time_s", "loss"):
            assert copy[name] == row[name]
    summary = {}
    for record in records["summary"]:
        summary.update(record["update"])
    result = json.loads((run_dir / "result.json").read_text())
    assert summary["result/mfu"] == result["mfu"] > 0
    assert result["peak_source"] == "benchmark.peak_flops=1e12"
    assert '"NCCL_DEBUG": "WARN"' in json.dumps(records["config"]).replace("\\", "")  # what it ran on is in its config
    written = [path.read_bytes() for path in run_dir.rglob("*") if path.is_file()]
    assert not [name for name, value in secrets.items() if any(value.encode() in content for content in written)]


KILLED = """
import os, signal, sys, time
from pathlib import Path
from trainer.config import LoggingConfig, RunConfig
from trainer.metrics.recorder import Recorder
recorder = Recorder(Path(sys.argv[1]), RunConfig(logging=LoggingConfig(wandb="offline")), 0, 1, "cpu", 1)
for step in range(1, 6):
    recorder.row(step, {"loss": 1.0})
time.sleep(2)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_older_than_a_second_survive_a_kill(run_dir):
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", KILLED, str(run_dir)]
    done = subprocess.run(command, env=environ, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["train/step"] for row in history(read_back(run_dir))] == [1, 2, 3, 4, 5]


def test_disabled_leaves_nothing(run_dir):
    logged(run_dir, range(1, 2), config_of("disabled")).finish("done", {})
    assert not (run_dir / "wandb").exists()


def test_missing_package_is_one_warning(run_dir, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    logged(run_dir, range(1, 4), config_of("offline")).finish("done", {})
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and "logging.wandb=disabled" in error
    assert len(read_rows(run_dir / "metrics.jsonl")) == 3


@pytest.mark.parametrize("key, said", [("", "API key"), ("0" * 40, "connection refused")], ids=["no key", "no network"])
def test_online_that_cannot_be_is_one_warning_and_an_offline_file(run_dir, capsys, monkeypatch, key, said):
    if key:
        monkeypatch.setenv("WANDB_API_KEY", key)
        monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
        monkeypatch.setattr("trainer.metrics.wandb_run.INIT_TIMEOUT_S", 1.0)
    logged(run_dir, range(1, 4), config_of("online")).finish("done", {})
    error = capsys.readouterr().err
    assert error.count("warning: ") == 1 and "wandb sync" in error and said in error
    assert [row["train/step"] for row in history(read_back(run_dir, "offline-run-*"))] == [1, 2, 3]


def test_init_that_fails_is_one_warning(run_dir, capsys):
    """W&B refuses a project of this name, online and offline."""
    logged(run_dir, range(1, 4), config_of("offline", project="a/b")).finish("done", {})
    assert capsys.readouterr().err.count("warning: ") == 1
    assert len(read_rows(run_dir / "metrics.jsonl")) == 3
    assert json.loads((run_dir / "status.json").read_text())["state"] == "done"


def test_a_log_that_fails_is_one_warning(run_dir):
    """Lost connection to W&B's own process, played by a run that raises."""
    warnings = []
    copy = WandbRun(run_dir, config_of("disabled"), warnings.append)

    class Broken:
        def log(self, row):
            raise BrokenPipeError("W&B's process is gone")

    copy._run = Broken()
    for step in (1, 2):
        copy.log({"step": step})
    copy.finish("done", {})
    assert len(warnings) == 1 and "log failed (BrokenPipeError" in warnings[0]


@pytest.mark.parametrize(
    "name, key",
    [
        ("tiny-0123456789", "0123456789"),
        ("qwen3-235b-fast-0123456789", "0123456789"),
        ("tiny-0123456789-r2", "0123456789-r2"),
        ("0123456789", "0123456789"),
    ],
)
def test_the_id_is_the_key_at_the_end_of_the_directory_name(name, key):
    assert run_id(Path("/runs/sweep-1") / name) == key
