"""model.weights: first logits equal Hugging Face's on every layout, and what does not fit is refused by name."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from trainer.build import build_model
from trainer.checkpoint.hugging_face import load_weights
from trainer.config import ConfigError, ModelConfig, ParallelismConfig, RunConfig, TrainConfig
from trainer.parallel.mesh import build_mesh

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
IDS = torch.arange(20)[None] % 64


def save(directory, *, moe=True, tied=False, shards=1):
    """A Hugging Face directory with random weights; returns its logits for IDS."""
    # Here, so that the ranks that this file starts need not import it.
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(3)
    options = dict(SHAPE, rope_theta=1e6, tie_word_embeddings=tied, attn_implementation="eager")
    theirs = Qwen3MoeForCausalLM(Qwen3MoeConfig(**options, **MOE)) if moe else Qwen3ForCausalLM(Qwen3Config(**options))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2)
    theirs.save_pretrained(directory, max_shard_size="30KB" if shards > 1 else "5GB")
    return theirs(input_ids=IDS).logits.detach()


def logits(model_config, world, ep):
    """This rank's logits after loading the weights."""
    config = dataclasses.replace(
        RunConfig(),
        model=model_config,
        parallelism=ParallelismConfig(nodes=1, gpus_per_node=world, dp_shard=world, ep=ep),
        train=TrainConfig(param_dtype="fp32"),
        ac=dataclasses.replace(RunConfig().ac, mode="none"),
        compile=dataclasses.replace(RunConfig().compile, mode="none"),
    )
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    model, _ = build_model(config, mesh)
    try:
        load_weights(model, config.model, mesh)
    except ConfigError as error:
        return str(error)
    with torch.no_grad():
        return model(IDS, torch.arange(20)[None])[0]


def model(directory, moe=True, tied=False):
    return ModelConfig(**SHAPE, **(MOE if moe else {}), weights=str(directory), tie_word_embeddings=tied)


@pytest.mark.parametrize("world, ep, shards", [(1, 1, 1), (2, 2, 2), (4, 2, 2)])
def test_first_logits_equal_hugging_face(ranks, tmp_path, world, ep, shards):
    expected = save(tmp_path / "hf", shards=shards)
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (shards > 1)
    for ours in ranks(world, logits, model(tmp_path / "hf"), world, ep):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_dense_tied_head_loads_and_stays_tied(ranks, tmp_path):
    expected = save(tmp_path, moe=False, tied=True)
    (ours,) = ranks(1, logits, model(tmp_path, moe=False, tied=True), 1, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def _edit(directory, change):
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


MISSING = "model.layers.1.mlp.experts.3.down_proj.weight"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop(MISSING), MISSING),
        (lambda t: t.pop("lm_head.weight"), "lm_head.weight"),
        (lambda t: t.update({"model.layers.7.x": torch.zeros(1)}), "model.layers.7.x"),
        (lambda t: t.update({MISSING: torch.zeros(3, 3)}), r"shape (3, 3)"),
        (lambda t: t.update({MISSING: torch.zeros(32, 24, dtype=torch.int8)}), f"{MISSING} is I8, quantised"),
        (lambda t: t.update({MISSING: torch.zeros(32, 24).to(torch.float8_e4m3fn)}), f"{MISSING} is F8_E4M3"),
    ],
)
def test_missing_extra_and_misshapen_tensors_are_refused_by_name(ranks, tmp_path, change, message):
    save(tmp_path)
    _edit(tmp_path, change)
    (answer,) = ranks(1, logits, model(tmp_path), 1, 1)
    assert isinstance(answer, str) and message in answer


def test_a_tied_model_with_another_stored_head_is_refused(ranks, tmp_path):
    save(tmp_path, moe=False, tied=True)
    _edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.ones(64, 32)}))
    (answer,) = ranks(1, logits, model(tmp_path, moe=False, tied=True), 1, 1)
    assert isinstance(answer, str) and "tie_word_embeddings" in answer


def test_a_directory_without_weights_is_refused(ranks, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({}))
    (answer,) = ranks(1, logits, model(tmp_path), 1, 1)
    assert "model.safetensors" in answer


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floating_point_dtypes_are_converted(ranks, tmp_path, dtype):
    save(tmp_path)
    _edit(tmp_path, lambda t: t.update({name: tensor.to(dtype) for name, tensor in t.items()}))
    (expected,) = ranks(1, logits, model(tmp_path), 1, 1)
    _edit(tmp_path, lambda t: t.update({name: tensor.float() for name, tensor in t.items()}))
    (ours,) = ranks(1, logits, model(tmp_path), 1, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def _cut(path):
    path.write_bytes(path.read_bytes()[:200])


SECOND = "model-00002-of-"
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize(
    "name, damage",
    [
        (SECOND, lambda path: path.unlink()),
        (SECOND, _cut),
        (SECOND, lambda path: save_file({"x": torch.zeros(1)}, path)),  # of another model
        (INDEX, _cut),
        (INDEX, lambda path: path.write_text('{"metadata": {}}')),
    ],
)
def test_a_broken_file_is_named(ranks, tmp_path, name, damage):
    save(tmp_path, shards=2)
    (path,) = tmp_path.glob(f"{name}*")
    damage(path)
    (answer,) = ranks(1, logits, model(tmp_path), 1, 1)
    assert isinstance(answer, str) and str(path) in answer
