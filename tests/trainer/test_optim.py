"""The slab optimizer against torch's optimizers, and its laws: offload changes nothing, nothing is lost or forgotten."""

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
from trainer.optim.optimizer import build_optimizer
from trainer.optim.slabs import LocalParameter

SHAPES = {"embed": (50, 24), "layers.0.q": (24, 40), "layers.0.experts": (3, 16, 24), "layers.0.norm": (24,)}


def parameters(dtype=torch.float32, shapes=None):
    """Parameters of a tiny model by name, the same ones every time."""
    generator = torch.Generator().manual_seed(1)
    shapes = SHAPES if shapes is None else shapes
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def build(named, mode="none", grad_dtype="fp32", device="cpu", micro_batches=2, **optimizer):
    config = RunConfig(
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=1, dp_shard=1, ep=1),
        data=DataConfig(global_batch_size=micro_batches),
        optimizer=OptimizerConfig(**{"lr": 1e-2, **optimizer}),
        offload=OffloadConfig(mode=mode),
        train=TrainConfig(grad_dtype=grad_dtype),
    )
    members = [
        LocalParameter(
            name=name,
            tensor=p.detach(),
            parameter=p,
            decay=p.ndim > 1,
            matrix=p.ndim > 1 and name.startswith("layers."),
            shard_group=None,
            full_rows=p.shape[0],
        )
        for name, p in named.items()
    ]
    return build_optimizer(config, members, torch.device(device), None)


def backward(named, seed, scale=1.0):
    """A backward pass whose gradients are seeded noise."""
    generator = torch.Generator().manual_seed(seed)
    loss = 0
    for p in named.values():
        loss = loss + (p * (torch.randn(p.shape, generator=generator) * scale).to(p)).sum()
    loss.backward()


def train(named, optimizer, steps=5, micro_batches=2, first=0):
    """Steps with accumulation and clipping; returns the norms."""
    norms = []
    for step in range(first, first + steps):
        for m in range(micro_batches):
            backward(named, 100 * step + m)
        norms.append(optimizer.grad_norm())
        optimizer.clip(norms[-1])
        optimizer.step(1e-2 / (step + 1))
        optimizer.zero_grad()
    optimizer.drain()
    return torch.stack(norms)


@pytest.fixture
def small_spans(monkeypatch):
    """Spans that cross the borders of parameters and leave a rest, as with billions of elements."""
    monkeypatch.setattr(offload, "SPAN", 1000)


def clip_torch(named, max_norm):
    return nn.utils.clip_grad_norm_(named.values(), max_norm)


def test_adamw_is_torch_adamw_on_matrices_with_and_norms_without_decay(small_spans):
    named, reference = parameters(), parameters()
    optimizer = build(named, weight_decay=0.3, clip_norm=5.0)
    torch_optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in reference.values() if p.ndim > 1], "weight_decay": 0.3},
            {"params": [p for p in reference.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    norms = train(named, optimizer)
    for step in range(5):
        for m in range(2):
            backward(reference, 100 * step + m)
        assert clip_torch(reference, 5.0).item() == pytest.approx(norms[step].item(), rel=1e-6) and norms[step] > 5
        for group in torch_optimizer.param_groups:
            group["lr"] = 1e-2 / (step + 1)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
    for name, p in named.items():
        torch.testing.assert_close(p, reference[name], rtol=1e-6, atol=1e-7)


def test_sign_sgd_moves_every_element_by_the_rate_and_decays_matrices():
    named, before = parameters(), parameters()
    optimizer = build(named, name="sign_sgd", weight_decay=0.5)
    backward(named, 0)
    generator = torch.Generator().manual_seed(0)
    optimizer.step(0.1)
    for name, p in before.items():
        decay = 0.5 if p.ndim > 1 else 0.0
        sign = torch.randn(p.shape, generator=generator).sign()
        torch.testing.assert_close(named[name].data, p.data - 0.1 * (sign + decay * p.data))
    assert list(optimizer.state_dict()) == ["step", *(f"master.{name}" for name in ("embed", *list(SHAPES)[1:]))]


@pytest.mark.parametrize(
    "name, modes", [("adamw", ("optimizer", "full")), ("sign_sgd", ("optimizer", "full")), ("muon", ("optimizer",))]
)
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_offload_changes_no_bit(small_spans, name, modes, param_dtype, grad_dtype):
    results = []
    for mode in ("none", *modes):
        named = parameters(param_dtype)
        optimizer = build(named, mode, grad_dtype, name=name, clip_norm=5.0)
        norms = train(named, optimizer)
        assert (norms > 5).all()
        results.append({"norms": norms, **named, **optimizer.state_dict()})
    for other in results[1:]:
        assert other.keys() == results[0].keys()
        assert all(torch.equal(other[key], results[0][key]) for key in other)


def test_muon_with_full_offload_is_refused():
    with pytest.raises(ConfigError, match="optimizer=muon.*offload=full"):
        build(parameters(), "full", name="muon")


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
def test_updates_too_small_for_bf16_reach_the_masters(mode):
    named = parameters(torch.bfloat16)
    before = {name: p.detach().clone() for name, p in named.items()}
    optimizer = build(named, mode, weight_decay=0.0)
    masters = {name: optimizer.state_dict()[f"master.{name}"].clone() for name in named}
    backward(named, 0)
    optimizer.step(1e-6)
    optimizer.drain()
    for name, p in named.items():
        master = optimizer.state_dict()[f"master.{name}"]
        assert master.dtype == torch.float32
        moved = (master - masters[name]).abs()
        torch.testing.assert_close(moved, torch.full_like(moved, 1e-6), rtol=0.3, atol=0)  # fp32 spacing near 1
        assert torch.equal(p, master.bfloat16())
    assert torch.equal(named["embed"], before["embed"])  # the parameter alone would never move


def test_the_master_is_what_remembers_small_updates():
    named = parameters(torch.bfloat16)
    before = named["layers.0.norm"].detach().clone()
    optimizer = build(named, name="sign_sgd", weight_decay=0.0, clip_norm=0.0)
    for _ in range(400):
        (named["layers.0.norm"].float().sum()).backward()
        optimizer.step(1e-4)
        optimizer.zero_grad()
    torch.testing.assert_close(named["layers.0.norm"].float(), before.float() - 0.04, rtol=4e-3, atol=1e-3)


def test_gradients_accumulate_in_fp32_although_parameters_are_bf16():
    named = {"w": nn.Parameter(torch.zeros(8, 8, dtype=torch.bfloat16))}
    optimizer = build(named)
    for scale in (1.0, *[2**-9] * 16):  # bf16 would drop every addend after the first
        (named["w"] * scale).sum().backward()
        assert named["w"].grad is None
    assert optimizer.grad_norm().item() == pytest.approx(8 * (1 + 16 * 2**-9), rel=1e-6)


def test_a_parameter_without_gradient_counts_as_zero_gradient():
    named = parameters()
    optimizer = build(named, weight_decay=0.0, clip_norm=0.0)
    backward({"embed": named["embed"]}, 0)
    optimizer.step(1e-2)
    fresh = parameters()
    assert not torch.equal(named["embed"], fresh["embed"])
    assert all(torch.equal(named[name], fresh[name]) for name in list(SHAPES)[1:])


@pytest.mark.parametrize("mode", ["none", "full"])
def test_clipping_scales_to_the_norm_and_zero_means_none(mode):
    for clip_norm, given, expected in ((0.25, 57.7, 0.25), (0.25, 0.2, 57.7), (0.0, 57.7, 57.7)):
        named = parameters()
        optimizer = build(named, mode, clip_norm=clip_norm)
        backward(named, 0)
        norm = optimizer.grad_norm()
        assert norm.item() == pytest.approx(57.7, rel=1e-3)
        optimizer.clip(norm if given == 57.7 else torch.tensor(given))  # a norm below the limit: untouched
        assert optimizer.grad_norm() == norm  # the gradients stay; the step sees them scaled
        optimizer.step(0.0)
        moments = [v.norm() for k, v in optimizer.state_dict().items() if k.startswith("exp_avg.")]
        assert torch.stack(moments).norm().item() == pytest.approx(0.1 * expected, rel=1e-3)


def test_norm_of_many_equal_elements_is_exact(monkeypatch):
    named = {"w": nn.Parameter(torch.zeros(5_000_000))}
    optimizer = build(named)
    (named["w"] * 1e-3).sum().backward()
    assert optimizer.grad_norm().item() == pytest.approx(1e-3 * 5_000_000**0.5, rel=1e-6)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_nonfinite_gradients_are_seen_and_named(bad, grad_dtype):
    named = parameters()
    optimizer = build(named, grad_dtype=grad_dtype)
    backward(named, 0)
    assert optimizer.nonfinite_parameters() == [] and optimizer.grad_norm().isfinite()
    factor = torch.ones(24, 40)
    factor[7, 11] = bad
    (named["layers.0.q"] * factor).sum().backward()
    assert not optimizer.grad_norm().isfinite()
    assert optimizer.nonfinite_parameters() == ["layers.0.q"]


def test_loaded_weights_survive_the_next_step_after_refresh_masters():
    named = parameters(torch.bfloat16)
    optimizer = build(named, "full", weight_decay=0.0)
    with torch.no_grad():
        named["embed"].fill_(3.0)
    optimizer.refresh_masters()
    backward(named, 0)
    optimizer.step(1e-6)
    optimizer.drain()
    assert (optimizer.state_dict()["master.embed"] - 3.0).abs().max() < 1e-5
    assert (named["embed"] == 3.0).all()


def test_the_live_parameter_is_written_also_when_it_got_another_storage():
    named = parameters()
    optimizer = build(named, weight_decay=0.0)
    before = named["embed"].detach().clone()
    named["embed"].data = before.clone()  # as FSDP2 does when it pads a shard
    backward(named, 0)
    optimizer.step(1e-2)
    assert (named["embed"] != before).all()


@pytest.mark.parametrize(
    "name, mode", [("adamw", "none"), ("adamw", "full"), ("sign_sgd", "none"), ("muon", "optimizer")]
)
def test_resumed_is_uninterrupted_bitwise(name, mode):
    named = parameters(torch.bfloat16)
    optimizer = build(named, mode, name=name)
    train(named, optimizer, steps=3)
    saved = {key: value.clone() for key, value in optimizer.state_dict().items()}
    expected_norms = train(named, optimizer, steps=2, first=3)

    resumed = {n: nn.Parameter(torch.zeros_like(p)) for n, p in named.items()}
    other = build(resumed, mode, name=name)
    other.load_state_dict(saved)
    restored = other.state_dict()
    assert restored.keys() == saved.keys() and all(torch.equal(restored[key], saved[key]) for key in saved)
    assert saved["step"] == 3
    assert all(torch.equal(p, saved[f"master.{n}"].bfloat16()) for n, p in resumed.items())
    assert torch.equal(train(resumed, other, steps=2, first=3), expected_norms)
    assert all(torch.equal(resumed[n], named[n]) for n in named)


@pytest.mark.parametrize("key", ["step", "exp_avg.embed", "exp_avg_sq.layers.0.norm", "master.layers.0.q"])
def test_a_missing_or_unfitting_state_is_refused_and_changes_nothing(key):
    named = parameters()
    optimizer = build(named)
    train(named, optimizer, steps=1)
    before = {k: v.clone() for k, v in optimizer.state_dict().items()}
    state = {k: v.clone() + 1 for k, v in before.items()}
    value = state.pop(key)
    with pytest.raises(ValueError, match=key):
        optimizer.load_state_dict(state)
    with pytest.raises(ValueError, match="unknown.*master.other"):
        optimizer.load_state_dict({**state, key: value, "master.other": value})
    if key != "step":
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict({**state, key: value[:-1]})
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state_dict().items())


@pytest.mark.parametrize("name", ["adamw", "sign_sgd", "muon"])
def test_empty_shards_and_frozen_parameters_work(name):
    shapes = {**SHAPES, "layers.1.experts": (0, 16, 24), "layers.1.q": (0, 24), "layers.1.norm": (0,)}
    named = parameters(shapes=shapes)
    optimizer = build({n: p for n, p in named.items() if n != "layers.0.q"}, "optimizer", name=name)
    named["layers.0.q"].requires_grad_(False)
    norms = train(named, optimizer, steps=2)
    assert norms.isfinite().all() and optimizer.nonfinite_parameters() == []
    state = {key: value.clone() for key, value in optimizer.state_dict().items()}
    assert state["master.layers.1.q"].shape == (0, 24) and not any("layers.0.q" in key for key in state)
    optimizer.load_state_dict(state)
    assert torch.equal(named["layers.0.q"], parameters(shapes=shapes)["layers.0.q"])


def test_a_rank_that_owns_nothing_works():
    optimizer = build({"layers.0.experts": nn.Parameter(torch.zeros(0, 4, 4))})
    assert optimizer.grad_norm() == 0
    optimizer.clip(optimizer.grad_norm())
    optimizer.step(1e-3)
    assert optimizer.nonfinite_parameters() == []


def test_the_log_names_dtypes_places_and_sizes():
    named = {"w": nn.Parameter(torch.zeros(2**18, 256, dtype=torch.bfloat16))}
    optimizer = build(named, "optimizer", "bf16")
    assert optimizer.describe() == [
        "optimizer AdamW, offload optimizer",
        "  parameters: bfloat16 on cpu, 0.125 GiB",
        "  master: float32 on cpu, 0.250 GiB",
        "  exp_avg: float32 on cpu, 0.250 GiB",
        "  exp_avg_sq: float32 on cpu, 0.250 GiB",
        "  gradients: as they come, from a step's second micro-batch on in bfloat16",
        "  moments pass through 4 buffers of 0.500 GiB on cpu",
    ]
    assert optimizer.host_memory_gib == 0.75
    optimizer = build(named, "full", "fp32")
    assert optimizer.describe()[-1] == "  gradients: float32 on cpu, 0.250 GiB" and optimizer.host_memory_gib == 1
    optimizer = build(named, "full", "fp32", micro_batches=1)
    assert optimizer.describe()[-1] == "  gradients: bfloat16 on cpu, 0.125 GiB" and optimizer.host_memory_gib == 0.875


def test_the_only_gradient_of_a_step_is_neither_copied_nor_cast():
    w = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = build({"w": w})
    gradients = []
    w.register_hook(lambda gradient: gradients.append(gradient.data_ptr()))
    (w * 2).sum().backward()
    kept = optimizer.gradients()["w"]
    assert kept.dtype == torch.bfloat16 and kept.data_ptr() == gradients[0]
    (w * 2).sum().backward()
    assert optimizer.gradients()["w"].dtype == torch.float32 and (optimizer.gradients()["w"] == 4).all()
    optimizer.zero_grad()
    assert (optimizer.gradients()["w"] == 0).all()
