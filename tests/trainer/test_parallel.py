"""Layouts change nothing: every gradient, the norm and the weights after 5 steps equal one process's (fp32)."""

import dataclasses
from fnmatch import fnmatch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

import trainer.parallel.shard as shard_module
from tests.trainer.runs import MODEL, five_steps, make_batch, make_config, whole
from trainer.build import build
from trainer.config import ConfigError, from_dict
from trainer.models.moe import Experts, Router
from trainer.parallel import local
from trainer.parallel.mesh import build_mesh
from trainer.parallel.shard import local_rows
from trainer.step import NonFiniteError, evaluate, forward_backward, refuse_nonfinite


@pytest.fixture(scope="module")
def reference():
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield five_steps(make_config(1, 1))
    finally:
        dist.destroy_process_group()


LAYOUTS = {
    "fsdp2": (2, 1, 1),
    "fsdp2_ep2": (2, 2, 1),
    "fsdp4_ep2": (4, 2, 1),
    "fsdp4_ep4": (4, 4, 1),
    "hsdp2x2_ep2": (4, 2, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_one_process(ranks, reference, layout):
    results = ranks(LAYOUTS[layout][0], five_steps, make_config(*LAYOUTS[layout]))
    assert reference["margin"] > 1e-5  # far over the rounding of fp32 probabilities
    for result in results:
        assert result["losses"] == pytest.approx(reference["losses"], rel=1e-5)
        assert result["norms"] == pytest.approx(reference["norms"], rel=1e-5)
        assert result["norms"] == results[0]["norms"]
        assert min(result["norms"]) > 0.5  # clipping was active
        assert torch.equal(result["ids"], reference["ids"])
        assert result["counts"] == reference["counts"]
        for name, gradient in reference["gradients"].items():
            torch.testing.assert_close(
                result["gradients"][name], gradient, rtol=1e-5, atol=1e-7, msg=lambda m, n=name: f"gradient {n}: {m}"
            )
            torch.testing.assert_close(
                result["weights"][name], reference["weights"][name], rtol=1e-5, atol=1e-5,
                msg=lambda m, n=name: f"weight {n}: {m}",
            )  # fmt: skip


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_changes_nothing_bitwise(ranks, mode):
    plain, recomputed = (ranks(2, five_steps, make_config(2, 2, ac=m))[0] for m in ("none", mode))
    assert plain["losses"] == recomputed["losses"] and plain["norms"] == recomputed["norms"]
    assert plain["counts"] == recomputed["counts"]
    assert all(torch.equal(plain["weights"][n], recomputed["weights"][n]) for n in plain["weights"])


def test_tokens_per_expert_count_every_choice_once(reference):
    real_tokens = 4 * 20  # four micro-batches of 20 real tokens
    assert [sum(layer) for layer in reference["counts"]] == [real_tokens * 2] * 2


def _forced_routing(config_dict, tied):
    """All router scores tied; or every token made to take experts 0 and 1, which are on the first rank."""
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    model, optimizer, _ = build(config, mesh)
    for module in model.modules():
        if isinstance(module, Router):
            weight, (start, stop) = local(module.weight), local_rows(module.weight)
            module.register_forward_pre_hook(lambda router, inputs: (inputs[0].abs(),))
            first_two = torch.arange(start, stop)[:, None] < 2
            weight.copy_(torch.zeros(()) if tied else torch.where(first_two, 1.0, -1.0).expand_as(weight))
    totals = forward_backward(model, [make_batch(0, m) for m in (1, 2)], config, mesh).wait()
    experts = {name: g.clone() for name, g in optimizer.gradients().items() if ".experts." in name}
    return totals.tokens_per_expert, experts, totals.loss


def test_a_rank_without_tokens_goes_on_and_its_experts_get_exactly_zero(ranks):
    (counts, first, _), (_, second, _) = ranks(2, _forced_routing, make_config(2, 2, ac="full"), False)
    assert all(sum(layer[2:]) == 0 for layer in counts)
    assert all(g[:2].abs().max() > 0 and g[2:].abs().max() == 0 for g in first.values())
    assert all(g.abs().max() == 0 for g in second.values())


def test_tied_router_scores_recompute_to_the_same_experts(ranks):
    plain, recomputed = (ranks(2, _forced_routing, make_config(2, 2, ac=mode), True) for mode in ("none", "full"))
    for (counts, gradients, loss), (counts_again, gradients_again, loss_again) in zip(plain, recomputed, strict=True):
        assert counts == counts_again and loss == loss_again
        assert all(torch.equal(gradients[name], gradients_again[name]) for name in gradients)


def _first_step(config_dict, micro_batches):
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    model, optimizer, _ = build(config, mesh)
    sizes = [p._local_tensor.shape[0] for m in model.modules() if isinstance(m, Experts) for p in m.parameters()
             if isinstance(p, DTensor)]  # fmt: skip
    mine = range(mesh.rank, micro_batches, mesh.world_size)
    totals = forward_backward(model, [make_batch(0, m) for m in mine], config, mesh).wait()
    norm = optimizer.grad_norm()
    optimizer.clip(norm)
    optimizer.step(0.01)
    return sizes, totals.loss, norm.item()


@pytest.mark.parametrize(
    "world, ep, experts, top_k, with_rows", [(4, 2, 2, 1, 2), (32, 8, 8, 2, 8)], ids=["ep2_efsdp2", "ep8_efsdp4"]
)
def test_more_ranks_than_experts_to_shard(ranks, world, ep, experts, top_k, with_rows):
    """One expert per expert-parallel rank, sharded over several ranks: most of them hold no expert rows."""
    model = dataclasses.replace(MODEL, num_hidden_layers=1, num_experts=experts, num_experts_per_tok=top_k)
    # 32 processes on few cores take a while to meet.
    results = ranks(world, _first_step, make_config(world, ep, model=model), world, timeout_s=300)
    assert sorted(sum(sizes) for sizes, _, _ in results) == [0] * (world - with_rows) + [2] * with_rows
    ((_, expected_loss, expected_norm),) = ranks(1, _first_step, make_config(1, 1, model=model), world)
    for _, loss, norm in results:
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-5)


VARIANTS = {
    "tied_head": {"tie_word_embeddings": True},
    "dense_and_sparse_layers": {"num_hidden_layers": 3, "decoder_sparse_step": 2},
    "frozen_tied_head": {"tie_word_embeddings": True, "freeze": ["embed_tokens.weight"]},
    "frozen_experts": {"freeze": ["*.experts.*"]},
    "frozen_first_layer": {"freeze": ["embed_tokens.weight", "layers.0.*"]},
    "only_norms_trained": {"freeze": ["*embed*", "*proj*", "*gate*", "lm_head*"]},
}


def _courses(config_dict, variants):
    """Losses (held-out ones too), norms and which parameters changed, of three steps of every variant."""
    answers = []
    for variant in variants:
        config = from_dict({**config_dict, "model": {**config_dict["model"], **variant}})
        mesh = build_mesh(config.parallelism, torch.device("cpu"))
        model, optimizer, _ = build(config, mesh)
        before = {name: whole(name, p, local(p), mesh) for name, p in model.named_parameters()}
        numbers = []
        for step in range(3):
            batches = [make_batch(step, m) for m in range(mesh.rank, 4, mesh.world_size)]
            totals = forward_backward(model, batches, config, mesh).wait()
            norm = optimizer.grad_norm()
            optimizer.clip(norm)
            optimizer.step(0.01)
            optimizer.zero_grad()
            numbers += [totals.loss, norm.item(), evaluate(model, batches, mesh)]
        after = {name: whole(name, p, local(p), mesh) for name, p in model.named_parameters()}
        answers.append((numbers, {name for name in after if not torch.equal(before[name], after[name])}))
    return answers


def test_tied_mixed_and_partly_frozen_models_equal_one_process(ranks):
    """On 2 x 2 ranks with ep 2 and recomputation; evaluation between the steps changes nothing."""
    (expected,) = ranks(1, _courses, make_config(1, 1), list(VARIANTS.values()))
    for result in ranks(4, _courses, make_config(4, 2, 2, ac="full"), list(VARIANTS.values())):
        for name, (numbers, changed), (reference, reference_changed) in zip(VARIANTS, result, expected, strict=True):
            assert numbers == pytest.approx(reference, rel=1e-5), name
            assert changed == reference_changed, name
    for (name, variant), (_, changed) in zip(VARIANTS.items(), expected, strict=True):
        frozen = [n for n in changed if any(fnmatch(n, pattern) for pattern in variant.get("freeze", []))]
        assert changed and not frozen, name


def _without_a_mesh_per_parameter(config_dict):
    shard_module.ShardPlacementResult = None  # as in torch before 2.13
    try:
        return five_steps(config_dict)["losses"]
    except ConfigError as error:
        return str(error)


def test_older_torch_runs_whole_experts_and_refuses_to_shard_them_by_name(ranks, reference):
    for losses in ranks(2, _without_a_mesh_per_parameter, make_config(2, 2)):
        assert losses == pytest.approx(reference["losses"], rel=1e-5)
    for message in ranks(4, _without_a_mesh_per_parameter, make_config(4, 2)):
        assert "parallelism.ep=2" in message and "torch >= 2.13 or parallelism.ep=4" in message


def _nonfinite(config_dict):
    config = from_dict(config_dict)
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    model, optimizer, _ = build(config, mesh)
    totals = forward_backward(model, [make_batch(0, mesh.rank)], config, mesh).wait()
    if mesh.rank == 1:
        optimizer.gradients()["layers.1.self_attn.q_proj.weight"][0, 0] = float("inf")
    try:
        refuse_nonfinite(7, totals, optimizer.grad_norm().item(), optimizer, mesh)
    except NonFiniteError as error:
        return str(error)


def test_one_infinite_gradient_stops_all_ranks_and_is_named(ranks):
    messages = ranks(2, _nonfinite, make_config(2, 2))
    assert len(set(messages)) == 1
    assert "step 7" in messages[0] and "rank 1: layers.1.self_attn.q_proj.weight" in messages[0]
    assert "rank 0:" not in messages[0]


def _wrong_world(config_dict):
    try:
        build_mesh(from_dict(config_dict).parallelism, torch.device("cpu"))
    except ConfigError as error:
        return str(error)


def test_a_job_of_another_size_is_refused(ranks):
    (message, _) = ranks(2, _wrong_world, make_config(4, 2))
    assert "2 ranks" in message and "asks for 4" in message
