"""Before training: does every device compute and communicate right, and as fast as the others?

A slow device holds up all of them in every step, and a broken one spoils the weights. Each speed is the best of several
repetitions after a warm-up. On CPUs only products and copies are compared, by the time of the thread itself, and the ranks
of a node take turns: they share cores and caches, and would else be called slow for each other.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer.metrics.environment import device_name, host_name
from trainer.parallel.mesh import Mesh

GIB = 2**30
COMPARED = {
    "cuda": ("gemm_tflops", "copy_gib_per_s", "to_device_gib_per_s", "to_host_gib_per_s", "node_all_reduce_gib_per_s"),
    "cpu": ("gemm_tflops", "copy_gib_per_s"),
}
REPETITIONS = 8
OF_CPU = 60  # of its products and copies: among many short ones some are undisturbed


class NodeCheckError(RuntimeError):
    """A device is broken, or slower than cluster.node_check_min_share of the median."""


@dataclass
class Measured:
    """What one rank found out about its device."""

    rank: int
    host: str
    index: int  # of the device on its host
    name: str
    speeds: dict[str, float] = field(default_factory=dict)  # more is better; units in the names
    wrong: list[str] = field(default_factory=list)  # what gave another result than it must

    @property
    def words(self) -> str:
        return f"{self.host} {'CPU rank' if self.name == 'cpu' else 'GPU'} {self.index} ({self.name})"


def check_nodes(min_share: float, mesh: Mesh) -> dict[str, Any]:
    """Measure every rank's device and compare them; returns what to write down. All ranks call it.

    Raises NodeCheckError on every rank, naming hosts and devices, where one is broken or too slow.
    """
    begin_s = time.perf_counter()
    hosts = mesh.gather(host_name())
    ranks_of = {host: [rank for rank, other in enumerate(hosts) if other == host] for host in hosts}
    own = ranks_of[hosts[mesh.rank]]
    found = Measured(mesh.rank, hosts[mesh.rank], own.index(mesh.rank), device_name(mesh.device))
    for turn in range(max(map(len, ranks_of.values())) if mesh.device.type == "cpu" else 1):
        if mesh.device.type != "cpu" or turn == found.index:
            measure_device(found, mesh.device)
        dist.barrier()
    measure_links(found, mesh.device, list(ranks_of.values()), own)
    table = mesh.gather(found)
    compared = COMPARED[mesh.device.type]
    if problems := judge(table, compared, min_share):
        raise NodeCheckError("node check: " + "; ".join(problems))
    result = summary(table, time.perf_counter() - begin_s)
    if mesh.rank == 0:
        print(*lines(result), sep="\n", flush=True)
    return result


def judge(table: list[Measured], compared: tuple[str, ...], min_share: float) -> list[str]:
    """What is wrong with which devices, in words; empty where all are right and no speed is under its share."""
    problems = [f"{one.words} is broken: {what}" for one in table for what in one.wrong]
    for name in compared:
        speeds = [one.speeds[name] for one in table if name in one.speeds]
        median = statistics.median(speeds) if speeds else 0.0
        for one in table:
            speed = one.speeds.get(name, median)
            if not speed >= min_share * median:  # also NaN
                share = f"{speed / median:.2f} of the median {median:.4g}"
                problems.append(
                    f"{one.words} is slow: {name} {speed:.4g} is {share}, under cluster.node_check_min_share={min_share:g}"
                )
    return problems


def summary(table: list[Measured], took_s: float) -> dict[str, Any]:
    """Least, median and most of every speed, and which device is the slowest."""
    names = list(dict.fromkeys(name for one in table for name in one.speeds))
    speeds = {}
    for name in names:
        slowest = min(table, key=lambda one: one.speeds[name])
        values = [one.speeds[name] for one in table]
        speeds[name] = {"min": min(values), "median": statistics.median(values), "max": max(values)}
        speeds[name] |= {"slowest": slowest.words}
    hosts = len({one.host for one in table})
    return {"devices": len(table), "hosts": hosts, "time_s": round(took_s, 2), "speeds": speeds}


def lines(result: dict[str, Any]) -> list[str]:
    """The summary for the log."""
    head = f"node check: {result['devices']} devices on {result['hosts']} hosts are well, {result['time_s']} s"
    return [
        head,
        *(
            f"  {name:26} {one['min']:.4g} ({one['slowest']}), median {one['median']:.4g}, most {one['max']:.4g}"
            for name, one in result["speeds"].items()
        ),
    ]


def measure_device(found: Measured, device: torch.device) -> None:
    """Matrix product and copies, with their results checked."""
    on_gpu = device.type == "cuda"
    threads = torch.get_num_threads()
    if not on_gpu:
        torch.set_num_threads(1)  # the clock is this thread's
    size, rows, copied = (8192, 20, GIB) if on_gpu else (256, 1, 2**22)  # on a CPU shorter than a time slice
    # Few entries, all -1 or 1: sums stay under 256, which bf16 holds exactly.
    a, b = (_signs(size, device, torch.bfloat16 if on_gpu else torch.float32) for _ in range(2))
    product = multiply(a, b)
    probe = _signs(size, device, torch.float32, share=1.0)[:, :1]
    if not torch.equal(product.float() @ probe, a.float() @ (b.float() @ probe)):
        found.wrong.append(f"a product of two {size} x {size} matrices is not what it must be")
    clock = {} if on_gpu else {"clock": time.thread_time, "repetitions": OF_CPU}
    seconds = best_s(lambda: [multiply(a, b) for _ in range(rows)], device, **clock)
    found.speeds["gemm_tflops"] = 2e-12 * size**3 * rows / seconds

    source = torch.randint(0, 256, (copied,), device=device, dtype=torch.uint8)
    target = torch.empty_like(source)
    found.speeds["copy_gib_per_s"] = copied / GIB / best_s(lambda: target.copy_(source), device, **clock)
    if not torch.equal(source, target):
        found.wrong.append("a copy in its memory differs from what was copied")
    if on_gpu:
        part = source[: copied // 4]
        host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True)
        down_s = best_s(lambda: host.copy_(part, non_blocking=True), device)
        up_s = best_s(lambda: target[: copied // 4].copy_(host, non_blocking=True), device)
        found.speeds["to_host_gib_per_s"] = part.numel() / GIB / down_s
        found.speeds["to_device_gib_per_s"] = part.numel() / GIB / up_s
        if not torch.equal(host.to(device), part):
            found.wrong.append("a copy to the host and back differs from what was copied")
        del source, target, part, host, a, b, product
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    torch.set_num_threads(threads)


def measure_links(found: Measured, device: torch.device, nodes: list[list[int]], own: list[int]) -> None:
    """An all-reduce within the node and one over all ranks, with their results checked. All ranks call it."""
    groups = {"node_all_reduce": dist.new_subgroups_by_enumeration(nodes)[0], "all_reduce": dist.group.WORLD}
    members = {"node_all_reduce": own, "all_reduce": list(range(dist.get_world_size()))}
    for name, group in groups.items():
        ranks = members[name]
        if len(ranks) == 1:
            continue
        values = torch.full((2**26 if device.type == "cuda" else 2**18,), float(found.rank + 1), device=device)
        dist.all_reduce(values, group=group)
        if not torch.equal(values, torch.full_like(values, sum(rank + 1 for rank in ranks))):
            found.wrong.append(f"an all-reduce over {'its node' if name.startswith('node') else 'all ranks'} is wrong")
        seconds = best_s(lambda values=values, group=group: dist.all_reduce(values, group=group), device)
        moved = 2 * (len(ranks) - 1) / len(ranks) * values.nbytes  # what each rank sends
        found.speeds[f"{name}_gib_per_s"] = moved / GIB / seconds
    dist.destroy_process_group(groups["node_all_reduce"])


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


def best_s(
    action: Callable[[], Any],
    device: torch.device,
    clock: Callable[[], float] = time.perf_counter,
    repetitions: int = REPETITIONS,
) -> float:
    """Least seconds of several repetitions, by the GPU's own clock or, on a CPU, by `clock`."""
    seconds = []
    for _ in range(repetitions):
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            action()
            end.record()
            end.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        else:
            begin_s = clock()
            action()
            seconds.append(clock() - begin_s)
    return max(min(seconds[1:]), 1e-9)


def _signs(size: int, device: torch.device, dtype: torch.dtype, share: float = 0.125) -> torch.Tensor:
    """[size, size] of -1, 0 and 1, `share` of them not 0; the same everywhere."""
    generator = torch.Generator(device).manual_seed(size)
    values = torch.rand(size, size, device=device, generator=generator)
    return ((values < share / 2).to(dtype) - (values > 1 - share / 2).to(dtype)).contiguous()
