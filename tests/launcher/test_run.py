"""Key, run directory and snapshot: equal experiments are one run, and what was frozen never changes."""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import snapshot
from launcher.run import RunRefused, find, freeze, key_of, prepare, run_key, slug, torchrun_command
from launcher.snapshot import tree
from launcher.status import describe
from trainer.config import ConfigError, load

CHOICES = {"model": "tiny"}


@pytest.fixture
def root(tmp_path) -> Path:
    """A small project that is not a git checkout."""
    root = tmp_path / "project"
    for name in ("trainer/train.py", "trainer/data/text.txt", "launcher/cli.py", "conf/config.yaml", "notes.md"):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"content of {name}\n")
    return root


@pytest.fixture
def make(compose, machine, root):
    """`make("train.steps=3", sweep=...)`: a prepared run of the small project."""

    def run(*arguments, **options):
        return prepare(compose(*arguments), CHOICES, machine=machine, tree=tree(root), **options)

    return run


def finish(run, **status):
    (run.path / "status.json").write_text(json.dumps(status))
    if status["state"] == "done":
        (run.path / "result.json").write_text(json.dumps({"status": "done", "steps": 3}))


class TestKey:
    def test_copies_beside_a_run_are_not_runs_of_its_key(self, make, root):
        run = make()
        freeze(run, root)
        copy = run.path.with_name(run.path.name + ".old")
        copy.mkdir()
        (copy / "run.json").write_bytes((run.path / "run.json").read_bytes())
        assert find(run.runs_dir, run.key) == [run.path]

    def test_where_and_how_a_run_goes_is_not_its_identity(self, make):
        same = [
            "cluster.time_limit_min=5",
            "cluster.env.A=1",
            "logging.project=x",
            "launch.name=y",
            "launch.wait=false",
        ]
        assert make(*same).key == make().key

    @pytest.mark.parametrize("argument", ["train.seed=1", "optimizer.lr=1e-4", "model.num_hidden_layers=2", "ac=full"])
    def test_what_a_run_does_is_its_identity(self, make, argument):
        assert make(argument).key != make().key

    def test_how_a_value_was_written_is_not(self, make):
        assert make("optimizer.lr=0.003", "parallelism.ep=2", "data.global_batch_size=4").key == make().key

    def test_the_code_is(self, make, root):
        before = make().key
        (root / "trainer/train.py").write_text("edited\n")
        assert make().key != before
        (root / "trainer/train.py").write_text("content of trainer/train.py\n")
        assert make().key == before

    def test_what_is_no_code_is_not(self, make, root):
        before = make().key
        (root / "notes.md").write_text("edited\n")
        (root / "conf/config.yaml").write_text("edited\n")
        (root / "trainer/__pycache__").mkdir()
        (root / "trainer/__pycache__/train.pyc").write_text("x")
        assert make().key == before

    def test_it_is_the_same_in_every_process(self, resolved):
        config = resolved()
        config = replace(config, model=replace(config.model, recommended_ep=2))
        assert run_key(config, "0123") == run_key(config, "0123")
        assert len(run_key(config, "0123")) == 10


class TestDirectory:
    def test_preparing_writes_nothing(self, make, machine):
        run = make()
        assert not run.path.exists() and not run.snapshot.exists() and not run.runs_dir.exists()
        assert run.path.is_absolute() and run.snapshot.is_absolute()
        assert (run.state, run.submit) == ("new", True)

    def test_frozen_run_json_is_the_resolved_config(self, make, root):
        run = make("train.steps=3")
        freeze(run, root)
        assert load(run.path) == run.config
        assert json.loads((run.path / "plan.json").read_text()) == run.plan
        source = json.loads((run.path / "source.json").read_text())
        assert (source["tree"], source["snapshot"]) == (run.tree.digest, str(run.snapshot))
        assert source["commit"] is None and "hydra-core" in source["packages"]
        assert not [path for path in run.path.parent.iterdir() if path != run.path]

    def test_its_name_is_safe_short_and_ends_in_the_key(self, make):
        run = make('launch.name=a b="0"; echo ../x/' + "y" * 300)
        assert run.path.name.endswith(f"-{run.key}") and key_of(run.path) == run.key
        assert len(run.path.name) < 60 and run.path.parent.parent == run.runs_dir
        assert set(run.path.name) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_.")
        assert slug("../..") == "run"

    def test_a_sweep_has_one_directory_and_is_the_wandb_group(self, make):
        run = make(sweep="2026-01-01_10-00-00")
        assert run.path.parent.name == run.config.logging.group == "2026-01-01_10-00-00"
        assert run.config.logging.run_name == run.path.name

    def test_names_that_were_given_stay(self, make):
        logging = make("logging.run_name=1e5", "logging.group=007", sweep="s").config.logging
        assert (logging.run_name, logging.group) == ("1e5", "007")

    def test_later_edits_change_nothing_that_was_frozen(self, make, root):
        run = make()
        freeze(run, root)
        before = {path: path.read_bytes() for path in run.runs_dir.rglob("*") if path.is_file()}
        (root / "trainer/train.py").write_text("edited\n")
        (root / "conf/config.yaml").write_text("edited\n")
        later = make("train.seed=5")
        freeze(later, root)
        assert {path: path.read_bytes() for path in before} == before
        assert later.snapshot != run.snapshot
        assert (run.snapshot / "trainer/train.py").read_text() == "content of trainer/train.py\n"

    def test_the_torchrun_line_names_absolute_paths_and_all_ranks(self, make, resolved):
        run = make()
        assert torchrun_command(run) == f"cd {run.snapshot} && torchrun --nproc-per-node 2 -m trainer {run.path}"
        wide = replace(run, config=resolved("model=qwen3_235b"))
        assert "--nnodes 4" in torchrun_command(wide) and "--nproc-per-node 8" in torchrun_command(wide)

    def test_two_commands_may_freeze_the_same_run(self, make, root):
        first, second = make(), make()
        freeze(first, root)
        freeze(second, root)
        assert load(first.path) == first.config

    def test_a_runs_dir_that_cannot_be_written_is_refused_by_name(self, make, root, machine):
        (machine.cwd / "file").touch()
        with pytest.raises(ConfigError, match="file"):
            freeze(make("launch.runs_dir=file/x"), root)


class TestAgain:
    def test_a_frozen_run_is_submitted_from_its_directory(self, make, root):
        run = make()
        freeze(run, root)
        again = make("cluster.time_limit_min=5", sweep="another")
        assert (again.path, again.state, again.submit) == (run.path, "frozen", True)
        freeze(again, root)
        assert load(run.path).cluster.time_limit_min == 5

    @pytest.mark.parametrize(
        "state, again, submit, same_directory",
        [
            ("done", "none", False, True),
            ("done", "failed", False, True),
            ("done", "all", True, False),
            ("failed", "none", False, True),
            ("failed", "failed", True, True),
            ("failed", "all", True, False),
            ("cancelled", "failed", True, True),
            ("preempted", "failed", True, True),
            ("running", "failed", False, True),
            ("running", "all", False, True),
        ],
    )
    def test_what_launch_again_does(self, make, root, state, again, submit, same_directory):
        run = make()
        freeze(run, root)
        finish(run, state=state)
        later = make(f"launch.again={again}")
        assert later.submit is submit
        assert (later.path == run.path) is same_directory
        assert later.key == (run.key if same_directory else f"{run.key}-r1")

    def test_repetitions_are_counted_and_the_last_one_is_the_run(self, make, root):
        for number, key in enumerate(["", "-r1", "-r2"]):
            run = make("launch.again=all")
            assert run.key.endswith(key) and len(run.key) == 10 + len(key)
            freeze(run, root)
            finish(run, state="done")
            assert describe(run.path)["key"] == run.key
            assert len(find(run.runs_dir, run.key[:10])) == number + 1
        last = make()
        assert (last.path, last.submit) == (run.path, False)

    def test_a_run_in_another_runs_dir_is_another_run(self, make, root):
        run = make()
        freeze(run, root)
        finish(run, state="done")
        assert make("launch.runs_dir=elsewhere").state == "new"


class TestRefused:
    def test_a_broken_experiment_is_refused_without_a_plan(self, make):
        with pytest.raises(RunRefused) as refused:
            make("parallelism.ep=5", "model.head_dim=33")
        assert len(refused.value.problems) == len(refused.value.lines) == 2
        assert refused.value.plan is None

    def test_where_only_the_machine_is_too_small_the_plan_is_there(self, make):
        with pytest.raises(RunRefused) as refused:
            make("model=qwen3_235b", "offload=none")
        assert refused.value.plan["world_size"] == 32


class TestSnapshot:
    def test_it_holds_the_code_and_nothing_else(self, root, tmp_path):
        code = tree(root)
        snapshot.freeze(root, code, tmp_path / "copy")
        copied = sorted(
            p.relative_to(tmp_path / "copy").as_posix() for p in (tmp_path / "copy").rglob("*") if p.is_file()
        )
        assert copied == ["launcher/cli.py", "trainer/data/text.txt", "trainer/train.py"] == list(code.files)
        assert tree(tmp_path / "copy").digest == code.digest

    def test_a_snapshot_that_was_edited_is_refused(self, root, tmp_path):
        code, copy = tree(root), tmp_path / "copy"
        snapshot.freeze(root, code, copy)
        os.chmod(copy / "trainer/train.py", 0o644)
        (copy / "trainer/train.py").write_text("edited")
        with pytest.raises(ConfigError, match="changed"):
            snapshot.freeze(root, code, copy)

    def test_code_that_changes_while_it_is_copied_is_not_taken(self, root, tmp_path):
        code = tree(root)
        (root / "trainer/train.py").write_text("edited")
        with pytest.raises(ConfigError, match="changed while"):
            snapshot.freeze(root, code, tmp_path / "copy")
        assert list(tmp_path.iterdir()) == [root]

    def test_names_count_not_only_contents(self, root):
        before = tree(root).digest
        (root / "trainer/train.py").rename(root / "trainer/renamed.py")
        assert tree(root).digest != before

    def test_in_a_git_checkout_edits_and_new_files_count_and_ignored_ones_do_not(self, root):
        def git(*arguments):
            identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
            subprocess.run(["git", *identity, *arguments], cwd=root, check=True, capture_output=True)

        (root / ".gitignore").write_text("*.tmp\n")
        git("init", "-q")
        git("add", ".")
        git("commit", "-q", "-m", "x")
        plain = tree(root)
        (root / "trainer/x.tmp").write_text("ignored")
        assert tree(root) == plain
        (root / "trainer/new.py").write_text("new")
        (root / "trainer/train.py").write_text("edited\n")
        assert "trainer/new.py" in tree(root).files
        source = snapshot.source(root, tree(root), Path("/s"))
        assert len(source["commit"]) == 40 and "+edited" in source["diff"] and source["untracked"] == ["trainer/new.py"]
        (root / "trainer/train.py").unlink()
        assert "trainer/train.py" not in tree(root).files
