"""The real trainer on a real SLURM: 32 ranks over 4 nodes, and an array of offload modes in which one run is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launcher import status

pytestmark = pytest.mark.timeout(900)  # 32 ranks import torch on whatever CPUs there are
CLUSTER = ["cluster=slurm", "cluster.device=cpu", "logging.wandb=disabled", "launch.wait=true"]
MESSAGES = [{"role": "user", "content": "What is a node?"}, {"role": "assistant", "content": "A machine. " * 8}]


def test_32_ranks_with_fsdp_32_and_ep_8_train_and_report(command, wait_for):
    layout = ["parallelism=fsdp_ep", "parallelism.nodes=4", "parallelism.gpus_per_node=8", "parallelism.ep=8"]
    small = ["train.steps=3", "data.seq_len=64", "model.num_hidden_layers=2"]
    small += ["cluster.node_check=true", "cluster.node_check_min_share=0.3"]  # four nodes share a few cores here
    done = command("launcher", *CLUSTER, *layout, *small, "launch.json=true")
    assert done.returncode == 0, done.stderr
    run = Path(json.loads(done.stdout)["path"])
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    result = status.read_json(run / "result.json")
    assert [row["step"] for row in rows] == [1, 2, 3] and rows[2]["loss"] < rows[0]["loss"]
    assert result["status"] == "done" and result["loss"]["last"] == rows[2]["loss"]
    plan = status.read_json(run / "plan.json")
    assert (plan["axes"]["dp_shard"], plan["axes"]["ep"], plan["axes"]["efsdp"]) == (32, 8, 4)
    assert len(list((run / "logs" / "attempt_1").glob("rank_*.log"))) == 32
    environment = status.read_json(run / "environment.json")
    assert (environment["node_check"]["devices"], environment["node_check"]["hosts"]) == (32, 4)
    assert len(set(environment["hosts"])) == len(environment["nodes"]) == 4 and len(environment["hosts"]) == 32
    assert environment["slurm"]["job_id"] == status.read_json(run / "job.json")["job_id"]
    print(json.dumps(environment["node_check"]))
    shown = command("multirun", "results", str(run))
    assert "done" in shown.stdout and "loss" in shown.stdout
    again = command("launcher", *CLUSTER, *layout, *small)
    assert again.returncode == 0 and "has run with this code before" in again.stdout
    left = command("multirun", "retry", str(run))
    assert left.returncode == 0 and "left alone" in left.stdout


def test_an_array_of_offload_modes_in_which_one_run_fails(command, tmp_path):
    """Four experiments, one of which reads a broken file; a retry runs that one only, and ends well once it is repaired."""
    experiments, chats = tmp_path / "own" / "experiment", tmp_path / "chats.jsonl"
    experiments.mkdir(parents=True)
    head = "# @package _global_\n# {0}\ndefaults:\n  - override /offload: {1}\n  - override /data: {2}\n  - _self_\n"
    for name in ("none", "optimizer", "full"):
        (experiments / f"{name}.yaml").write_text(head.format(name, name, "sample"))
    (experiments / "broken.yaml").write_text(head.format("broken", "none", "chat") + f"data: {{path: {chats}}}\n")
    chats.write_text("this is not JSON\n")
    sweep = [*CLUSTER, "--config-dir", "own", "--multirun", "+experiment=none,optimizer,full,broken", "train.steps=3"]
    done = command("launcher", *sweep, "parallelism.gpus_per_node=2", "data.seq_len=64", "launch.json=true")
    assert done.returncode == 1, done.stderr
    found = {one["overrides"]["experiment"]: one for one in json.loads(done.stdout)}
    states = {name: one["state"] for name, one in found.items()}
    assert states == {"none": "done", "optimizer": "done", "full": "done", "broken": "failed"}
    assert len({one["job_id"].partition("_")[0] for one in found.values()}) == 1  # one array
    losses = {name: found[name]["result"]["loss"]["last"] for name in ("none", "optimizer", "full")}
    assert losses["none"] == losses["optimizer"] == losses["full"]  # offload changes nothing
    broken = found["broken"]
    assert "chats.jsonl" in broken["reason"] and "rank" in broken["reason"]
    assert "Traceback" in Path(broken["log"]).read_text()
    table = command("multirun", "results", str(Path(broken["path"]).parent)).stdout
    assert broken["log"] in table and table.count("done") == 3

    chats.write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(64)))
    retried = command("multirun", "retry", "--wait", str(Path(broken["path"]).parent))
    assert retried.returncode == 0, retried.stdout + retried.stderr
    assert retried.stdout.count("left alone") == 3 and retried.stdout.count(": job ") == 1
    now = status.describe(Path(broken["path"]))
    assert (now["state"], now["attempt"]) == ("done", 2)
    assert {status.describe(Path(one["path"]))["attempt"] for name, one in found.items() if name != "broken"} == {1}
