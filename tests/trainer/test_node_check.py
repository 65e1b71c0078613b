"""The node check: broken and slow devices are named, on every rank, and nobody else is."""

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tests.trainer.processes import RUN, TWO, freeze, start
from trainer import node_check
from trainer.config import ParallelismConfig
from trainer.node_check import COMPARED, Measured, NodeCheckError, best_s, check_nodes, judge, summary
from trainer.parallel.mesh import build_mesh

SPEEDS = {"gemm_tflops": 700.0, "copy_gib_per_s": 2000.0}


def device(rank, wrong=(), **speeds):
    return Measured(rank, f"n{rank // 8}", rank % 8, "NVIDIA H200", SPEEDS | speeds, list(wrong))


def test_equal_devices_and_those_within_the_share_are_well():
    table = [device(rank) for rank in range(31)] + [device(31, gemm_tflops=0.8 * 700)]
    assert judge(table, COMPARED["cuda"], 0.8) == []
    assert judge([device(0)], COMPARED["cuda"], 0.99) == []


@pytest.mark.parametrize("speed", [0.79 * 2000, 0.0, math.nan])
def test_a_slow_device_is_named_by_host_and_index_with_its_speed(speed):
    table = [device(rank) for rank in range(16)]
    table[11] = device(11, copy_gib_per_s=speed)
    (problem,) = judge(table, COMPARED["cuda"], 0.8)
    assert problem.startswith("n1 GPU 3 (NVIDIA H200) is slow: copy_gib_per_s")
    assert "of the median 2000, under cluster.node_check_min_share=0.8" in problem


def test_most_devices_of_a_kind_may_be_slow_but_a_broken_one_is_always_named():
    table = [device(0), device(1, gemm_tflops=300), device(2, gemm_tflops=300, wrong=["a copy differs"])]
    assert judge(table, COMPARED["cuda"], 0.8) == ["n0 GPU 2 (NVIDIA H200) is broken: a copy differs"]


def test_the_summary_names_the_slowest():
    found = summary([device(0), device(9, gemm_tflops=650.0), device(2, gemm_tflops=710.0)], 2.0)
    gemm = found["speeds"]["gemm_tflops"]
    assert (gemm["min"], gemm["median"], gemm["max"]) == (650.0, 700.0, 710.0)
    assert gemm["slowest"] == "n1 GPU 1 (NVIDIA H200)" and (found["devices"], found["hosts"]) == (3, 2)
    assert "650 (n1 GPU 1 (NVIDIA H200)), median 700, most 710" in "\n".join(node_check.lines(found))


def _four_times(function):
    def call(*arguments):
        for _ in range(3):
            function(*arguments)
        return function(*arguments)

    return call


def _check(sick: str, hosts: int):
    """Every rank's verdict; rank 3 is sick, and every `4 // hosts` ranks share a host."""
    parallelism = ParallelismConfig(nodes=1, gpus_per_node=4, dp_replicate=1, dp_shard=4, ep=1)
    mesh = build_mesh(parallelism, torch.device("cpu"))
    node_check.host_name = lambda: f"n{mesh.rank * hosts // 4}"
    multiply = node_check.multiply
    if mesh.rank == 3 and sick == "slow":
        node_check.multiply = _four_times(multiply)
    if mesh.rank == 3 and sick == "wrong":
        node_check.multiply = lambda a, b: multiply(a, b).index_fill_(0, torch.tensor([7]), 0)
    if mesh.rank == 3 and sick == "nan":
        node_check.multiply = lambda a, b: multiply(a, b) * math.nan
    if mesh.rank == 3 and sick == "all_reduce":
        all_reduce = node_check.dist.all_reduce
        node_check.dist.all_reduce = lambda values, group: (all_reduce(values, group=group), values[:3].add_(1))
    try:
        return check_nodes(0.5, mesh)
    except NodeCheckError as error:
        return str(error)


@pytest.mark.parametrize("hosts", [1, 2])
def test_well_ranks_get_their_speeds(ranks, hosts):
    for found in ranks(4, _check, "", hosts):
        assert (found["devices"], found["hosts"]) == (4, hosts)
        assert all(0 < one["min"] <= one["median"] <= one["max"] for one in found["speeds"].values())
        assert set(found["speeds"]) >= {"gemm_tflops", "copy_gib_per_s", "all_reduce_gib_per_s"}
        assert "node_all_reduce_gib_per_s" in found["speeds"]


@pytest.mark.parametrize(
    ("sick", "words"),
    [
        ("slow", "n1 CPU rank 1 (cpu) is slow: gemm_tflops"),
        ("wrong", "n1 CPU rank 1 (cpu) is broken: a product of two"),
        ("nan", "n1 CPU rank 1 (cpu) is broken: a product of two"),
        ("all_reduce", "n1 CPU rank 1 (cpu) is broken: an all-reduce over its node is wrong"),
    ],
)
def test_every_rank_names_the_sick_one(ranks, sick, words):
    verdicts = ranks(4, _check, sick, 2)
    assert len(set(verdicts)) == 1 and verdicts[0].startswith("node check: ") and words in verdicts[0]
    assert verdicts[0].count(" is slow") + verdicts[0].count(" is broken") == (2 if sick == "all_reduce" else 1)


def test_a_run_writes_what_was_found_or_ends_for_it(tmp_path):
    checked = dataclasses.replace(TWO, cluster=dataclasses.replace(TWO.cluster, node_check=True))
    checked = dataclasses.replace(checked, train=dataclasses.replace(TWO.train, steps=1))
    run_dir = freeze(tmp_path / "well", checked)
    (code, output), (other, _) = start(run_dir, 2)
    assert (code, other) == (0, 0), output
    assert "node check: 2 devices on 1 hosts are well" in output
    written = json.loads((run_dir / "environment.json").read_text())["node_check"]
    assert written["speeds"]["gemm_tflops"]["min"] > 0
    run_dir = freeze(tmp_path / "broken", checked)
    broken = "import trainer.node_check as n, torch\nif RANK_HERE == 1: n.multiply = lambda a, b: torch.zeros_like(a)"
    results = start(run_dir, 2, broken)
    assert all(code == 1 for code, _ in results)
    failure = json.loads((run_dir / "failure-1.json").read_text())
    assert "CPU rank 1 (cpu) is broken: a product" in failure["error"]
    assert "CPU rank 1 (cpu) is broken" in json.loads((run_dir / "status.json").read_text())["error"]
    assert not RUN.cluster.node_check and not Path(run_dir, "metrics.jsonl").read_text()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_reaches_plausible_speeds_and_keeps_no_memory():
    found = Measured(0, "here", 0, "gpu")
    before = torch.cuda.memory_reserved()
    node_check.measure_device(found, torch.device("cuda", 0))
    assert not found.wrong and torch.cuda.memory_reserved() == before
    assert 20 < found.speeds["gemm_tflops"] < 5000 and 100 < found.speeds["copy_gib_per_s"] < 20000
    assert 1 < found.speeds["to_host_gib_per_s"] < 1000 and 1 < found.speeds["to_device_gib_per_s"] < 1000
    assert best_s(lambda: torch.cuda._sleep(1000), torch.device("cuda", 0)) > 0
