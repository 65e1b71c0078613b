"""Compiled, checkpointed blocks over packed documents: every form of mask gives the same gradients, and one graph."""

import pytest
import torch

import trainer.kernels.flash_attention_4 as flash4
from trainer.compile import apply_compile
from trainer.config import ModelConfig
from trainer.data.batch import Batch
from trainer.kernels.attention import AttentionKernels, document_mask
from trainer.memory.ac import apply_ac
from trainer.models.qwen3 import Qwen3

S = 200
CONFIG = ModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    intermediate_size=96,
)  # fmt: skip


def probabilities(q_THd, k_TGd, starts):
    ids = torch.zeros(1, len(q_THd), dtype=torch.long)
    ids[0, starts[1:-1].long()] = 1
    k = k_TGd.repeat_interleave(q_THd.shape[1] // k_TGd.shape[1], dim=1)
    scores = torch.einsum("ihd,jhd->hij", q_THd, k) * q_THd.shape[-1] ** -0.5
    return scores.masked_fill(~document_mask(ids.cumsum(1))[0], float("-inf")).softmax(-1), k


def forward(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, return_lse):
    assert causal and return_lse and cu_seqlens_q is cu_seqlens_k
    p, _ = probabilities(q, k, cu_seqlens_q)
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    return torch.einsum("hij,jhd->ihd", p, v).contiguous(), q.new_zeros(q.shape[1], len(q)), None, None, None


def backward(q, k, v, out, grad, lse, causal, cu_seqlens_q, cu_seqlens_k, dq, dk, dv):
    assert causal and lse.shape == (q.shape[1], len(q))
    p, k_all = probabilities(q, k, cu_seqlens_q)
    v_all = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    ds = p * (torch.einsum("ihd,jhd->hij", grad, v_all) - (grad * out).sum(-1).T[..., None]) * q.shape[-1] ** -0.5
    for gradient, per_head in ((dk, torch.einsum("hij,ihd->jhd", ds, q)), (dv, torch.einsum("hij,ihd->jhd", p, grad))):
        gradient.copy_(per_head.unflatten(1, (k.shape[1], -1)).sum(2))
    dq.copy_(torch.einsum("hij,jhd->ihd", ds, k_all))


def batches():
    generator = torch.Generator().manual_seed(0)
    for cuts in ([100], [50, 130], [3, 70, 140], [3, 70, 71, 140]):
        ids = (torch.arange(S)[:, None] >= torch.tensor(cuts)).sum(1)
        ids[-10:] = -1
        tokens = torch.randint(0, 64, (2, S), generator=generator)
        yield Batch(tokens, tokens.roll(-1, 1), torch.arange(S).expand(2, -1), torch.stack((ids, ids.clamp_max(1))))


def losses_and_gradients(kernels, ac="none", compiled=False):
    torch.manual_seed(0)
    model = Qwen3(CONFIG)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    model.attention_kernels = kernels
    apply_ac(model, ac)
    if compiled:
        apply_compile(model, "fullgraph")
    result = []
    for batch in batches():
        model.zero_grad()
        loss, _ = model(*batch.inputs)
        loss.backward()
        result.append((loss.detach(), *(parameter.grad for parameter in model.parameters())))
    return result


@pytest.mark.parametrize("ac", ["none", "selective", "full"])
@pytest.mark.parametrize("kernel", ["flex", "flash4"])
def test_every_kernel_gets_the_same_documents_and_compiles_once(monkeypatch, kernel, ac):
    """On a CPU: flash-attn-4's launchers are stood in for, and the compiler stops before code generation."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, fullgraph: compile(f, fullgraph=fullgraph, backend="aot_eager"))
    monkeypatch.setattr(flash4, "_launchers", lambda: (forward, backward))
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *tensors: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        ours = losses_and_gradients(AttentionKernels("sdpa", kernel), ac, compiled=True)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(ours, losses_and_gradients(AttentionKernels()), rtol=1e-4, atol=1e-4)
