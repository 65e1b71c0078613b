"""On a GPU: the fast paths follow the plain reference, compiled blocks have no graph break, offload changes nothing."""

import dataclasses

import pytest
import torch
import torch.distributed as dist

import trainer.models.moe
import trainer.models.qwen3
from trainer.build import build
from trainer.compile import graph_breaks
from trainer.config import ModelConfig, OptimizerConfig, ParallelismConfig, RunConfig, from_dict, to_dict
from trainer.data import build_data
from trainer.kernels.attention import attention, attention_reference, document_mask
from trainer.kernels.grouped_mm import grouped_mm, grouped_mm_reference
from trainer.parallel.mesh import build_mesh
from trainer.step import forward_backward, refuse_nonfinite

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)
MODEL = ModelConfig(
    hidden_size=512, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    intermediate_size=1024, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=256, vocab_size=4096,
    mlp_only_layers=[1], router_aux_loss_coef=0.01,
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    torch.cuda.set_device(DEVICE)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=DEVICE)
    yield
    dist.destroy_process_group()


def course(steps=6, *, model=MODEL, data="random", dtype="bf16", **modes):
    """Losses and gradient norms of a few steps."""
    run = RunConfig(
        model=model,
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=1, dp_shard=1, ep=1),
        optimizer=OptimizerConfig(lr=1e-3),
    )
    config = to_dict(run)
    for group, mode in {"offload": "none", "ac": "none", "compile": "none", **modes}.items():
        config[group]["mode"] = mode
    config["train"]["param_dtype"] = dtype
    config["data"].update(name=data, seq_len=1024, global_batch_size=2, micro_batch_size=1)
    config = from_dict(config)
    mesh = build_mesh(config.parallelism, DEVICE)
    model, optimizer, _ = build(config, mesh)
    rows = build_data(config, 0, 1)
    batches = rows.micro_batches()  # the same every step: the loss falls, so a wrong gradient shows
    result = []
    for step in range(steps):
        totals = forward_backward(model, batches, config, mesh)
        norm = optimizer.grad_norm()
        refuse_nonfinite(step, totals, norm.item(), optimizer, mesh)
        optimizer.clip(norm)
        optimizer.step(1e-3)
        optimizer.zero_grad()
        result.append((totals.loss, norm.item()))
    return torch.tensor(result)


def plain(monkeypatch, **options):
    """The same course with a loop over experts and explicit attention, eager, everything kept."""
    with monkeypatch.context() as patch:
        patch.setattr(trainer.models.moe, "grouped_mm", grouped_mm_reference)
        patch.setattr(trainer.models.qwen3, "attention", attention_reference)
        return course(**options)


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("compile", ["none", "fullgraph"])
@pytest.mark.parametrize("routing", ["learned", "balanced"])
def test_bf16_training_follows_the_plain_fp32_reference(monkeypatch, ac, compile, routing):
    """First step: loss to 1e-3, norm to 2 %. Then rounding grows with every update: six losses to 2 %."""
    model = dataclasses.replace(MODEL, routing=routing, router_dtype="bf16" if routing == "balanced" else "fp32")
    before = graph_breaks()
    ours = course(model=model, ac=ac, compile=compile)
    expected = plain(monkeypatch, model=model, dtype="fp32")
    assert graph_breaks() == before
    assert expected[-1, 0] < expected[0, 0] - 1
    assert ours[0].tolist() == [
        pytest.approx(expected[0, 0].item(), rel=1e-3),
        pytest.approx(expected[0, 1].item(), rel=0.02),
    ]
    torch.testing.assert_close(ours[:, 0], expected[:, 0], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("mode", ["optimizer", "full"])
def test_offload_changes_nothing_beyond_the_cpu_kernels_rounding(mode):
    """Equal before the first update; then the CPU's AdamW rounds differently, and the courses part slowly."""
    offloaded, plain = course(offload=mode), course(offload="none")
    torch.testing.assert_close(offloaded[:2], plain[:2], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(offloaded[:, 0], plain[:, 0], rtol=0.01, atol=0.01)


def test_recomputation_changes_nothing_beyond_rounding():
    torch.testing.assert_close(course(ac="full")[:, 0], course(ac="none")[:, 0], rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("packed", [False, True])
def test_attention_equals_the_reference(packed):
    q, k, v = (torch.randn(2, heads, 256, 64, device=DEVICE, requires_grad=True) for heads in (8, 2, 2))
    documents = torch.tensor([[0] * 100 + [1] * 120 + [-1] * 36] * 2, device=DEVICE)
    mask = document_mask(documents) if packed else None
    expected = attention_reference(q, k, v, mask)
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    low = [t.detach().bfloat16().requires_grad_() for t in (q, k, v)]
    out = attention(*low, mask)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    for ours, theirs in zip(torch.autograd.grad(out, low, upstream.bfloat16()), gradients, strict=True):
        assert (ours.float() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("ends", [[0, 40, 40, 100], [0, 0, 0, 0], [64, 64, 64, 64]])
def test_grouped_mm_equals_the_loop_with_empty_experts(ends):
    x = torch.randn(ends[-1], 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, 32, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
    out, expected = grouped_mm(x, weight, ends), grouped_mm_reference(x, weight, ends)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.05)
    upstream = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (x, weight), upstream),
        torch.autograd.grad(expected, (x, weight), upstream, allow_unused=True),
        strict=True,
    ):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert torch.isfinite(ours).all()
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.2)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel", [1, 1023, 1_000_003])
def test_one_pass_adamw_equals_torch(grad_dtype, numel):
    from trainer.kernels.triton_adamw import adamw

    master = torch.randn(numel, device=DEVICE)
    reference = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([reference], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)
    moments = torch.zeros(2, numel, device=DEVICE)
    parameter = torch.full((numel,), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    scale = torch.tensor(0.37, device=DEVICE)
    for step in range(1, 5):
        grad = torch.randn(numel, device=DEVICE).to(grad_dtype)
        adamw(
            master, grad, *moments, parameter, scale,
            lr=1e-2, step=step, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
        )  # fmt: skip
        reference.grad = grad.float() * scale
        optimizer.step()
        torch.testing.assert_close(master, reference.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter, master.bfloat16())


@pytest.mark.parametrize("vocab", [50, 4096, 151_936])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cross_entropy_in_place_equals_the_reference(vocab, dtype):
    from trainer.kernels.cross_entropy import cross_entropy_
    from trainer.kernels.triton_cross_entropy import cross_entropy_ as ours

    logits = (torch.randn(37, vocab, device=DEVICE) * 5).to(dtype)
    logits[3, 7] = 300.0  # far from the others
    labels = torch.randint(0, vocab, (37,), device=DEVICE)
    labels[[0, 5]] = -100
    expected_grad, grad, untouched = logits.clone(), logits.clone(), logits.clone()
    expected = cross_entropy_(expected_grad, labels, True)
    torch.testing.assert_close(ours(grad, labels, True), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad, expected_grad, rtol=0.01, atol=1e-6)
    torch.testing.assert_close(ours(untouched, labels, False), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(untouched, logits)


@pytest.mark.parametrize("chunk", [100, 8192])
def test_head_and_loss_equal_all_logits_at_once(chunk):
    from trainer.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

    hidden = torch.randn(250, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(5000, 256, device=DEVICE) / 16).bfloat16().requires_grad_()
    labels = torch.randint(0, 5000, (250,), device=DEVICE)
    labels[:20] = -100
    loss = linear_cross_entropy(hidden, weight, labels, chunk)
    expected = linear_cross_entropy_reference(hidden.float(), weight.float(), labels)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=0)
    for ours, reference in zip(
        torch.autograd.grad(loss * 0.3, (hidden, weight)),
        torch.autograd.grad(expected * 0.3, (hidden, weight)),
        strict=True,
    ):
        assert (ours.float() - reference.float()).norm() / reference.float().norm() < 0.01
