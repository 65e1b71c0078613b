"""On a GPU: offload where the slabs should be, steps without waiting for the host and without large temporaries."""

import pytest
import torch
from torch import nn

from trainer.config import DataConfig, OffloadConfig, OptimizerConfig, ParallelismConfig, RunConfig, TrainConfig
from trainer.optim.optimizer import build_optimizer
from trainer.optim.slabs import LocalParameter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
GIB = 2**30


def build(shapes, mode="none", grad_dtype="fp32", name="adamw"):
    generator = torch.Generator("cuda").manual_seed(0)
    members = []
    for key, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
        matrix = len(shape) > 1
        members.append(LocalParameter(key, tensor, nn.Parameter(tensor), matrix, matrix, None, shape[0]))
    config = RunConfig(
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=1, dp_shard=1, ep=1),
        data=DataConfig(global_batch_size=1),
        optimizer=OptimizerConfig(name=name, clip_norm=0.1),
        offload=OffloadConfig(mode=mode),
        train=TrainConfig(grad_dtype=grad_dtype),
    )
    return members, build_optimizer(config, members, torch.device("cuda"), None)


def step(members, optimizer, seed):
    torch.manual_seed(seed)
    for member in members:
        member.parameter.grad = None
        member.parameter.backward(torch.randn_like(member.parameter))
    norm = optimizer.grad_norm()
    optimizer.clip(norm)
    optimizer.step(1e-2)
    optimizer.zero_grad()
    return norm


SMALL = {"layers.0.experts": (3, 257, 129), "layers.0.q": (1000, 300), "norm": (77,)}


@pytest.mark.parametrize("name", ["adamw", "sign_sgd", "muon"])
def test_offload_computes_the_same(name):
    states = {}
    for mode in ("none", "optimizer", "full")[: 2 if name == "muon" else 3]:
        members, optimizer = build(SMALL, mode, name=name)
        norms = [step(members, optimizer, seed) for seed in range(3)]
        states[mode] = {**optimizer.state_dict(), "norms": torch.stack(norms)}
        for member in members:
            assert torch.equal(member.tensor, states[mode][f"master.{member.name}"].to("cuda").bfloat16())
    for mode, state in states.items():  # other kernels: fused with clipping, torch's, the CPU's
        for key, value in state.items():
            message = f"{mode}, {key}"
            torch.testing.assert_close(value.cpu(), states["none"][key].cpu(), rtol=1e-4, atol=1e-6, msg=message)


def test_slabs_live_where_the_mode_says():
    places = {
        "none": {"master": "cuda", "exp_avg": "cuda"},
        "optimizer": {"master": "cuda", "exp_avg": "cpu"},
        "full": {"master": "cpu", "exp_avg": "cpu"},
    }
    numel = 3 * 2**20  # a power of two times three: torch's pinned allocator would take four
    for mode, expected in places.items():
        _, optimizer = build({"w": (numel,)}, mode)
        state = optimizer.state_dict()
        for kind, device in expected.items():
            tensor = state[f"{kind}.w"]
            assert tensor.device.type == device and (device == "cuda" or tensor.is_pinned())
        assert optimizer.host_memory_gib == {"none": 0, "optimizer": 2, "full": 4}[mode] * 4 * numel / GIB


def test_norm_clip_and_step_do_not_wait_for_the_host():
    members, optimizer = build(SMALL)
    step(members, optimizer, 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(members, optimizer, 1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("mode", ["none", "optimizer", "full"])
@pytest.mark.parametrize("grad_dtype", ["fp32", "bf16"])
def test_temporaries_stay_small_however_large_a_parameter_is(mode, grad_dtype):
    members, optimizer = build({"layers.0.experts": (64, 3072, 2048)}, mode, grad_dtype)  # 0.4e9: 1.5 GiB of fp32
    step(members, optimizer, 0)
    members[0].parameter.backward(torch.randn_like(members[0].parameter))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    optimizer.nonfinite_parameters()
    norm = optimizer.grad_norm()
    optimizer.clip(norm)
    optimizer.step(1e-3)
    optimizer.zero_grad()
    assert torch.cuda.max_memory_allocated() - before < 0.8 * GIB
    assert torch.cuda.memory_allocated() - before < 2**20
