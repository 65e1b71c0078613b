"""What the groups mean: every file composes, all options of a group have the same keys, defaults are pinned."""

from pathlib import Path

import pytest
import yaml

from launcher.overrides import options
from launcher.schema import keys, sections
from trainer.config import ClusterConfig, to_dict
from trainer.flops import parameter_counts

CONF = Path(__file__).resolve().parents[2] / "conf"
GROUPS = {
    group: [name for name in names if not name.startswith("my_")]  # uncommitted, see .gitignore
    for group, names in options([CONF]).items()
}
OPTIONS = [(group, option) for group in sections() for option in GROUPS[group]]


def test_every_section_is_a_group_and_every_group_but_experiment_is_a_section():
    assert set(GROUPS) == {*sections(), "experiment"}


@pytest.mark.parametrize("number", range(max(len(options) for options in GROUPS.values())))
def test_every_option_composes_and_is_chosen(compose, number):
    chosen = {group: GROUPS[group][number % len(GROUPS[group])] for group in sections()}
    config = compose(*(f"{group}={option}" for group, option in chosen.items()))
    for group, option in chosen.items():
        section = getattr(config, group)
        if not base_of(group, option):
            assert option in (getattr(section, "name", ""), getattr(section, "mode", ""), "default")


def base_of(group: str, option: str) -> list[str]:
    """The options of the same group that a file builds on, as a site's cluster does on slurm."""
    content = yaml.safe_load((CONF / group / f"{option}.yaml").read_text())
    return [entry for entry in content.get("defaults", []) if isinstance(entry, str) and entry != "_self_"]


@pytest.mark.parametrize("group, option", OPTIONS)
def test_all_options_of_a_group_have_all_of_its_keys(group, option):
    text = (CONF / group / f"{option}.yaml").read_text()
    assert text.startswith("# ")
    content = yaml.safe_load(text)
    base = base_of(group, option)
    content.pop("defaults", None)
    named, all_keys = {f"{group}.{name}" for name in content}, {p for p in keys() if p.startswith(f"{group}.")}
    assert named <= all_keys if base else named == all_keys


def test_no_option_has_a_name_that_yaml_reads_as_a_boolean():
    for group, names in GROUPS.items():
        for name in [group, *names]:
            assert isinstance(yaml.safe_load(name), str), name


def test_no_file_instantiates_anything():
    assert not [path for path in CONF.rglob("*.yaml") if "_target_" in path.read_text()]


def test_the_bare_first_run_needs_no_compiler_and_offloads_nothing(resolved):
    config = resolved()
    assert config.model.name == "tiny"
    assert (config.offload.mode, config.ac.mode, config.compile.mode) == ("none", "none", "none")
    assert (config.cluster.name, config.cluster.device, config.train.param_dtype) == ("local", "cpu", "fp32")
    assert (config.parallelism.world_size, config.parallelism.ep) == (2, 2)
    assert (config.model.num_experts, config.model.num_experts_per_tok) == (8, 2)
    assert (config.data.name, config.model.tokenizer) == ("sample", "byte")
    assert 1e6 < parameter_counts(config.model).total < 5e6


@pytest.mark.parametrize("model", [name for name in GROUPS["model"] if name != "tiny"])
def test_every_other_model_starts_memory_first(resolved, model):
    config = resolved(f"model={model}")
    assert (config.offload.mode, config.ac.mode, config.compile.mode) == ("optimizer", "full", "block")
    assert (config.optimizer.name, config.model.router_dtype, config.optimizer.lr) == ("adamw", "fp32", 1e-5)
    assert (config.train.param_dtype, config.train.grad_dtype, config.train.steps) == ("bf16", "fp32", 20)


def test_explicit_choices_win_over_what_the_first_run_changes(compose):
    chosen = ["offload=full", "ac=selective", "compile=block", "optimizer.lr=0.5", "train.steps=7"]
    config = compose(*chosen)
    assert (config.offload.mode, config.ac.mode, config.compile.mode) == ("full", "selective", "block")
    assert (config.optimizer.lr, config.train.steps) == (0.5, 7)
    assert compose("offload=optimizer").offload.mode == "optimizer"
    assert compose("offload=optimizer").ac.mode == "none"


def test_the_headline_command_means_four_nodes_of_eight(resolved):
    config = resolved("model=qwen3_235b", "offload=none", "compile=fullgraph")
    layout = config.parallelism
    assert (layout.nodes, layout.gpus_per_node, layout.dp_shard, layout.ep) == (4, 8, 32, 8)
    assert (config.data.seq_len, config.data.global_batch_size, config.data.name) == (16384, 32, "random")
    assert resolved("model=qwen3_235b", "data=chat").data.name == "chat"
    assert (config.offload.mode, config.ac.mode, config.compile.mode) == ("none", "full", "fullgraph")


def test_the_reference_benchmark_is_pinned_field_by_field(resolved):
    config = to_dict(resolved("+experiment=qwen3_235b_max_throughput"))
    del config["launch"], config["logging"]
    assert config == {
        "model": {
            "name": "qwen3_235b",
            "hidden_size": 4096,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 12288,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.0,
            "vocab_size": 151936,
            "max_position_embeddings": 40960,
            "rope_theta": 1e6,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "tokenizer": "qwen",
            "weights": "",
            "routing": "balanced",
            "router_dtype": "bf16",
            "freeze": [],
            "recommended_nodes": 4,
            "recommended_gpus_per_node": 8,
            "recommended_ep": 8,
            "recommended_seq_len": 16384,
        },
        "parallelism": {
            "name": "fsdp_ep",
            "nodes": 4,
            "gpus_per_node": 8,
            "dp_replicate": 1,
            "dp_shard": 32,
            "ep": 8,
        },
        "offload": {"mode": "none", "prefetch_gib": 2.0},
        "ac": {"mode": "full"},
        "compile": {"mode": "fullgraph"},
        "optimizer": {
            "name": "adamw",
            "lr": 1e-5,
            "weight_decay": 0.1,
            "beta1": 0.9,
            "beta2": 0.95,
            "eps": 1e-8,
            "momentum": 0.95,
            "clip_norm": 1.0,
        },
        "schedule": {"name": "constant", "warmup_steps": 0, "decay_steps": 0, "min_lr": 0.0},
        "data": {
            "name": "random",
            "path": "",
            "split": "train",
            "seq_len": 16384,
            "micro_batch_size": 1,
            "global_batch_size": 32,
            "long_documents": "split",
            "document_len": 0,
            "validation_fraction": 0.0,
            "eval_every_steps": 0,
            "shuffle": True,
        },
        "train": {"steps": 20, "seed": 0, "param_dtype": "bf16", "grad_dtype": "fp32", "stall_timeout_s": 1800.0},
        "checkpoint": {"every_steps": 0, "keep": 2, "force": False},
        "benchmark": {"peak_flops": "auto", "window_steps": 10},
        "cluster": to_dict(ClusterConfig(name="local", device="cuda", time_limit_min=60)),
    }


def test_an_experiment_yields_to_the_command_line(compose):
    config = compose("+experiment=qwen3_235b_max_throughput", "model=tiny", "data.seq_len=64", "offload=full")
    assert (config.model.name, config.data.seq_len, config.offload.mode) == ("tiny", 64, "full")


@pytest.mark.parametrize(
    "model, total, active",
    [
        ("qwen3_0_6b", 596_049_920, 596_049_920),
        ("qwen3_4b", 4_022_468_096, 4_022_468_096),
        ("qwen3_30b_a3b", 30_532_122_624, None),
        ("qwen3_235b", 235_093_634_560, None),
    ],
)
def test_models_have_their_published_sizes(compose, model, total, active):
    counts = parameter_counts(compose(f"model={model}").model)
    assert counts.total == total
    assert active is None or counts.active == active
