"""The plain kernels against each other and against autograd."""

import pytest
import torch

from trainer.kernels.attention import (
    BLOCK,
    AttentionKernels,
    Mask,
    attention,
    attention_reference,
    choose_kernels,
    describe,
    document_blocks,
    document_mask,
    make_mask,
)
from trainer.kernels.swiglu import swiglu, swiglu_reference

ROWS = {
    "one": [(700, 0)],
    "borders at blocks": [(128, 0), (256, 1), (384, 2)],
    "many": [(5, 0), (250, 1), (1, 2), (100, 3), (200, 4), (57, 5)],
    "padding": [(130, 0), (3, 1), (400, -1)],
    "only padding": [(300, -1)],
}


def ids_of(*names):
    rows = [torch.cat([torch.full((length,), document) for length, document in ROWS[name]]) for name in names]
    longest = max(map(len, rows))
    return torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=-1) for row in rows])


@pytest.mark.parametrize("names", [[name] for name in ROWS] + [["many", "padding", "only padding"]])
def test_block_mask_says_the_same_as_the_boolean_mask(names):
    ids = ids_of(*names)
    B, S = ids.shape
    blocks, expected = document_blocks(ids), document_mask(ids)[:, 0]
    n = -(-S // BLOCK)
    seen = torch.zeros(B, n * BLOCK, n * BLOCK, dtype=torch.bool)
    i = torch.arange(S)
    exact = torch.stack([blocks.mask_mod(b, 0, i[:, None], i[None]) for b in range(B)])
    assert torch.equal(exact, expected)
    lists = {
        "partial": (blocks.kv_num_blocks, blocks.kv_indices),
        "full": (blocks.full_kv_num_blocks, blocks.full_kv_indices),
    }
    for kind, (counts, indices) in lists.items():
        for b in range(B):
            for q in range(n):
                for k in indices[b, 0, q, : counts[b, 0, q]].tolist():
                    rows, columns = slice(q * BLOCK, (q + 1) * BLOCK), slice(k * BLOCK, (k + 1) * BLOCK)
                    assert not seen[b, rows, columns].any()  # listed once
                    seen[b, rows, columns] = True
                    part = expected[b, rows, columns]
                    assert part.any()  # no block is visited for nothing
                    assert kind == "partial" or part.all()
    assert not (expected & ~seen[:, :S, :S]).any()  # nothing that is seen is left out


def test_flex_attention_equals_the_reference():
    ids = ids_of("many", "padding")
    q, k, v = (torch.randn(2, heads, ids.shape[1], 16) for heads in (4, 2, 2))
    out = attention(q, k, v, make_mask(AttentionKernels(packed="flex"), ids, None))
    torch.testing.assert_close(out, attention_reference(q, k, v, Mask("sdpa", document_mask(ids))))


def test_a_cpu_takes_torchs_kernels_and_says_so():
    kernels = choose_kernels(torch.device("cpu"), torch.float32, 32, compiled=True)
    assert kernels[:2] == ("sdpa", "sdpa")
    assert "scaled_dot_product_attention" in describe(kernels)[0] and "Hopper" in describe(kernels)[1]


@pytest.mark.parametrize("rows, width", [(33, 24), (0, 8)])
def test_swiglu_and_its_gradients_equal_autograd(rows, width):
    gate_up = torch.randn(rows, 2 * width, requires_grad=True)
    scores = torch.rand(rows, requires_grad=True)
    out, expected = swiglu(gate_up, scores), swiglu_reference(gate_up, scores)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (gate_up, scores), upstream),
        torch.autograd.grad(expected, (gate_up, scores), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)
    torch.library.opcheck(torch.ops.moe.swiglu.default, (gate_up, scores))
