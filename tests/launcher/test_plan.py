"""resolve derives what was left open, and plan's numbers are those of the configuration."""

from dataclasses import replace

import pytest

from launcher.machine import count_gpus, has_wandb_key
from launcher.plan import describe, make_plan
from launcher.resolve import legal_ep, resolve
from trainer.config import from_dict, to_dict

GIB = 2**30


@pytest.mark.parametrize(
    "arguments, expected",  # nodes, gpus_per_node, dp_replicate, dp_shard, ep
    [
        ([], (1, 2, 1, 2, 2)),
        (["model=qwen3_235b"], (4, 8, 1, 32, 8)),
        (["model=qwen3_235b", "parallelism.nodes=1", "parallelism.gpus_per_node=1"], (1, 1, 1, 1, 1)),
        (["model=qwen3_235b", "parallelism.gpus_per_node=6"], (4, 6, 1, 24, 8)),
        (["model=qwen3_235b", "parallelism.nodes=1", "parallelism.gpus_per_node=6"], (1, 6, 1, 6, 2)),
        (["model=qwen3_235b", "parallelism.nodes=8"], (8, 8, 1, 64, 8)),
        (["model=qwen3_235b", "parallelism=fsdp"], (4, 8, 1, 32, 1)),
        (["model=qwen3_235b", "parallelism=hsdp_ep"], (4, 8, 4, 8, 8)),
        (["model=qwen3_235b", "parallelism=fsdp_ep", "parallelism.gpus_per_node=16"], (4, 16, 1, 64, 16)),
        (["model=qwen3_235b", "parallelism.dp_replicate=2"], (4, 8, 2, 16, 8)),
        (["model=qwen3_4b", "parallelism=fsdp_ep"], (1, 8, 1, 8, 1)),
        (["parallelism.gpus_per_node=8", "parallelism.ep=4"], (1, 8, 1, 8, 4)),
    ],
)
def test_the_layout_follows_from_the_model_and_what_was_set(resolved, arguments, expected):
    p = resolved(*arguments).parallelism
    assert (p.nodes, p.gpus_per_node, p.dp_replicate, p.dp_shard, p.ep) == expected


def test_legal_ep_divides_experts_and_ranks():
    assert legal_ep(128, 32) == [1, 2, 4, 8, 16, 32]
    assert legal_ep(8, 12) == [1, 2, 4]
    assert legal_ep(0, 8) == [1]


def test_nothing_is_left_open_and_resolving_again_changes_nothing(resolved, machine):
    for arguments in ([], ["model=qwen3_30b_a3b"], ["+experiment=qwen3_235b_max_throughput"]):
        config = resolved(*arguments)
        assert resolve(config, machine) == config
        assert config.data.global_batch_size and config.data.seq_len and config.parallelism.ep
        open_ = (config.train.param_dtype, config.cluster.name, config.cluster.device, config.logging.wandb)
        assert "auto" not in open_ and config.launch.wait in ("true", "false")


def test_resolve_returns_a_new_config(compose, machine):
    config = compose()
    before = to_dict(config)
    resolve(config, machine)
    assert to_dict(config) == before


def test_the_resolved_config_round_trips(resolved):
    config = resolved("cluster.env.A=1e5", "logging.tags=[x]")
    assert from_dict(to_dict(config)) == config


@pytest.mark.parametrize(
    "sbatch, key, arguments, cluster, wait, wandb",
    [
        (False, False, [], "local", "true", "offline"),
        (True, False, [], "slurm", "false", "offline"),
        (True, True, [], "slurm", "false", "online"),
        (False, True, [], "local", "true", "offline"),
        (True, True, ["cluster=local"], "local", "true", "offline"),
        (True, True, ["logging.wandb=disabled", "launch.wait=true"], "slurm", "true", "disabled"),
        (False, False, ["logging.wandb=online"], "local", "true", "online"),
    ],
)
def test_where_it_runs_and_what_wandb_does_is_decided_before_submission(
    compose, machine, sbatch, key, arguments, cluster, wait, wandb
):
    config = resolve(compose(*arguments), replace(machine, sbatch=sbatch, wandb_key=key))
    assert (config.cluster.name, config.launch.wait, config.logging.wandb) == (cluster, wait, wandb)


def test_paths_become_absolute_and_dataset_names_stay(resolved, machine):
    config = resolved("data=chat", "data.path=a/b.jsonl", "model.weights=w", "launch.runs_dir=../r")
    assert config.data.path == str(machine.cwd / "a/b.jsonl")
    assert config.model.weights == str(machine.cwd / "w")
    assert config.launch.runs_dir == str(machine.cwd.parent / "r")
    assert resolved("data=chat", "data.path=org/name").data.path == "org/name"
    assert resolved().model.weights == ""


def test_the_reference_plan(resolved):
    plan = make_plan(resolved("+experiment=qwen3_235b_max_throughput", "cluster=slurm", "cluster.time_limit_min=60"))
    assert plan["axes"] == {"dp_replicate": 1, "dp_shard": 32, "ep": 8, "efsdp": 4}
    assert (plan["world_size"], plan["tokens_per_step"], plan["tokens_total"]) == (32, 524288, 20 * 524288)
    assert plan["parameters"]["total"] == 235_093_634_560
    assert plan["flops_per_token"]["mfu"] == pytest.approx(2.8080e11, rel=1e-4)
    assert plan["gpu_hours"] == 32.0
    memory = plan["memory_per_gpu_gib"]
    per_rank = 235_093_634_560 / 32 / GIB
    assert memory["parameters"] == pytest.approx(2 * per_rank, abs=1e-3)
    assert memory["moments"] == pytest.approx(8 * per_rank, abs=1e-3)
    assert memory["total"] == pytest.approx(16 * per_rank, abs=1e-3)


@pytest.mark.parametrize(
    "arguments, gpu, host",  # bytes a parameter
    [
        (["offload=none"], 2 + 4 + 8 + 2, 0),
        (["offload=optimizer"], 2 + 4 + 2, 8),
        (["offload=full"], 2, 4 + 8 + 2),
        (["offload=full", "data.global_batch_size=16"], 2, 4 + 8 + 4),
        (["offload=none", "data.global_batch_size=16"], 2 + 4 + 8 + 4, 0),
        (["offload=none", "data.global_batch_size=16", "train.grad_dtype=bf16"], 2 + 4 + 8 + 2, 0),
        (["offload=none", "train.param_dtype=fp32"], 4 + 4 + 8 + 4, 0),
        (["offload=none", "optimizer=sign_sgd"], 2 + 4 + 2, 0),
        (["offload=none", "model.freeze=[*]"], 2, 0),
    ],
)
def test_state_memory_follows_offload_dtype_and_optimizer(resolved, arguments, gpu, host):
    plan = make_plan(resolved("model=qwen3_4b", *arguments))
    per_rank = 4_022_468_096 / 8 / GIB
    assert plan["memory_per_gpu_gib"]["total"] == pytest.approx(gpu * per_rank, abs=1e-3)
    assert plan["host_memory_per_gpu_gib"]["total"] == pytest.approx(host * per_rank, abs=1e-3)
    assert plan["host_memory_per_node_gib"] == pytest.approx(8 * host * per_rank, abs=1e-2)


def test_muon_keeps_one_moment_for_the_matrices_of_the_blocks(resolved):
    config = resolved("model=qwen3_4b", "optimizer=muon", "offload=none")
    outside = 151936 * 2560 + 36 * (2 * 2560 + 2 * 128) + 2560
    expected = (4 * (4_022_468_096 - outside) + 8 * outside) / 8 / GIB
    assert make_plan(config)["memory_per_gpu_gib"]["moments"] == pytest.approx(expected, abs=1e-3)


def test_replicas_do_not_lower_the_memory_of_a_gpu(resolved):
    sharded = make_plan(resolved("model=qwen3_235b"))["memory_per_gpu_gib"]["total"]
    replicated = make_plan(resolved("model=qwen3_235b", "parallelism=hsdp_ep"))["memory_per_gpu_gib"]["total"]
    assert replicated == pytest.approx(4 * sharded, rel=1e-3)


def test_micro_batches_are_counted(resolved):
    plan = make_plan(resolved("data.global_batch_size=32", "data.micro_batch_size=4"))
    assert (plan["grad_accumulation"], plan["tokens_per_step"], plan["gpu_hours"]) == (4, 32 * 256, 0.0)


def test_the_words_hold_the_numbers(resolved):
    text = "\n".join(describe(make_plan(resolved("model=qwen3_235b"))))
    assert all(part in text for part in ("4 x 8 GPUs", "ep 8", "524,288", "235.09 B", "22.19 B", "768.0 GPU-hours"))


def test_gpus_are_counted_by_what_this_process_may_use(tmp_path, monkeypatch):
    dev, proc = tmp_path / "dev", tmp_path / "gpus"
    dev.mkdir()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert count_gpus(dev, proc) == 0
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: A'\necho 'GPU 1: A'\necho 'GPU 2: A'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert count_gpus(dev, proc) == 3
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (dev / name).touch()
    assert count_gpus(dev, proc) == 2
    for index in range(8):
        (proc / f"0000:{index}").mkdir(parents=True)
    assert count_gpus(dev, proc) == 2
    for visible, count in (("0", 1), ("", 0), ("-1", 0), ("0,1,2", 2)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert count_gpus(dev, proc) == count


def test_a_wandb_key_is_found_in_the_environment_or_in_netrc(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    assert has_wandb_key()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert not has_wandb_key()
    monkeypatch.setenv("WANDB_API_KEY", "x")
    assert has_wandb_key()
