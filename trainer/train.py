"""The training loop."""

from __future__ import annotations

import faulthandler
import sys
import time
from pathlib import Path

import torch

from trainer.build import build
from trainer.checkpoint import store
from trainer.config import RunConfig
from trainer.data import build_data
from trainer.kernels.capability import fastest_attention
from trainer.metrics.report import Report
from trainer.optim.schedule import learning_rate
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState
from trainer.step import evaluate, forward_backward, refuse_nonfinite


class Stopwatch:
    """Seconds between laps; on a GPU the work queued so far is waited for."""

    def __init__(self, device: torch.device):
        self._device = device
        self._last = time.perf_counter()

    def lap(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        return seconds


def expect_progress(timeout_s: float) -> None:
    """Unless called again in time: print every thread's stack and exit as failed. 0 waits for ever."""
    if timeout_s:
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)


def evaluation_is_due(step: int, config: RunConfig) -> bool:
    return config.data.eval_every_steps > 0 and step % config.data.eval_every_steps == 0


def update(state: TrainState, norm: torch.Tensor, config: RunConfig) -> float:
    """Clip and apply the accumulated gradients; returns the learning rate."""
    lr = learning_rate(config.schedule, config.optimizer.lr, state.step, config.train.steps)
    state.optimizer.clip(norm)
    state.optimizer.step(lr)
    return lr


def train(config: RunConfig, run_dir: Path, mesh: Mesh, digest: str) -> None:
    """Train to the last step; raises on the first thing that goes wrong, on every rank."""
    resumed = store.newest(run_dir)
    with Report(config, run_dir, mesh, resumed) as report, fastest_attention():
        store.refuse_balanced(config)
        data = build_data(config, mesh.rank, mesh.world_size)
        model, optimizer, sharding = build(config, mesh)
        state = TrainState(model, optimizer, data)
        if resumed:
            store.load(run_dir, resumed, state, config, mesh)
        report.start(state, [f"run.json {digest}", sharding, *optimizer.describe(), *data.describe()])
        watch = Stopwatch(mesh.device)
        while state.step < config.train.steps:
            expect_progress(config.train.stall_timeout_s)
            batches = data.micro_batches()
            times = {"data_time_s": watch.lap()}
            totals = forward_backward(model, batches, config, mesh)
            norm = optimizer.grad_norm()
            refuse_nonfinite(state.step + 1, totals, norm.item(), optimizer, mesh)
            times["forward_backward_time_s"] = watch.lap()
            lr = update(state, norm, config) if totals.supervised_tokens else 0.0
            optimizer.zero_grad()
            state.step += 1
            state.supervised_tokens += totals.supervised_tokens
            times["optimizer_time_s"] = watch.lap()
            eval_loss = evaluate(model, data.eval_batches(), mesh) if evaluation_is_due(state.step, config) else None
            report.step(state, totals, norm.item(), lr, times, eval_loss)
            if store.save_is_due(state.step, config):
                store.save(run_dir, state, config, mesh)
            watch.lap()  # evaluation, reporting and saving are no part of the step
        report.finish(state)
    faulthandler.cancel_dump_traceback_later()
