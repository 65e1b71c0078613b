"""The model equals Hugging Face's Qwen3 and Qwen3-MoE: logits, loss, auxiliary loss and every gradient (fp32)."""

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from trainer.config import ModelConfig
from trainer.kernels.cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from trainer.models.moe import SparseMoe, auxiliary_loss, balanced_ids, moe_reference
from trainer.models.qwen3 import Qwen3

MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "rms_norm_eps": 1e-6,
}  # fmt: skip
CASES = {
    "dense": {},
    "dense_tied": {"tie_word_embeddings": True},
    "moe_normed": dict(MOE, norm_topk_prob=True),
    "moe_raw": dict(MOE, norm_topk_prob=False),
    "moe_some_layers_dense": dict(MOE, norm_topk_prob=True, decoder_sparse_step=2),
    "moe_first_layer_dense": dict(MOE, norm_topk_prob=True, mlp_only_layers=[0]),
}
COEFFICIENT = 0.05


def pair(case):
    """Our model and Hugging Face's with the same random weights."""
    torch.manual_seed(0)
    options = CASES[case]
    rope = {"rope_theta": 10_000.0}
    if "num_experts" in options:
        theirs = Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **SHAPE, **options, **rope, output_router_logits=True, router_aux_loss_coef=COEFFICIENT,
                attn_implementation="eager",
            )
        )  # fmt: skip
    else:
        theirs = Qwen3ForCausalLM(Qwen3Config(**SHAPE, **options, **rope, attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
    ours = Qwen3(ModelConfig(**SHAPE, **options, **rope))
    ours.load_state_dict({name.removeprefix("model."): value for name, value in theirs.state_dict().items()})
    return ours, theirs


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_hugging_face(case):
    ours, theirs = pair(case)
    input_ids = torch.randint(0, 256, (2, 48))
    position_ids = torch.arange(48).expand(2, -1)
    labels = torch.cat((input_ids[:, 1:], torch.full((2, 1), -100)), dim=1)

    expected = theirs(input_ids=input_ids, labels=input_ids)
    torch.testing.assert_close(ours(input_ids, position_ids)[0], expected.logits, rtol=1e-5, atol=1e-5)

    loss, stats = ours(input_ids, position_ids, None, labels)
    loss = loss / (labels >= 0).sum()
    if stats:
        auxiliary = auxiliary_loss(stats, torch.tensor(input_ids.numel()))
        torch.testing.assert_close(auxiliary, expected.aux_loss, rtol=1e-5, atol=1e-6)
        loss = loss + COEFFICIENT * auxiliary
    torch.testing.assert_close(loss, expected.loss, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.loss.backward()
    gradients = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        ours_grad = gradients[name.removeprefix("model.")].grad
        torch.testing.assert_close(ours_grad, parameter.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("scores_tied", [False, True])
def test_sparse_layer_equals_the_loop_over_experts(scores_tied):
    torch.manual_seed(1)
    moe = SparseMoe(ModelConfig(**SHAPE, **MOE), ep=1, ep_group=None)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.1)
        if scores_tied:
            moe.gate.weight.zero_()  # every token takes the same two experts, six get none
    x = torch.randn(40, 64, requires_grad=True)
    y, stats = moe(x, None)
    expected = moe_reference(moe, x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert stats.tokens_per_expert.sum() == 40 * 2

    upstream = torch.randn_like(y)
    inputs = [x, *moe.parameters()]
    for ours, reference in zip(
        torch.autograd.grad(y, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, reference, rtol=1e-4, atol=1e-5)
        assert torch.isfinite(ours).all()
    if scores_tied:
        unused = stats.tokens_per_expert == 0
        (grad,) = torch.autograd.grad(moe(x, None)[0], [moe.experts.gate_up_proj], upstream)
        assert unused.sum() == 6 and grad[unused].abs().max() == 0


PACKED = torch.tensor([[0] * 10 + [1] * 14 + [-1] * 8])
POSITIONS = torch.cat((torch.arange(10), torch.arange(14), torch.zeros(8, dtype=torch.long)))[None]


@pytest.mark.parametrize("case", ["dense", "moe_normed"])
def test_packed_documents_do_not_see_each_other(case):
    ours, _ = pair(case)
    input_ids = torch.randint(0, 256, (1, 32))
    embedded = []
    ours.embed_tokens.weight.requires_grad_(False)
    ours.embed_tokens.register_forward_hook(lambda *call: embedded.append(call[-1].requires_grad_()))
    logits = ours(input_ids, POSITIONS, PACKED)[0]
    (grad,) = torch.autograd.grad(logits[0, 10:24].pow(2).sum(), embedded)
    assert grad[0, :10].abs().max() == 0 and grad[0, 24:].abs().max() == 0
    assert (grad[0, 10:24].abs().sum(-1) > 0).all()

    alone = ours(input_ids[:, 10:24], POSITIONS[:, 10:24])[0]
    torch.testing.assert_close(logits[:, 10:24], alone, rtol=1e-5, atol=1e-5)


def test_a_changed_token_leaves_the_other_document_bitwise_alone():
    ours, _ = pair("dense")
    input_ids = torch.randint(0, 256, (1, 32))
    changed = input_ids.clone()
    changed[0, 3] = (changed[0, 3] + 1) % 256
    before, after = (ours(ids, POSITIONS, PACKED)[0] for ids in (input_ids, changed))
    assert (before[0, 3:10] != after[0, 3:10]).any()
    assert torch.equal(before[0, 10:24], after[0, 10:24])


@pytest.mark.parametrize("experts, top_k", [(8, 2), (128, 8), (7, 3), (6, 4), (5, 5)])
@pytest.mark.parametrize("tokens", [1, 13, 100])
def test_balanced_routing_is_balanced_and_distinct(experts, top_k, tokens):
    counts = torch.zeros(experts, dtype=torch.long)
    for rank in range(3):  # the deal goes on from rank to rank
        ids = balanced_ids(tokens, experts, top_k, rank * tokens * top_k % experts, torch.device("cpu"))
        assert ids.min() >= 0 and ids.max() < experts
        assert all(len(set(row)) == top_k for row in ids.tolist())
        counts += torch.bincount(ids.flatten(), minlength=experts)
    assert counts.max() - counts.min() <= 1


def test_balanced_routing_spreads_a_token_over_expert_parallel_ranks():
    ids = balanced_ids(64, 128, 8, 0, torch.device("cpu"))
    assert all(len(set(row)) == 8 for row in (ids // 16).tolist())


@pytest.mark.parametrize("chunk", [5, 64])
def test_chunked_loss_equals_all_logits_at_once_and_scales_with_the_upstream_gradient(chunk):
    torch.manual_seed(2)
    hidden = torch.randn(23, 16, requires_grad=True)
    weight = torch.randn(50, 16, requires_grad=True)
    labels = torch.randint(0, 50, (23,))
    labels[[0, 7, 22]] = -100
    loss, expected = (
        linear_cross_entropy(hidden, weight, labels, chunk),
        linear_cross_entropy_reference(hidden, weight, labels),
    )
    torch.testing.assert_close(loss, expected)
    for ours, reference in zip(
        torch.autograd.grad(loss * 0.3, (hidden, weight)),
        torch.autograd.grad(expected * 0.3, (hidden, weight)),
        strict=True,
    ):
        torch.testing.assert_close(ours, reference)


def test_chunked_loss_of_nothing_supervised_is_zero_and_has_zero_gradients():
    hidden, weight = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.full((6,), -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss == 0 and all(g.abs().max() == 0 for g in grads)
