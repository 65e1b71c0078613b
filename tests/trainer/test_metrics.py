"""Throughput and MFU are what the rows say, and the files of a run directory stay whole whatever happens."""

import dataclasses
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from trainer.config import (
    BenchmarkConfig,
    ConfigError,
    DataConfig,
    LoggingConfig,
    ModelConfig,
    ParallelismConfig,
    RunConfig,
    TrainConfig,
)
from trainer.flops import flops_per_token
from trainer.metrics.environment import (
    cluster_environment,
    device_name,
    driver_version,
    environment,
    host_memory_gib,
    peak_memory_gib,
    relevant_variables,
    slurm_ids,
)
from trainer.metrics.files import read_rows
from trainer.metrics.peak import resolve_peak
from trainer.metrics.rates import build_result, rates
from trainer.metrics.recorder import Recorder

ROOT = Path(__file__).parents[2]
CONFIG = RunConfig(
    model=ModelConfig(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, routing="balanced"),
    parallelism=ParallelismConfig(nodes=1, gpus_per_node=2, dp_shard=2, ep=2),
    data=DataConfig(seq_len=128, micro_batch_size=2, global_batch_size=8),
    train=TrainConfig(steps=12),
    logging=LoggingConfig(wandb="disabled"),
    benchmark=BenchmarkConfig(window_steps=4),
)
TOKENS_PER_RANK = 8 * 128 // 2
FLOPS = flops_per_token(CONFIG)


def recorded(times: list[float], peak: float | None = 1e12, attempts: list[int] | None = None, **values) -> list[dict]:
    """Rows as the trainer writes them, one per step time."""
    return [
        {"step": step, "attempt": attempt, "step_time_s": time_s, "loss": 6.0 - step / 10, "grad_norm": 1.0}
        | rates(CONFIG, FLOPS, peak, time_s, TOKENS_PER_RANK)
        | values
        for step, (time_s, attempt) in enumerate(zip(times, attempts or [0] * len(times), strict=True), 1)
    ]


def result_of(rows: list[dict], peak: float | None = 1e12, **more) -> dict:
    return build_result(CONFIG, rows, FLOPS, peak, "where it is from", **more)


def test_equal_steps_have_equal_throughput():
    rows = recorded([0.5] * 10)
    assert {row["tokens_per_s_per_gpu"] for row in rows} == {TOKENS_PER_RANK / 0.5}
    result = result_of(rows)
    assert result["tokens_per_s_per_gpu"] == TOKENS_PER_RANK / 0.5
    assert result["mfu"] == pytest.approx(rows[0]["mfu"]) and result["hfu"] == pytest.approx(rows[0]["hfu"])


def test_utilisation_is_work_over_time_and_peak():
    values = rates(CONFIG, FLOPS, 2e12, 0.25, TOKENS_PER_RANK)
    assert values["mfu"] * 2e12 * 0.25 == pytest.approx(TOKENS_PER_RANK * FLOPS.per_token)
    assert values["mfu_causal"] * 2e12 * 0.25 == pytest.approx(TOKENS_PER_RANK * FLOPS.per_token_causal)
    assert values["hfu"] * 2e12 * 0.25 == pytest.approx(TOKENS_PER_RANK * FLOPS.per_token_executed)
    assert values["tflops_per_gpu"] == pytest.approx(values["mfu"] * 2)


def test_padding_is_no_real_throughput():
    """Half of all positions are padding; the benchmark's number counts them, the real one does not."""
    values = rates(CONFIG, FLOPS, None, 0.5, TOKENS_PER_RANK, real_tokens=TOKENS_PER_RANK)  # of two ranks
    assert values["tokens_per_s_per_gpu"] == 2 * values["real_tokens_per_s_per_gpu"] == TOKENS_PER_RANK / 0.5
    result = result_of(recorded([0.5] * 4, real_tokens=TOKENS_PER_RANK))
    assert result["tokens_per_s_per_gpu"] == 2 * result["real_tokens_per_s_per_gpu"] == TOKENS_PER_RANK / 0.5


def test_unknown_peak_means_no_utilisation_and_a_reason():
    result = result_of(recorded([0.5] * 4, peak=None), peak=None)
    for name in ("mfu", "mfu_causal", "hfu", "peak_flops"):
        assert name not in result and result["notes"][name] == "where it is from"
    assert result["tflops_per_gpu"] > 0


def test_step_time_is_over_exactly_the_last_steps_of_the_window():
    times = [60.0, 9.0, 9.0, 1.0, 4.0, 2.0, 3.0]
    result = result_of(recorded(times))
    assert result["step_time_s"] == pytest.approx({"median": 2.5, "p10": 1.3, "p90": 3.7, "n": 4})
    assert result["compile_time_s"] == 57.5  # the first step less the median
    assert "steps 4 to 7" in result["notes"]["step_time_s"]
    assert "first step" in result["notes"]["compile_time_s"]
    assert result_of(recorded(times), compile_time_s=31.0)["compile_time_s"] == 31.0


def test_first_step_never_counts_in_a_short_run():
    result = result_of(recorded([60.0, 1.0, 3.0]))
    assert result["step_time_s"]["n"] == 2 and result["step_time_s"]["median"] == 2.0


def test_only_step_counts_and_says_so():
    result = result_of(recorded([60.0]))
    assert result["step_time_s"] == {"median": 60.0, "p10": 60.0, "p90": 60.0, "n": 1}
    assert "only step" in result["notes"]["step_time_s"]
    assert "compile_time_s" not in result and "compile_time_s" in result["notes"]


def test_first_step_of_a_restart_does_not_count_either():
    rows = recorded([60.0, 1.0, 1.0, 50.0, 1.0, 3.0], attempts=[0, 0, 0, 1, 1, 1])
    result = result_of(rows)
    assert result["step_time_s"]["n"] == 4 and result["step_time_s"]["p90"] < 3.0
    assert "after a restart (4)" in result["notes"]["step_time_s"]


def test_causal_utilisation_of_packed_rows_is_their_mean_work_over_the_median_time():
    """Two kinds of steps of equal time, whose documents cost 1 and 2 units."""
    rows = recorded([0.5] * 5)
    for row, work in zip(rows, (1, 1, 2, 1, 2), strict=True):
        row["mfu_causal"] = work * 0.1
    assert result_of(rows)["mfu_causal"] == pytest.approx(0.15)


def test_result_has_every_field_or_a_reason_for_its_absence():
    throughput = {"tokens_per_s_per_gpu", "mfu", "mfu_causal", "hfu", "tflops_per_gpu", "flops_per_token"}
    peaks = {"peak_flops", "peak_source", "peak_memory_gib", "host_memory_gib", "plan_error"}
    course = {"status", "steps", "step_time_s", "compile_time_s", "loss", "grad_norm_last", "routing", "parameters"}
    names = throughput | peaks | course
    bare = result_of([{"step": 1, "step_time_s": 1.0}], peak=None)
    full = result_of(recorded([1.0] * 3), peak_memory_gib={"allocated": 1.0, "reserved": 2.0}, host_memory_gib=0.5)
    for result in (bare, full):
        for name in names:
            assert (name in result) or result["notes"][name], name
        json.dumps(result, allow_nan=False)
    assert names - set(full) == {"plan_error"}
    assert full["routing"] == "balanced" and full["loss"] == {"first": 5.9, "last": 5.7}
    assert full["flops_per_token"] == FLOPS.per_token
    dense = dataclasses.replace(CONFIG, model=ModelConfig())
    assert "routing" not in build_result(dense, recorded([1.0]), FLOPS, None, "")


# Peak


def test_peak_comes_from_the_table_a_number_or_nowhere():
    cpu = torch.device("cpu")
    assert resolve_peak("auto", "NVIDIA H200", cpu) == (989e12, "table of dense bf16 peaks, NVIDIA H200")
    peak, why = resolve_peak("auto", "Foo", cpu)
    assert peak is None and "Foo" in why and "benchmark.peak_flops" in why
    assert resolve_peak("auto", device_name(cpu), cpu)[0] is None
    assert resolve_peak("measured", "cpu", cpu)[0] is None
    peak, source = resolve_peak("1e15", "Foo", cpu)
    assert peak == 1e15 and "1e15" in source
    for wrong in ("fast", "-1", "0", "nan", "inf"):
        with pytest.raises(ConfigError, match="benchmark.peak_flops"):
            resolve_peak(wrong, "Foo", cpu)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_measured_peak_is_below_the_published_one():
    device = torch.device("cuda", 0)
    peak, source = resolve_peak("measured", device_name(device), device)
    published, _ = resolve_peak("auto", device_name(device), device)
    assert "measured" in source and peak > 0
    if published:
        assert 0.3 * published < peak < 1.05 * published


# Environment


def test_environment_is_plain_and_names_what_ran():
    found = json.loads(json.dumps(environment(), allow_nan=False))
    assert found["torch"] == torch.__version__ and found["host"] == socket.gethostname()
    assert found["packages"]["numpy"] and found["cpu_count"] >= 1
    assert len(found["gpus"]) == torch.cuda.device_count()
    assert 0.01 < host_memory_gib() < 1000
    assert peak_memory_gib(torch.device("cpu")) == {}


def test_a_cluster_is_described_node_by_node_and_differences_are_named():
    gpus = {"old": [{"name": "NVIDIA H100"}] * 2, "new": [{"name": "NVIDIA H200"}] * 2}
    ranks = [
        {"host": host, "torch": "2.13.0", "driver": driver, "gpus": gpus[kind], "variables": {"A": host}}
        for host, driver, kind in [("n0", "570", "new")] * 2 + [("n1", "570", "old")] * 2 + [("n2", "560", "new")] * 2
    ]
    ranks[2]["topology"] = ["GPU0 GPU1"]
    found, differences = cluster_environment(ranks)
    assert found["hosts"] == ["n0", "n0", "n1", "n1", "n2", "n2"] and found["variables"] == {"A": "n0"}
    assert list(found["nodes"]) == ["n0", "n1", "n2"] and found["nodes"]["n1"]["topology"] == ["GPU0 GPU1"]
    assert differences == [
        "warning: nodes differ in driver: 570 on n0, n1; 560 on n2",
        "warning: nodes differ in gpus: NVIDIA H200 on n0, n2; NVIDIA H100 on n1",
    ]
    assert cluster_environment(ranks[:2])[1] == []


def test_variables_that_matter_are_kept_and_secrets_are_not():
    variables = {
        "NCCL_DEBUG": "INFO",
        "WANDB_API_KEY": "hush",
        "HF_TOKEN": "hush",
        "WANDB_SECRETS": "hush",
        "UCX_AUTH": "hush",
        "MASTER_PASSWORD": "hush",
        "https_proxy": "http://me:hush@proxy:3128/x",
        "TOKENIZERS_PARALLELISM": "false",
        "HOME": "/home/me",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[0-3]",
        "SLURM_RESTART_COUNT": "",
    }
    found = relevant_variables(variables)
    assert "hush" not in json.dumps(found) and "HOME" not in found
    assert found["WANDB_API_KEY"] == found["HF_TOKEN"] == found["UCX_AUTH"] == found["MASTER_PASSWORD"] == "<set>"
    assert (found["NCCL_DEBUG"], found["TOKENIZERS_PARALLELISM"]) == ("INFO", "false")
    assert found["https_proxy"] == "http://***@proxy:3128/x"
    assert slurm_ids(variables) == {"job_id": "7", "job_nodelist": "n[0-3]"}


@pytest.mark.parametrize(
    "text",
    [
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26 02:17:56 UTC 2025\nGCC version: 12.3\n",
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)  Wed Feb 26 2025\n",
    ],
)
def test_driver_version_is_read_from_both_kinds_of_kernel_module(tmp_path, text):
    (tmp_path / "version").write_text(text)
    assert driver_version(tmp_path / "version") == "570.124.06"
    assert driver_version(tmp_path / "none") is None


# Files


def record(run_dir: Path, steps: range, attempt: int = 0, resumed: int = 0, **options) -> Recorder:
    recorder = Recorder(run_dir, CONFIG, 0, 2, "cpu", attempt, step=resumed, **options)
    recorder.start({"host": "here"})
    for step in steps:
        recorder.row(step, {"loss": float(step), "mfu": None})
    return recorder


def status(run_dir: Path) -> dict:
    return json.loads((run_dir / "status.json").read_text())


def test_every_step_is_one_row_and_the_files_tell_the_end(tmp_path):
    recorder = record(tmp_path, range(1, 4))
    assert status(tmp_path)["state"] == "running" and status(tmp_path)["step"] == 3
    recorder.finish("done", {"status": "done"})
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2, 3]
    assert all(row["routing"] == "balanced" for row in read_rows(tmp_path / "metrics.jsonl"))
    assert json.loads((tmp_path / "result.json").read_text()) == {"status": "done"}
    assert json.loads((tmp_path / "environment.json").read_text()) == {"host": "here"}
    end = status(tmp_path)
    assert (end["state"], end["step"], end["steps"], end["attempt"], end["loss"]) == ("done", 3, 12, 0, 3.0)
    assert abs(end["heartbeat"] - time.time()) < 60 and "mfu" not in end and "error" not in end
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "environment.json",
        "metrics.jsonl",
        "result.json",
        "status.json",
    ]


@pytest.mark.parametrize("state", ["failed", "preempted", "cancelled"])
def test_a_run_that_does_not_finish_has_a_reason_and_no_result(tmp_path, state):
    recorder = record(tmp_path, range(1, 2))
    recorder.finish(state, {"status": "done"}, error="step 2: loss nan")
    recorder.finish("done", {"status": "done"})  # too late
    assert status(tmp_path)["state"] == state and status(tmp_path)["error"] == "step 2: loss nan"
    assert not (tmp_path / "result.json").exists()


def test_status_exists_before_anything_can_fail(tmp_path):
    recorder = Recorder(tmp_path, CONFIG, 0, 2, "cpu", 0)
    assert status(tmp_path)["state"] == "starting"
    recorder.finish("failed", error="CUDA out of memory")
    assert status(tmp_path)["error"] == "CUDA out of memory"


def test_other_ranks_write_nothing(tmp_path):
    online = dataclasses.replace(CONFIG, logging=LoggingConfig(wandb="offline"))
    recorder = Recorder(tmp_path, online, 1, 2, "cpu", 0)
    recorder.start({})
    recorder.row(1, {"loss": 1.0})
    recorder.finish("done", {})
    assert list(tmp_path.iterdir()) == []


def test_resuming_cuts_the_rows_of_the_course_that_was_given_up(tmp_path):
    record(tmp_path, range(1, 8)).finish("preempted")
    with (tmp_path / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 8, "lo')  # killed while writing
    record(tmp_path, range(6, 9), attempt=1, resumed=5).finish("done", {})
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert [row["attempt"] for row in rows] == [0] * 5 + [1] * 3
    record(tmp_path, range(0), attempt=2).finish("failed")  # from the beginning
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_row_cut_short_is_left_out_and_any_other_broken_one_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert read_rows(path) == []
    path.write_text('{"step": 1}\n{"st')
    assert read_rows(path) == [{"step": 1}]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(ValueError, match="line 2"):
        read_rows(path)


def test_values_that_are_not_known_are_absent_and_rows_are_json(tmp_path):
    recorder = Recorder(tmp_path, CONFIG, 0, 1, "cpu", 0)
    recorder.row(1, {"loss": math.nan, "grad_norm": math.inf, "mfu": None, "supervised_tokens": 0})
    recorder.finish("done", {})
    assert read_rows(tmp_path / "metrics.jsonl") == [
        {"step": 1, "attempt": 0, "routing": "balanced", "supervised_tokens": 0}
    ]
    assert "loss" not in status(tmp_path)


def test_heartbeat_goes_on_between_steps_and_ends_with_the_run(tmp_path):
    recorder = record(tmp_path, range(1, 2), heartbeat_s=0.02)
    first = status(tmp_path)
    deadline = time.time() + 10
    while status(tmp_path)["heartbeat"] <= first["heartbeat"] and time.time() < deadline:
        time.sleep(0.01)
    assert status(tmp_path)["heartbeat"] > first["heartbeat"] and status(tmp_path)["progress"] == first["progress"]
    recorder.finish("done", {})
    last = status(tmp_path)
    time.sleep(0.1)
    assert status(tmp_path) == last


def test_files_are_replaced_not_rewritten(tmp_path):
    """Who has opened the status reads one whole version of it, as does who opens it after a kill."""
    recorder = record(tmp_path, range(1, 2))
    with (tmp_path / "status.json").open() as reader:
        recorder.row(2, {})
        assert json.load(reader)["step"] == 1
    recorder.finish("done", {})


def test_status_that_cannot_be_written_warns_once_and_stops_nothing(tmp_path, capsys):
    recorder = record(tmp_path, range(1, 2))
    (tmp_path / "status.json").unlink()
    (tmp_path / "status.json").mkdir()
    (tmp_path / "status.json" / "in the way").touch()
    recorder.row(2, {})
    recorder.row(3, {})
    recorder.finish("done", {})
    assert capsys.readouterr().err.count("warning: status.json") == 1
    assert len(read_rows(tmp_path / "metrics.jsonl")) == 3


KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from trainer.config import LoggingConfig, RunConfig
from trainer.metrics.recorder import Recorder
config = RunConfig(logging=LoggingConfig(wandb="disabled"))
recorder = Recorder(Path(sys.argv[1]), config, 0, 1, "cpu", 0, heartbeat_s=0.001)
for step in range(1, 200):
    recorder.row(step, {{"loss": 1.0}})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_loses_no_row_and_leaves_whole_files(tmp_path):
    code = KILLED.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == list(range(1, 200))
    assert status(tmp_path)["state"] == "starting" and status(tmp_path)["step"] == 199


def test_recording_needs_neither_wandb_nor_torch():
    code = "import sys, trainer.metrics.recorder, trainer.metrics.rates; sys.exit(bool({'wandb', 'torch'} & set(sys.modules)))"
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", code], env=environ, check=False).returncode == 0
