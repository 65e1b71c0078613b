"""On a GPU: every kernel against its plain reference."""

import pytest
import torch

from trainer.data.batch import starts_of
from trainer.kernels.attention import AttentionKernels, Mask, attention, attention_reference, document_mask, make_mask
from trainer.kernels.flash_attention_4 import why_no_flash_attention_4
from trainer.kernels.grouped_mm import grouped_mm, grouped_mm_reference

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEVICE = torch.device("cuda", 0)


FLASH4 = why_no_flash_attention_4(DEVICE, torch.bfloat16, 64) if torch.cuda.is_available() else "no GPU"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("heads_inside", [False, True])  # the layout in memory: q and k leave RoPE with heads outside
@pytest.mark.parametrize(
    "kernel", ["sdpa", "flex", pytest.param("flash4", marks=pytest.mark.skipif(FLASH4 is not None, reason=str(FLASH4)))]
)
def test_attention_equals_the_reference(kernel, heads_inside, compiled, packed):
    if kernel == "flex" and not (packed and compiled):
        pytest.skip("flex_attention is for packed documents in compiled blocks")
    S = 700
    q, k, v = (torch.randn(2, heads, S, 64, device=DEVICE, requires_grad=True) for heads in (8, 2, 2))
    ids = torch.tensor([[0] * 100 + [1] * 300 + [2] * 1 + [3] * 250 + [-1] * 49, [0] * S], device=DEVICE)
    expected = attention_reference(q, k, v, Mask("sdpa", document_mask(ids) if packed else None))
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (q, k, v), upstream)
    low = [t.detach().bfloat16() for t in (q, k, v)]
    if heads_inside:
        low = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in low]
    low = [t.requires_grad_() for t in low]
    mask = make_mask(AttentionKernels(kernel, kernel), ids if packed else None, starts_of(ids))
    out = (torch.compile(attention, fullgraph=True) if compiled else attention)(*low, mask)
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    for ours, theirs in zip(torch.autograd.grad(out, low, upstream.bfloat16()), gradients, strict=True):
        assert (ours.float() - theirs).norm() / theirs.norm() < 1e-2


@pytest.mark.parametrize("ends", [[0, 40, 40, 100], [0, 0, 0, 0], [64, 64, 64, 64], [1, 700, 1301, 3003]])
@pytest.mark.parametrize("width, out_width", [(64, 32), (2048, 3072), (768, 2048)])
def test_grouped_mm_equals_the_loop_with_empty_experts(ends, width, out_width):
    x = torch.randn(ends[-1], width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(4, out_width, width, device=DEVICE, dtype=torch.bfloat16)
    weight = (weight / width**0.5).requires_grad_()
    ends = torch.tensor(ends, device=DEVICE, dtype=torch.int32)
    out, expected = grouped_mm(x, weight, ends), grouped_mm_reference(x, weight, ends)
    torch.testing.assert_close(out, expected, rtol=0.02, atol=0.05)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (x, weight), upstream)
    reference = torch.autograd.grad(expected, (x, weight), upstream, allow_unused=True)
    for ours, theirs in zip(gradients, reference, strict=True):
        theirs = torch.zeros_like(ours) if theirs is None else theirs
        assert torch.isfinite(ours).all()
        assert (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()
    empty = torch.diff(ends, prepend=ends.new_zeros(1)) == 0
    assert not gradients[1][empty].any()


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens, k, width", [(37, 8, 4096), (37, 8, 100), (5, 3, 1), (9, 1, 2050), (0, 8, 64)])
def test_rows_go_to_their_experts_and_back_as_in_the_reference(tokens, k, width, dtype):
    from trainer.kernels.permute import combine_rows, gather_rows

    inverse = torch.randperm(tokens * k)
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    rows = gather_rows(x, inverse, k)
    out = combine_rows(rows * 3, inverse, k)
    upstream = torch.randn_like(out)
    (expected_grad,) = torch.autograd.grad(out, x, upstream)
    ours = x.detach().to(DEVICE).requires_grad_()
    rows_gpu = gather_rows(ours, inverse.to(DEVICE), k)
    assert torch.equal(rows_gpu.cpu(), rows)
    out_gpu = combine_rows(rows_gpu * 3, inverse.to(DEVICE), k)
    (grad,) = torch.autograd.grad(out_gpu, ours, upstream.to(DEVICE))
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.1}
    torch.testing.assert_close(out_gpu.cpu(), out, **tolerance)
    torch.testing.assert_close(grad.cpu(), expected_grad, **tolerance)


@pytest.mark.parametrize("dtypes", [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")])
@pytest.mark.parametrize("numel", [0, 1, 2049, 1_000_003])
def test_a_sum_across_dtypes_equals_torch(dtypes, numel):
    from trainer.kernels.accumulate import add

    total, addend = (torch.randn(numel, device=DEVICE).to(getattr(torch, dtype)) for dtype in dtypes)
    expected = total.float() + addend.float()
    out = add(total, addend, torch.float32)
    assert torch.equal(out, expected)
    assert (out is total) == (total.dtype == torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_multiple_across_dtypes_equals_torch(dtype):
    from trainer.kernels.accumulate import multiply

    tensor, factor = torch.randn(1_000_003, device=DEVICE).to(dtype), torch.tensor(0.3, device=DEVICE)
    assert torch.equal(multiply(tensor, factor, torch.bfloat16), (tensor.float() * factor).bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows, width", [(37, 1536), (5, 24), (3, 2050), (0, 64)])
def test_swiglu_equals_the_reference(rows, width, dtype):
    from trainer.kernels.swiglu import swiglu, swiglu_reference

    gate_up = torch.randn(rows, 2 * width, device=DEVICE).to(dtype).requires_grad_()
    scores = torch.rand(rows, device=DEVICE, requires_grad=True)
    out, expected = swiglu(gate_up, scores), swiglu_reference(gate_up, scores)
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 1e-3}
    torch.testing.assert_close(out, expected, **tolerance)
    upstream = torch.randn_like(out)
    gradients = torch.autograd.grad(out, (gate_up, scores), upstream)
    reference = torch.autograd.grad(expected, (gate_up, scores), upstream)
    torch.testing.assert_close(gradients[0], reference[0], **tolerance)
    torch.testing.assert_close(gradients[1], reference[1], rtol=1e-4, atol=1e-3)
