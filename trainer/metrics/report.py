"""What the training loop tells the world: one row per step, and the result at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

from trainer.compile import graph_breaks
from trainer.config import RunConfig
from trainer.flops import flops_at_length, flops_per_token
from trainer.metrics.environment import cluster_environment, device_name, environment, host_memory_gib, peak_memory_gib
from trainer.metrics.files import read_rows
from trainer.metrics.mark import Mark
from trainer.metrics.peak import resolve_peak
from trainer.metrics.rates import build_result, rates
from trainer.metrics.recorder import Recorder
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState
from trainer.step import StepTotals
from trainer.stop import Stopped

PHASES = ("data_time_s", "forward_backward_time_s", "optimizer_time_s")


@dataclass
class Unwritten:
    """What is known of a step that a GPU may still be busy with."""

    step: int
    values: dict[str, Any]
    totals: StepTotals
    marks: list[Mark]  # the step's begin, and the ends of its phases
    offload_waits: list[tuple[Mark, Mark]]  # of this step's forward for the former one's update
    evaluated: Mark | None = None


class Report:
    """A context around the run: whatever leaves it is recorded as its end. Rank 0 writes."""

    def __init__(self, config: RunConfig, run_dir: Path, mesh: Mesh, resumed: int):
        self._config, self._run_dir, self._mesh = config, run_dir, mesh
        self._name = device_name(mesh.device)
        self._unwritten: Unwritten | None = None
        self._save_times_s: list[float] = []
        attempt = attempt_number(run_dir)
        self._recorder = Recorder(run_dir, config, mesh.rank, mesh.world_size, self._name, attempt, resumed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None:
            with suppress(Exception):  # of a device that failed; the error that came first counts
                self.flush()
            if isinstance(error, Stopped):
                self._recorder.finish("preempted", error=str(error))
            else:
                self._recorder.finish("failed", error=f"{kind.__name__}: {error}")

    def start(self, state: TrainState, lines: list[str], checked: dict[str, Any] | None = None) -> None:
        """The first step begins; `lines` say what was built, `checked` how well the nodes are. All ranks call it."""
        self._peak, self._peak_source = resolve_peak(self._config.benchmark.peak_flops, self._name, self._mesh.device)
        information, differences = cluster_environment(self._mesh.gather(environment()))
        self._recorder.start(information | ({"node_check": checked} if checked else {}))
        if self._mesh.rank == 0:
            lines = [*differences, *lines]
            peak = f"{self._peak:.4g} FLOP/s, {self._peak_source}" if self._peak else f"no MFU: {self._peak_source}"
            begin = [f"continues after step {state.step}"] if state.step else []
            print(*lines, *begin, f"device: {self._name}; {peak}", sep="\n", flush=True)

    def step(self, state: TrainState, totals: StepTotals, grad_norm: float, lr: float, marks: list[Mark]) -> None:
        """Take what is known of the step that just ended, or will when the GPU gets there; flush() writes its row.

        marks: the step's begin, and the ends of waiting for data, of forward and backward, and of the optimizer.
        """
        values = {
            "loss": totals.loss,
            "aux_loss": totals.aux_loss if totals.tokens_per_expert else None,
            "grad_norm": grad_norm,
            "lr": lr,
            "epoch": state.data.epoch,
            "supervised_tokens": totals.supervised_tokens,
            "real_tokens": totals.real_tokens,
            "padded_tokens": totals.padded_tokens,
            **{name: state.data.counts.get(name) for name in ("truncated_tokens", "dropped_tokens")},  # of the epoch
            "peak_memory_gib": peak_memory_gib(self._mesh.device).get("allocated"),
            "load_balance_max_over_mean": max(totals.load_balance, default=None),
            **{f"load_balance/{layer}": value for layer, value in self._load_by_layer(totals)},
        }
        self._unwritten = Unwritten(state.step, values, totals, marks, state.optimizer.take_waits())

    def evaluate(self, held_out_loss: Callable[[], float]) -> None:
        """Add the held-out loss, and the time that it took, to the row of the step that just ended."""
        self._unwritten.values["eval_loss"] = held_out_loss()
        self._unwritten.evaluated = Mark(self._mesh.device)

    def save(self, write: Callable[[], None]) -> None:
        """Write a checkpoint, after the rows that a run resumed from it will not make again."""
        self.flush()
        begin_s = time.perf_counter()
        write()
        self._save_times_s.append(time.perf_counter() - begin_s)

    def flush_finished(self) -> None:
        """Write the row that step() left if nobody has to wait for it."""
        row = self._unwritten
        if row is not None and (row.evaluated or row.marks[-1]).passed():
            self.flush()

    def flush(self) -> None:
        """Write the row that step() left, if any; waits for the GPU to end that step."""
        row, self._unwritten = self._unwritten, None
        if row is not None:
            self._write(row)

    def _write(self, row: Unwritten) -> None:
        config, world_size = self._config, self._mesh.world_size
        step, values, totals, marks = row.step, row.values, row.totals, row.marks
        times = dict(zip(PHASES, (end.since(begin) for begin, end in pairwise(marks)), strict=True))
        step_time_s = sum(times.values())
        positions = totals.real_tokens + totals.padded_tokens
        flops = flops_at_length(config, totals.squared_document_len / positions)
        throughput = rates(config, flops, self._peak, step_time_s, positions // world_size, totals.real_tokens)
        if config.offload.mode != "none":
            times["offload_exposed_s"] = sum(end.since(begin) for begin, end in row.offload_waits)
        if row.evaluated is not None:
            times["eval_time_s"] = row.evaluated.since(marks[-1])
        self._recorder.row(step, {**values, "step_time_s": step_time_s, **times, **throughput})
        if self._mesh.rank == 0:
            loss = f"loss {totals.loss:.4f}" if totals.supervised_tokens else "0 supervised tokens, no update"
            grad_norm = f"grad_norm {values['grad_norm']:.4f}"
            print(f"step {step}/{config.train.steps}  {loss}  {grad_norm}  {step_time_s:.3f} s", flush=True)

    def _load_by_layer(self, totals: StepTotals) -> zip:
        model = self._config.model
        sparse = (layer for layer in range(model.num_hidden_layers) if model.is_sparse(layer))
        return zip(sparse, totals.load_balance, strict=True)

    def finish(self, state: TrainState) -> None:
        """Write the result of a run that has done all its steps. All ranks call it."""
        self.flush()
        config, device = self._config, self._mesh.device
        memory = {name: self._largest(value) for name, value in peak_memory_gib(device).items()}
        host = self._largest(host_memory_gib())
        if self._mesh.rank == 0:
            result = build_result(
                config,
                read_rows(self._run_dir / "metrics.jsonl"),
                flops_per_token(config),
                self._peak,
                self._peak_source,
                peak_memory_gib=memory or None,
                host_memory_gib=host,
                save_times_s=self._save_times_s,
                notes={"data": ", ".join(f"{name} {count}" for name, count in state.data.counts.items())},
            )
            if config.compile.mode != "none":
                result["graph_breaks"] = graph_breaks()
            self._recorder.finish("done", result)
        dist.barrier()  # the result is written before any rank ends

    def _largest(self, value: float) -> float:
        """Over all ranks."""
        return self._mesh.all_reduce(torch.tensor(value, device=self._mesh.device), dist.ReduceOp.MAX).item()


def attempt_number(run_dir: Path) -> int:
    """Number of this attempt, from 1: the launcher's log directories, or under torchrun one more than the last row's.

    A row's attempt is what tells that its step was the first of a process, which compiles and warms up.
    """
    started = sum(1 for _ in run_dir.glob("logs/attempt_*"))
    rows = read_rows(run_dir / "metrics.jsonl")
    return max(1, started, rows[-1].get("attempt", 0) + 1 if rows else 0)
