"""The training loop."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from trainer.build import build
from trainer.checkpoint import store
from trainer.config import RunConfig
from trainer.data import build_data
from trainer.failure import StallWatch, write_failure
from trainer.kernels.capability import fastest_attention
from trainer.metrics.mark import Mark
from trainer.metrics.report import Report
from trainer.optim.schedule import learning_rate
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState
from trainer.step import NonFiniteError, evaluate, forward_backward, refuse_nonfinite


def evaluation_is_due(step: int, config: RunConfig) -> bool:
    return config.data.eval_every_steps > 0 and step % config.data.eval_every_steps == 0


def update(state: TrainState, norm: torch.Tensor, config: RunConfig) -> float:
    """Clip and apply the accumulated gradients; returns the learning rate."""
    lr = learning_rate(config.schedule, config.optimizer.lr, state.step, config.train.steps)
    state.optimizer.clip(norm)
    state.optimizer.step(lr)
    return lr


def held_out_loss(state: TrainState, mesh: Mesh) -> float:
    """Mean loss of the held-out documents; raises NonFiniteError on every rank where it is not finite."""
    loss = evaluate(state.model, state.data.eval_batches(), mesh)
    if not math.isfinite(loss):
        raise NonFiniteError(f"step {state.step}: the held-out loss after it is {loss}")
    return loss


def train(config: RunConfig, run_dir: Path, mesh: Mesh, digest: str) -> None:
    """Train to the last step; raises on the first thing that goes wrong, on every rank."""
    watch = StallWatch(config.train.stall_timeout_s, partial(write_failure, run_dir, mesh.rank))
    resumed = store.newest(run_dir, mesh)
    with Report(config, run_dir, mesh, resumed) as report, fastest_attention():
        store.refuse_balanced(config)
        data = build_data(config, mesh.rank, mesh.world_size)
        model, optimizer, chosen = build(config, mesh)
        state = TrainState(model, optimizer, data)
        if resumed:
            store.load(run_dir, resumed, state, config, mesh)
        report.start(state, [f"run.json {digest}", *chosen, *optimizer.describe(), *data.describe()])
        while state.step < config.train.steps:
            watch.progress(state.step)
            marks = [Mark(mesh.device)]  # evaluation, saving and what the device did meanwhile are no part of a step
            batches = data.micro_batches()
            marks.append(Mark(mesh.device))
            queued = forward_backward(model, batches, config, mesh)
            norm = optimizer.grad_norm()
            marks.append(Mark(mesh.device))
            report.flush()  # the former step's row, while the device is busy with this one
            totals = queued.wait()
            refuse_nonfinite(state.step + 1, totals, norm.item(), optimizer, mesh)
            lr = update(state, norm, config) if totals.supervised_tokens else 0.0
            optimizer.zero_grad()
            marks.append(Mark(mesh.device))
            state.step += 1
            state.supervised_tokens += totals.supervised_tokens
            report.step(state, totals, norm.item(), lr, marks)
            if evaluation_is_due(state.step, config):
                report.evaluate(partial(held_out_loss, state, mesh))
            if store.save_is_due(state.step, config):
                report.save(partial(store.save, run_dir, state, config, mesh))
            report.flush_finished()
        report.finish(state)
    watch.stop()
