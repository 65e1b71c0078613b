"""Laws of offloading: whatever overlaps with whatever, a run takes the course of one that offloads nothing."""

import queue
import random
import threading
import time

import pytest
import torch
from torch import nn

from trainer.config import (
    ConfigError,
    DataConfig,
    OffloadConfig,
    OptimizerConfig,
    ParallelismConfig,
    RunConfig,
    TrainConfig,
)
from trainer.memory import offload
from trainer.memory.lanes import Lane, OffloadError, Worker, result
from trainer.optim import on_host, streamed_moments
from trainer.optim.adamw import AdamW
from trainer.optim.optimizer import build_optimizer
from trainer.optim.slabs import LocalParameter

STEPS, WIDTH = 20, 24


class SlowMoment:
    def __init__(self):
        self._passed = threading.Event()
        self.query, self.synchronize, self.set = self._passed.is_set, self._passed.wait, self._passed.set


class SlowLane(Lane):
    """As asynchronous as a CUDA stream: a thread, which sleeps now and then. The main thread is the compute stream."""

    def __init__(self, device):
        super().__init__(device)
        self._work, self._random = queue.SimpleQueue(), random.Random(0)
        threading.Thread(target=self._serve, daemon=True).start()

    @torch.no_grad()
    def _serve(self):
        while True:
            work, after, done = self._work.get()
            for moment in after:
                self.wait(moment)
            time.sleep(self._random.choice((0, 0, 0, 0.002)))
            work()
            done.set()

    def run(self, work, *after):
        done = SlowMoment()
        self._work.put((work, after, done))
        return done

    def hold_compute(self, moment):
        self.wait(moment)


class Model(nn.Module):
    """Blocks between an embedding and a head, named as the trainer's models are."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Linear(8, WIDTH, bias=False)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.lm_head = nn.Linear(WIDTH, 8, bias=False)

    def forward(self, x):
        x = self.embed_tokens(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.lm_head(x)


def build(mode, micro_batches=1, prefetch_gib=2.0, stall_timeout_s=30.0, dtype=torch.float32, **optimizer):
    config = RunConfig(
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=1, dp_shard=1, ep=1),
        data=DataConfig(global_batch_size=micro_batches),
        optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer}),
        offload=OffloadConfig(mode=mode, prefetch_gib=prefetch_gib),
        train=TrainConfig(stall_timeout_s=stall_timeout_s),
    )
    torch.manual_seed(0)
    model = Model().to(dtype)
    members = [
        LocalParameter(n, p.detach(), p, p.ndim > 1, p.ndim > 1 and n.startswith("layers."), None, p.shape[0])
        for n, p in model.named_parameters()
    ]
    built = build_optimizer(config, members, torch.device("cpu"), None)
    built.wait_before_use(model)
    return model, built


def course(mode, steps=STEPS, micro_batches=1, tokens=1, first=0, built=None, **options):
    """Train; returns losses, norms, and the optimizer's whole state."""
    model, optimizer = built or build(mode, micro_batches, **options)
    losses, norms = [], []
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        for left in reversed(range(micro_batches)):
            x = torch.randn(16, 8, generator=generator).to(next(model.parameters()).dtype)
            loss = (model(x) - x.flip(1)).square().sum()
            if not left:
                optimizer.expect_last_gradients(1e-2 / (step + 1), lambda: tokens)
            loss.backward()
            losses.append(loss.detach())
        norms.append(optimizer.grad_norm())
        if tokens:
            optimizer.clip(norms[-1])
            optimizer.step(1e-2 / (step + 1))
        optimizer.zero_grad()
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), **optimizer.state_dict()}, model


@pytest.fixture
def slow_lanes(monkeypatch):
    """Everything beside the compute stream is late, and spans are small enough for many of them."""
    monkeypatch.setattr(streamed_moments, "Lane", SlowLane)
    monkeypatch.setattr(on_host, "Lane", SlowLane)
    monkeypatch.setattr(offload, "SPAN", 200)


def assert_same(one, other):
    assert one.keys() == other.keys()
    different = [key for key in one if not torch.equal(one[key], other[key])]
    assert not different


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
@pytest.mark.parametrize(
    "name, mode",
    [("adamw", "optimizer"), ("adamw", "full"), ("sign_sgd", "optimizer"), ("sign_sgd", "full"), ("muon", "optimizer")],
)
def test_late_copies_and_updates_change_no_bit(slow_lanes, name, mode, clip_norm, micro_batches):
    options = {"name": name, "clip_norm": clip_norm, "micro_batches": micro_batches}
    plain, model = course("none", **options)
    late, late_model = course(mode, **options)
    assert plain["norms"].min() > 1  # clipping clips
    assert_same(plain, late)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), late_model.parameters(), strict=True))


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_without_clipping_parameters_change_in_backward_and_with_it_after_the_norm_is_known(mode):
    for clip_norm, changes in ((0.0, True), (1.0, False)):
        model, optimizer = build(mode, clip_norm=clip_norm)
        before = model.lm_head.weight.detach().clone()
        optimizer.expect_last_gradients(1e-2, lambda: 1)
        model(torch.ones(4, 8)).sum().backward()
        optimizer.drain()
        assert torch.equal(before, model.lm_head.weight) != changes and optimizer.updates_early == changes


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_step_without_supervised_tokens_updates_nothing(slow_lanes, mode, clip_norm):
    built = build(mode, micro_batches=2, clip_norm=clip_norm)
    before = {key: value.clone() for key, value in built[1].state_dict().items()}
    course(mode, steps=1, micro_batches=2, tokens=0, built=built)
    assert_same(before, built[1].state_dict())
    after, _ = course(mode, steps=2, micro_batches=2, built=built, first=1)
    expected, _ = course("none", steps=2, micro_batches=2, clip_norm=clip_norm, first=1)
    assert_same(after, expected)


@pytest.mark.parametrize("saved_by", ["none", "optimizer", "full"])
@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_a_run_goes_on_in_any_mode_as_if_it_had_stayed_in_its_own(slow_lanes, saved_by, clip_norm):
    built = build(saved_by, clip_norm=clip_norm)
    course(saved_by, steps=3, built=built)
    saved = {key: value.clone() for key, value in built[1].state_dict().items()}
    expected, _ = course(saved_by, steps=3, first=3, built=built)
    for mode in ("none", "optimizer", "full"):
        resumed = build(mode, clip_norm=clip_norm)
        resumed[1].load_state_dict(saved)
        assert_same(course(mode, steps=3, first=3, built=resumed)[0], expected)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_an_error_on_the_host_reaches_the_training_thread_with_step_and_parameter(monkeypatch, clip_norm):
    model, optimizer = build("full", clip_norm=clip_norm)
    course("full", steps=2, built=(model, optimizer))

    def fails(self, part, lr, step):
        raise MemoryError("no room")

    monkeypatch.setattr(AdamW, "update", fails)
    with pytest.raises(OffloadError, match=r"step 3, parameter \S+, offload=full: MemoryError: no room"):
        course("full", steps=2, first=2, built=(model, optimizer))
    with pytest.raises(OffloadError, match="no room"):  # and nothing waits for what never comes
        optimizer.drain()


def test_a_wait_that_does_not_end_is_an_error_that_names_step_and_parameter(monkeypatch):
    built = build("full", stall_timeout_s=0.2)
    monkeypatch.setattr(AdamW, "update", lambda *_: time.sleep(1))
    with pytest.raises(OffloadError, match=r"step 2, parameter \S+, offload=full: not done after 0.2 s"):
        course("full", steps=2, built=built)


def test_a_worker_ends_everything_behind_an_error_with_the_same_one():
    worker = Worker("test")
    futures = [worker.submit("first", lambda: 1), worker.submit("second", lambda: 1 / 0), worker.submit("third", int)]
    assert result(futures[0], 5, "") == 1
    for future in futures[1:]:
        with pytest.raises(OffloadError, match="second: ZeroDivisionError"):
            result(future, 5, "")


def test_gradients_that_leave_the_device_are_bounded(slow_lanes):
    largest = 4 * WIDTH * WIDTH
    model, optimizer = build("full", prefetch_gib=1.5 * largest / 2**30)
    kept = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: kept.append(sum(g.nbytes for _, g in optimizer._updates._on_device))
        )
    for _ in range(3):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.zero_grad()
    assert 0 < max(kept) <= 1.5 * largest


def test_buffers_stay_within_prefetch_gib_and_a_matrix_that_does_not_fit_is_refused():
    numel = 8 * 100  # 100 elements of two moments in each of four buffers
    _, optimizer = build("optimizer", prefetch_gib=numel * 4 / 2**30)
    buffers = optimizer._updates._buffers
    assert sum(buffer.tensor.numel() for buffer in buffers) == numel
    with pytest.raises(ConfigError, match=r"offload.prefetch_gib=\S+ does not hold 4 times .* matrix: at least 0.000"):
        build("optimizer", prefetch_gib=numel * 4 / 2**30, name="muon")


def test_waits_are_measured(slow_lanes):
    built = build("full")
    course("full", steps=2, built=built)
    waits = built[1].take_waits()
    assert waits and sum(end.since(begin) for begin, end in waits) > 0
    assert built[1].take_waits() == []
