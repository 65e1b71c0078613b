"""The command line before Hydra: what is meant reaches Hydra intact, what cannot be meant is refused in one line."""

import re
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from launcher.foreign import KEYS
from launcher.overrides import options, quote, rewrite, split_commas, split_flags
from launcher.schema import Refused, keys, sections

CONF = Path(__file__).resolve().parents[2] / "conf"


def refusal(*arguments: str) -> str:
    with pytest.raises(Refused) as refused:
        rewrite(list(arguments), CONF)
    return str(refused.value)


def values(*arguments: str) -> list:
    """What Hydra's own parser reads from the rewritten arguments: a value, or the values of a sweep."""
    parsed = OverridesParser.create().parse_overrides([a for a in rewrite(list(arguments), CONF) if a[0] != "-"])
    return [list(p.sweep_string_iterator()) if p.is_sweep_override() else p.value() for p in parsed]


NASTY = [
    "1e5",
    "12e4567",
    "007",
    "0x1F",
    "true",
    "off",
    "1_000",
    "ckpt/epoch=999-step=87999",
    'a b="0"; echo x',
    "it's",
    "a\\'b",
    "ends in \\",
    "\\\\",
    "[x]",
    "{a: 1}",
    "(a)",
    "mlx5_0:1",
    "a#b",
    "$HOME/x",
    "~/data",
    " padded ",
    "",
    "ü→",
    "'",
    '"',
    "choice",
    "a:b",
    "%j",
]


@pytest.mark.parametrize("text", NASTY)
def test_text_reaches_hydra_as_the_text_it_is(text):
    assert values(f"logging.run_name={text}") == [text]
    assert values(f"cluster.env.NAME={text}") == [text]


@pytest.mark.parametrize("text", ["1e5", "007", "true", "null", "a b", "a=b", "x:y", "module load cuda/12", "$HOME/x"])
def test_text_in_a_list_stays_text(text):
    assert values(f"logging.tags=[{text},b]") == [[text, "b"]]
    assert values(f"+logging.tags=[{text}, 'b,c']") == [[text, "b,c"]]


def test_quoted_text_is_taken_without_its_quotes():
    assert values("logging.run_name='1e5'", 'cluster.env.X="mlx5_0:1,mlx5_3:1"') == ["1e5", "mlx5_0:1,mlx5_3:1"]


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("sweep", [[], ["--multirun"]])
def test_an_environment_value_with_commas_is_one_value_also_in_a_sweep(plus, sweep):
    assert values(*sweep, f"{plus}cluster.env.NCCL_IB_HCA=mlx5_0:1,mlx5_3:1") == ["mlx5_0:1,mlx5_3:1"]


def test_a_sweep_over_text_is_split_at_its_commas_only():
    assert values("-m", "logging.run_name='a,b',1e5") == [["'a,b'", "'1e5'"]]
    assert values("-m", "logging.tags=[a,b],[1e5]") == [["['a','b']", "['1e5']"]]
    assert values("-m", "launch.wait=true,false") == [["'true'", "'false'"]]
    assert values("-m", "offload=none,optimizer,full") == [["none", "optimizer", "full"]]
    assert values("-m", "optimizer.lr=1e-5,1e-4") == [["1e-05", "0.0001"]]


def test_commas_without_multirun_are_left_for_hydra_to_refuse():
    for text in ("model=tiny,qwen3_4b", "optimizer.lr=1,2", "logging.run_name=a,b"):
        assert rewrite([text], CONF) == [text]


def test_an_enum_that_looks_like_a_boolean_stays_text():
    assert values("launch.wait=true") == ["true"]


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["a=1", "--multirun", "b=2"], ["--multirun", "a=1", "b=2"]),
        (["a=1", "-m", "b=2", "-cd", "dir"], ["-m", "-cd", "dir", "a=1", "b=2"]),
        (["--info", "a=1"], ["--info=all", "a=1"]),
        (["a=1", "--info", "defaults"], ["--info=defaults", "a=1"]),
        (["a=1", "--cfg", "job", "--resolve"], ["--cfg", "job", "--resolve", "a=1"]),
        (["--config-dir=x=y", "a=1"], ["--config-dir", "x=y", "a=1"]),
        (["~a", "--help"], ["--help", "~a"]),
    ],
)
def test_flags_go_to_the_front_whatever_side_overrides_stand_on(argv, expected):
    flags, overrides = split_flags(argv)
    assert flags + overrides == expected


def test_shell_completion_is_hydras_alone():
    assert rewrite(["-sc", "install=bash"], CONF) == ["-sc", "install=bash"]


@pytest.mark.parametrize(
    "argument, near",
    [
        ("offload=optimzer", "did you mean offload=optimizer?"),
        ("offload=null", "did you mean offload=none?"),
        ("offload=", "did you mean offload=none?"),
        ("compile=off", "did you mean compile=none?"),
        ("compile=false", "did you mean compile=none?"),
        ("ac=None", "did you mean ac=none?"),
        ("model=", "tiny"),
        ("model=qwen3_235", "did you mean model=qwen3_235b?"),
        ("+model=null", "tiny"),
        ("+experiment=qwen3_235b_max", "did you mean experiment=qwen3_235b_max_throughput?"),
        ("cluster=", "auto, local, slurm"),
        ("~offload", "none, optimizer"),
    ],
)
def test_an_option_that_is_not_there_is_refused_with_the_group_its_options_and_the_nearest(argument, near):
    line = refusal(argument)
    group = argument.lstrip("+~").partition("=")[0]
    assert "\n" not in line
    assert group in line and near in line
    assert all(option in line for option in options([CONF])[group])


@pytest.mark.parametrize(
    "argument, near",
    [
        ("optimizer.lrr=1", "optimizer.lr"),
        ("+optimizer.lrr=1", "optimizer.lr"),
        ("++optimizer.lrr=1", "optimizer.lr"),
        ("~optimizer.lrr", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("+seq_len=3", "data.seq_len"),
        ("train.step=3", "train.steps"),
        ("ofload=none", "offload"),
        ("modl.hidden_size=3", "model.hidden_size"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_also_with_a_plus(argument, near):
    line = refusal(argument)
    assert "\n" not in line and f"did you mean {near}?" in line


def test_where_nothing_is_near_the_sections_keys_are_listed():
    assert "optimizer has name, lr, weight_decay" in refusal("+optimizer.zzz=1")
    assert "sections are model, parallelism" in refusal("zzz.zzz=1")


def test_every_refusal_of_a_command_line_is_listed():
    assert len(refusal("offload=nope", "optimizer.lrr=1", "model.optim_cpu_offload=true", "ac=full").splitlines()) == 3


@pytest.mark.parametrize(
    "argument, here",
    [
        ("model.optim_cpu_offload=true", "offload=optimizer"),
        ("model.optim_cpu_offload=false", "offload=none"),
        ("+model.optim_cpu_offload=true", "offload=optimizer"),
        ("model.fsdp_cpu_offload=true", "offload=full"),
        ("offload=fsdp", "offload=full"),
        ("model.full_offload=true", "offload=full"),
        ("model.full_offload.numa_bind=true", "offload=full"),
        ("model.full_offload.cpu_optimizer_backend=torch", "offload=full"),
        ("model.compile.fullgraph=true", "compile=fullgraph"),
        ("compile.fullgraph=true", "compile=fullgraph"),
        ("model.debug.num_layers=2", "model.num_hidden_layers"),
        ("training.local_batch_size=1", "data.micro_batch_size"),
        ("parallelism.expert_parallel_degree=8", "parallelism.ep"),
        ("activation_checkpoint.mode=full", "ac="),
        ("hydra/launcher=submitit_slurm", "cluster=slurm"),
        ("hydra.launcher.partition=gpu", "cluster.partition"),
        ("slurm.partition=gpu", "cluster"),
        ("env_vars.A=1", "cluster.env"),
    ],
)
def test_a_key_of_another_stack_is_refused_with_its_spelling_here(argument, here):
    line = refusal(argument)
    assert "\n" not in line and here in line.partition(": ")[2]


def test_the_table_of_other_stacks_shadows_no_key_and_points_only_at_what_exists():
    own = {*keys(), *sections()}
    assert not set(KEYS) & set(keys())
    for told in KEYS.values():
        for key, option in re.findall(r"(\w+(?:\.\w+)*)=([\w|]*)", told):
            assert key in own or key.startswith("cluster.env"), told
            if key in sections() and option:
                assert set(option.split("|")) <= set(options([CONF])[key]), told


@pytest.mark.parametrize(
    "argument, part",
    [
        ("offload.mode=optimzer", "did you mean optimizer?"),
        ("launch.wait=True", "did you mean true?"),
        ("train.param_dtype=fp16", "bf16"),
        ("model.weights=null", "model.weights="),
        ("logging.tags=a", "[a]"),
        ("cluster.env={A: 1}", "cluster.env.NAME=VALUE"),
        ("~train.steps", "set train.steps="),
        ("logging.run_name=a\nb", "logging.run_name"),
        ("cluster.env.X=a\nb", "cluster.env.X"),
        ("foo", "key=value"),
        ("--nodes", "flag"),
        ("--multirum", "--multirun"),
        ("--cfg", "needs a value"),
        ("--experimental-rerun", "unknown flag"),
        ("--resolve", "--cfg job --resolve"),
        ("cluster.env.1A=3", "cluster.env.NAME"),
        ("cluster.env.=3", "cluster.env.NAME"),
        ("cluster.env.A.B=3", "cluster.env.NAME"),
        ("offload.mode=null", "did you mean none?"),
        ("logging.wandb=off", "did you mean disabled?"),
        ("logging.tags=null", "'logging.tags=[]'"),
    ],
)
def test_other_mistakes_are_one_line_too(argument, part):
    line = refusal(argument)
    assert "\n" not in line and part in line


@pytest.mark.parametrize("flags", [["-m", "--cfg", "job"], ["--multirun", "-r"], ["--info", "-c", "job"]], ids=" ".join)
def test_hydras_commands_go_one_at_a_time(flags):
    with pytest.raises(Refused, match="only one of them at a time"):
        rewrite(flags, CONF)


def test_a_plus_on_a_key_or_group_that_exists_does_what_is_meant():
    assert rewrite(["+optimizer.lr=1", "+offload=none", "experiment=qwen3_235b_max_throughput"], CONF) == [
        "++optimizer.lr=1",
        "offload=none",
        "+experiment=qwen3_235b_max_throughput",
    ]


def test_hydras_own_keys_pass():
    own = ["hydra.verbose=true", "hydra/job_logging=stdout", "+hydra.job.env_set.A=1", "hydra.run.dir=x"]
    assert rewrite(own, CONF) == own


def test_a_config_dir_adds_options(tmp_path):
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "site.yaml").write_text("defaults: [slurm, _self_]\n")
    assert rewrite(["cluster=site", "--config-dir", str(tmp_path)], CONF)[-1] == "cluster=site"
    assert "site" not in refusal("cluster=sit")


def test_options_that_only_hydra_can_find_are_left_to_it():
    assert rewrite(["model=mine", "hydra.searchpath=[file:///x]"], CONF)[0] == "model=mine"


@pytest.mark.parametrize("text", NASTY)
def test_quote_is_undone_by_hydras_parser(text):
    assert OverridesParser.create().parse_override(f"a={quote(text)}").value() == text


def test_commas_split_only_outside_of_quotes_and_brackets():
    assert split_commas("a,'b,c',[d,e],{f: 1, g: 2}") == ["a", "'b,c'", "[d,e]", "{f: 1, g: 2}"]
    assert split_commas("") == [""]
    assert split_commas("it's,x") == ["it's", "x"]


def test_a_setting_with_dashes_is_shown_without_them():
    assert refusal("--model=tiny") == "--model=tiny: unknown flag; settings are written model=tiny, see --help"
    assert "did you mean --multirun?" in refusal("--multi-run")
    assert refusal("=5") == "=5: is not key=value"


def test_a_config_dir_has_to_be_a_directory(tmp_path):
    (tmp_path / "site.yaml").touch()
    for path in (tmp_path / "nowhere", tmp_path / "site.yaml"):
        assert refusal("cluster=mine", "--config-dir", str(path)).startswith(f"--config-dir {path}: is not a directory")
