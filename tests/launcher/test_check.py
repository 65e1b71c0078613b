"""Every rule: broken on purpose it is reported with its keys and a legal alternative, and a sound run has no problems."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launcher.check import SAMPLE_TOKENS, TOKENIZER_SIZE, check
from launcher.overrides import options
from launcher.resolve import divisors, resolve
from trainer.config import to_dict

CONF = Path(__file__).resolve().parents[2] / "conf"
SLURM = ("cluster=slurm", "launch.dry_run=true")


@pytest.fixture
def problems(resolved, machine):
    return lambda *arguments: check(resolved(*arguments), machine)


def only(problems):
    assert len(problems) == 1, [problem.text for problem in problems]
    return problems[0]


def test_the_bare_first_run_is_sound(problems):
    assert problems() == []


@pytest.mark.parametrize("model", options([CONF])["model"])
def test_every_model_is_sound_as_it_ships(problems, model):
    assert problems(f"model={model}", *SLURM) == []
    assert problems(f"model={model}", "data=random", *SLURM) == []


def test_what_is_known_of_tokenizers_and_the_sample_is_true():
    sources, tokenizer = (pytest.importorskip(f"trainer.data.{name}") for name in ("sources", "tokenizer"))
    for name in TOKENIZER_SIZE:
        built = tokenizer.build_tokenizer(name)
        assert built.vocab_size == TOKENIZER_SIZE[name]
        assert len(sources.tokenize(sources.sample_conversations(), built).ids) == SAMPLE_TOKENS[name]


@pytest.mark.parametrize("layout", options([CONF])["parallelism"])
@pytest.mark.parametrize("model", options([CONF])["model"])
def test_every_layout_is_legal_for_every_model(compose, machine, model, layout):
    parallelism = compose(f"parallelism={layout}", "parallelism.nodes=2").parallelism
    config = resolve(replace(compose(f"model={model}", *SLURM), parallelism=parallelism), machine)
    assert check(config, machine) == []


def test_the_experiments_are_sound(problems):
    for name in options([CONF])["experiment"]:
        assert problems(f"+experiment={name}", *SLURM) == []


BROKEN = [
    # what is set, the keys that are named, what is offered
    (["model=qwen3_235b", "parallelism.ep=24", *SLURM], ["parallelism.ep", "model.num_experts"], "=1|2|4|8|16|32"),
    (["model=qwen3_235b", "parallelism.ep=5", *SLURM], ["parallelism.ep", "model.num_experts"], "=1|2|4|8|16|32"),
    (["model=qwen3_4b", "parallelism.ep=2", *SLURM], ["parallelism.ep"], "parallelism.ep=1"),
    (["parallelism.dp_shard=4"], ["parallelism.nodes", "parallelism.dp_shard"], "parallelism.dp_shard=2"),
    (["parallelism.dp_replicate=3", "parallelism.dp_shard=1"], ["parallelism.dp_replicate"], "dp_replicate=1|2"),
    (["model.num_key_value_heads=3"], ["model.num_attention_heads", "model.num_key_value_heads"], "=1|2|4"),
    (["model.head_dim=33"], ["model.head_dim"], "model.head_dim=34"),
    (["model.num_experts_per_tok=9"], ["model.num_experts_per_tok", "model.num_experts"], ""),
    (["model.num_experts_per_tok=0"], ["model.num_experts_per_tok"], ""),
    (["model.mlp_only_layers=[0,1,2,3]"], ["model.mlp_only_layers"], "model.num_experts=0"),
    (["model.mlp_only_layers=[4]"], ["model.mlp_only_layers"], ""),
    (["model.moe_intermediate_size=250"], ["model.moe_intermediate_size"], "model.moe_intermediate_size=252"),
    (["model.moe_intermediate_size=252", "train.param_dtype=bf16"], ["model.moe_intermediate_size"], "=256"),
    (["model.hidden_size=130"], ["model.hidden_size"], "model.hidden_size=132"),
    (["model.vocab_size=100"], ["model.vocab_size", "model.tokenizer"], "data=random"),
    (["model.freeze=[*.nope.*]"], ["model.freeze"], ""),
    (["model.freeze=[*]"], ["model.freeze"], ""),
    (["model=qwen3_4b", "model.routing=balanced", *SLURM], ["model.routing"], "model.routing=learned"),
    (["model=qwen3_4b", "model.router_aux_loss_coef=1", *SLURM], ["model.router_aux_loss_coef"], "=0"),
    (["data.seq_len=8192"], ["data.seq_len", "model.max_position_embeddings"], "data.seq_len=4096"),
    (["data.global_batch_size=10"], ["data.global_batch_size", "data.micro_batch_size"], "data.global_batch_size=8"),
    (
        ["model=qwen3_235b", "data=sample", *SLURM],
        ["data.name", "data.global_batch_size", "data.seq_len"],
        "data=random",
    ),
    (["offload=full", "optimizer=muon"], ["offload.mode", "optimizer.name"], "adamw|sign_sgd"),
    (["schedule=wsd"], ["schedule.name", "schedule.decay_steps"], "schedule.decay_steps=30"),
    (["schedule=linear", "schedule.decay_steps=151"], ["schedule.warmup_steps", "schedule.decay_steps"], ""),
    (["train.steps=5", "schedule.warmup_steps=6"], ["schedule.warmup_steps", "train.steps"], ""),
    (["schedule.decay_steps=5"], ["schedule.name", "schedule.decay_steps"], "schedule=linear|cosine|wsd"),
    (["schedule=cosine", "schedule.min_lr=1"], ["schedule.min_lr", "optimizer.lr"], ""),
    (["optimizer.lr=0"], ["optimizer.lr"], ""),
    (["optimizer.lr=nan"], ["optimizer.lr"], ""),
    (["optimizer.beta2=1.0"], ["optimizer.beta2"], ""),
    (["optimizer.clip_norm=-1"], ["optimizer.clip_norm"], ""),
    (["data=chat"], ["data.name", "data.path"], "data=sample"),
    (["data.document_len=8"], ["data.name", "data.document_len"], "data=random"),
    (["data=random", "data.document_len=4096"], ["data.document_len", "data.seq_len"], "data.document_len=0"),
    (["data=random", "data.document_len=-1"], ["data.document_len"], ""),
    (["data=chat", "data.path=nowhere.jsonl"], ["data.path"], ""),
    (["data.path=x.jsonl"], ["data.name", "data.path"], "data=chat"),
    (["data.eval_every_steps=5"], ["data.eval_every_steps", "data.validation_fraction"], ""),
    (["model.weights=nowhere"], ["model.weights"], "random weights"),
    (["model.routing=balanced", "checkpoint.every_steps=5"], ["model.routing", "checkpoint.every_steps"], "force=true"),
    (["benchmark.peak_flops=fast"], ["benchmark.peak_flops"], "9.89e14"),
    (["benchmark.peak_flops=-1"], ["benchmark.peak_flops"], ""),
    (["cluster=local", "cluster.partition=gpu"], ["cluster.partition"], "cluster=slurm"),
    ([*SLURM, "cluster.mem=lots"], ["cluster.mem"], "cluster.mem=500G"),
    ([*SLURM, "cluster.mem=5G", "cluster.srun_args=[--mem-per-cpu=1G]"], ["cluster.mem", "cluster.srun_args"], ""),
    (["cluster.env.RANK=0"], ["cluster.env.RANK"], ""),
    (["train.steps=0", "schedule.warmup_steps=0"], ["train.steps"], ""),
    (["parallelism.nodes=-1"], ["parallelism.nodes"], ""),
]


@pytest.mark.parametrize("arguments, keys, offered", BROKEN, ids=lambda value: " ".join(value) if value else "")
def test_a_broken_rule_is_reported_with_keys_values_and_alternatives(problems, arguments, keys, offered):
    found = problems(*arguments)
    match = [p for p in found if set(keys) <= set(p.keys) and offered in " ".join(p.alternatives)]
    assert match, [p.text for p in found]
    assert len(match[0].keys) == len(match[0].values)
    assert "\n" not in match[0].text
    assert all(key in match[0].text for key in keys)


def test_every_broken_rule_is_reported_at_once(problems):
    broken = ["model.head_dim=33", "offload=full", "optimizer=muon", "parallelism.ep=5", "data.eval_every_steps=3"]
    assert len(problems(*broken, "schedule=wsd")) == 5


def test_an_alternative_that_is_taken_mends_the_rule(problems):
    problem = only(problems("model=qwen3_235b", "parallelism.ep=24", *SLURM))
    key, _, legal = problem.alternatives[0].partition("=")
    for value in legal.split("|"):
        assert problems("model=qwen3_235b", f"{key}={value}", *SLURM) == []


def test_a_legal_ep_is_any_common_divisor(problems):
    for ep in (1, 2, 4, 8, 16, 32):
        assert problems("model=qwen3_235b", f"parallelism.ep={ep}", *SLURM) == []


def test_a_site_file_cannot_set_a_variable_that_no_shell_can_export(resolved, machine):
    config = resolved()
    config = replace(config, cluster=replace(config.cluster, env={"a-b": "0"}))
    assert [problem.keys for problem in check(config, machine)] == [("cluster.env.a-b",)]


def test_line_breaks_are_refused_by_key_in_any_string(resolved, machine):
    config = resolved()
    cluster = replace(config.cluster, setup=["fine", "a\nb"], env={"X": "a\rb"}, partition="")
    config = replace(config, cluster=cluster, logging=replace(config.logging, project="x\ny"))
    named = {problem.keys[0] for problem in check(config, machine)}
    assert named == {"cluster.setup", "cluster.env.X", "logging.project"}


def test_a_path_that_could_be_a_datasets_name_has_to_say_so(problems, machine):
    (machine.cwd / "train").mkdir()
    problem = only(problems("data=chat", "data.path=train"))
    assert problem.alternatives == ("data.path=./train",)
    assert problems("data=chat", *problem.alternatives) == []
    assert problems("data=chat", "data.path=org/name") == []


def test_check_changes_nothing(resolved, machine):
    config = resolved("parallelism.ep=5")
    before = to_dict(config)
    check(config, machine)
    assert to_dict(config) == before


class TestTarget:
    """Checks concern the machine that runs, never the one that submits."""

    def test_without_slurm_the_headline_command_says_how_to_see_its_plan_and_how_to_run_less(self, problems):
        found = problems("model=qwen3_235b", "offload=none", "compile=fullgraph")
        assert found and all(problem.concerns_machine for problem in found)
        text = "\n".join(problem.text for problem in found)
        assert "cluster=slurm launch.dry_run=true" in text
        assert "model.num_hidden_layers=2 parallelism.nodes=1 parallelism.gpus_per_node=1" in text

    def test_the_truncated_model_that_it_offers_runs_where_there_is_a_gpu(self, resolved, machine):
        truncated = ["model.num_hidden_layers=2", "parallelism.nodes=1", "parallelism.gpus_per_node=1"]
        config = resolved("model=qwen3_235b", "offload=none", "compile=fullgraph", *truncated)
        assert check(config, replace(machine, gpus=1, memory_gib=100)) == []

    @pytest.mark.parametrize("where", [SLURM, ("launch.submit=false",)])
    def test_a_run_for_elsewhere_needs_no_gpu_no_memory_and_no_files_here(self, problems, where):
        assert problems("model=qwen3_235b", "offload=full", "data=chat", "data.path=/far/a.jsonl", *where) == []

    def test_slurm_without_sbatch_is_refused_only_when_it_would_be_called(self, problems):
        assert "launch.dry_run=true" in only(problems("cluster=slurm")).alternatives
        assert problems("cluster=slurm", "launch.submit=false") == []

    def test_a_state_that_host_memory_cannot_hold_is_refused_with_both_numbers(self, resolved, machine):
        here = ["parallelism.nodes=1", "parallelism.gpus_per_node=8", "model=qwen3_235b", "offload=full"]
        problem = only(check(resolved(*here), replace(machine, gpus=8)))
        assert "24.0" in problem.text and "GiB" in problem.text


PUBLISHED = {
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 256,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "norm_topk_prob": True,
}


class TestWeights:
    """model.weights has to be the model that is configured."""

    @pytest.fixture
    def directory(self, tmp_path):
        def write(**changed):
            published = {**PUBLISHED, **changed}
            text = json.dumps({name: value for name, value in published.items() if value is not None})
            (tmp_path / "config.json").write_text(text)
            (tmp_path / "model.safetensors").touch()
            return f"model.weights={tmp_path}"

        return write

    def test_the_same_model_is_accepted(self, problems, directory):
        assert problems(directory()) == []

    def test_new_spellings_are_read(self, problems, directory):
        new = {"num_experts": None, "num_local_experts": 8, "rope_theta": None}
        assert problems(directory(**new, rope_parameters={"rope_theta": 1e6, "rope_type": "default"})) == []
        other = only(problems(directory(**new, rope_parameters={"rope_theta": 5e5})))
        assert other.alternatives == ("model.rope_theta=500000.0",)

    @pytest.mark.parametrize(
        "changed, fit",
        [
            ({"hidden_size": 256}, "model.hidden_size=256"),
            ({"norm_topk_prob": False}, "model.norm_topk_prob=false"),
            ({"num_local_experts": 16, "num_experts": None}, "model.num_experts=16"),
            ({"tie_word_embeddings": True}, "model.tie_word_embeddings=true"),
            ({"mlp_only_layers": [1]}, "model.mlp_only_layers=[1]"),
        ],
    )
    def test_another_model_is_refused_with_the_key_that_differs(self, problems, directory, changed, fit):
        assert only(problems(directory(**changed))).alternatives == (fit,)

    @pytest.mark.parametrize("changed", [{"attention_bias": True}, {"rope_scaling": {"type": "yarn"}}])
    def test_what_the_trainer_does_not_build_is_refused(self, problems, directory, changed):
        assert only(problems(directory(**changed))).keys == ("model.weights",)

    def test_a_directory_without_tensors_is_refused(self, problems, directory, tmp_path):
        weights = directory()
        (tmp_path / "model.safetensors").unlink()
        assert "model.safetensors" in only(problems(weights)).message


@pytest.mark.parametrize(
    "key",
    [
        "model.num_hidden_layers",
        "model.num_experts",
        "model.num_attention_heads",
        "parallelism.nodes",
        "parallelism.gpus_per_node",
    ],
)
def test_a_count_that_nothing_has_is_refused_before_anything_counts_to_it(problems, key):
    found = problems(f"{key}=1000000000000", "parallelism.dp_shard=1000000000000", *SLURM)
    assert [problem.keys for problem in found] == [(key,)] and "at most" in found[0].text


@pytest.mark.parametrize("name", ["code", "-code-", "2026-12-01"])
def test_a_name_that_is_another_directory_of_runs_is_refused(problems, name):
    assert only(problems(f"launch.name={name}")).keys == ("launch.name",)
    assert problems(f"launch.name={name}-x", "train.seed=2") == []


def test_divisors_are_all_of_them():
    for number in (1, 2, 36, 97, 128, 360):
        assert divisors(number) == [d for d in range(1, number + 1) if number % d == 0]
