"""The training loop."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import torch

from trainer.build import build
from trainer.checkpoint import store
from trainer.checkpoint.directory import surviving
from trainer.config import RunConfig
from trainer.data import build_data
from trainer.failure import StallWatch, write_failure
from trainer.kernels.capability import fastest_attention
from trainer.metrics.mark import Mark
from trainer.metrics.report import Report
from trainer.node_check import check_nodes
from trainer.optim.optimizer import SlabOptimizer
from trainer.optim.schedule import learning_rate
from trainer.parallel.mesh import Mesh
from trainer.state import TrainState
from trainer.step import NonFiniteError, evaluate, forward_backward, refuse_nonfinite
from trainer.stop import Stopped, StopRequest


def evaluation_is_due(step: int, config: RunConfig) -> bool:
    return config.data.eval_every_steps > 0 and step % config.data.eval_every_steps == 0


def next_learning_rate(state: TrainState, config: RunConfig) -> float:
    return learning_rate(config.schedule, config.optimizer.lr, state.step, config.train.steps)


def update(optimizer: SlabOptimizer, norm: torch.Tensor, lr: float) -> None:
    """Clip and apply the accumulated gradients."""
    optimizer.clip(norm)
    optimizer.step(lr)


def held_out_loss(state: TrainState, mesh: Mesh) -> float:
    """Mean loss of the held-out documents; raises NonFiniteError on every rank where it is not finite."""
    loss = evaluate(state.model, state.data.eval_batches(), mesh)
    if not math.isfinite(loss):
        raise NonFiniteError(f"step {state.step}: the held-out loss after it is {loss}")
    return loss


def save_and_stop(run_dir: Path, state: TrainState, config: RunConfig, mesh: Mesh, stop: StopRequest, report: Report):
    """Every rank has learnt that one of them was asked to stop: one checkpoint, then Stopped is raised."""
    asked = ", ".join([words for words in mesh.gather(stop.words) if words][:3])
    if store.may_save(config) and not store.save_is_due(state.step, config):
        report.save(partial(store.save, run_dir, state, config, mesh))
    raise Stopped(f"stopped after step {state.step} by {asked}; goes on from {surviving(run_dir)}")


def train(config: RunConfig, run_dir: Path, mesh: Mesh, digest: str, stop: StopRequest) -> None:
    """Train to the last step; raises on the first thing that goes wrong, on every rank; Stopped where `stop` says so."""
    watch = StallWatch(config.train.stall_timeout_s, partial(write_failure, run_dir, mesh.rank))
    resumed = store.newest(run_dir, mesh)
    with Report(config, run_dir, mesh, resumed) as report, fastest_attention():
        checked = check_nodes(config.cluster.node_check_min_share, mesh) if config.cluster.node_check else {}
        store.refuse_balanced(config)
        data = build_data(config, mesh.rank, mesh.world_size)
        model, optimizer, chosen = build(config, mesh)
        state = TrainState(model, optimizer, data)
        if resumed:
            store.load(run_dir, resumed, state, config, mesh)
        report.start(state, [f"run.json {digest}", *chosen, *optimizer.describe(), *data.describe()], checked)
        while state.step < config.train.steps:
            watch.progress(state.step)
            marks = [Mark(mesh.device)]  # evaluation, saving and what the device did meanwhile are no part of a step
            batches = data.micro_batches()
            marks.append(Mark(mesh.device))
            lr = next_learning_rate(state, config)
            before_last = partial(optimizer.expect_last_gradients, lr)
            queued = forward_backward(model, batches, config, mesh, bool(stop.words), before_last)
            norm = optimizer.grad_norm()
            marks.append(Mark(mesh.device))
            report.flush()  # the former step's row, while the device is busy with this one
            totals = queued.wait()
            refuse_nonfinite(state.step + 1, totals, norm.item(), optimizer, mesh)
            if totals.stops_asked:
                stop.settle()
            if totals.supervised_tokens:
                update(optimizer, norm, lr)
            optimizer.zero_grad()
            marks.append(Mark(mesh.device))
            state.step += 1
            state.supervised_tokens += totals.supervised_tokens
            report.step(state, totals, norm.item(), lr if totals.supervised_tokens else 0.0, marks)
            if evaluation_is_due(state.step, config):
                report.evaluate(partial(held_out_loss, state, mesh))
            if store.save_is_due(state.step, config):
                report.save(partial(store.save, run_dir, state, config, mesh))
            if totals.stops_asked and state.step < config.train.steps:
                save_and_stop(run_dir, state, config, mesh, stop, report)
            report.flush_finished()
        stop.settle()
        optimizer.drain()
        report.finish(state)
    watch.stop()
