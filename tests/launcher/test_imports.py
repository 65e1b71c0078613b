"""Who may import whom: launcher and multirun share a few modules with the trainer, none of which needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"trainer.config", "trainer.flops", "trainer.failure", "trainer.stop", "trainer.checkpoint.directory"}
STARTS_THE_TRAINER = ("launcher/job.py", "trainer.__main__")  # inside a function: the task becomes the rank


def imported(path: Path) -> set[str]:
    """Modules that a file imports anywhere, `from package import module` as package.module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= {name for name in inner if is_module(name)} or {node.module}
    return names


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or path.is_dir()


@pytest.mark.parametrize("package", ["launcher", "multirun", "hydra_plugins"])
def test_launcher_and_multirun_take_only_shared_modules_from_the_trainer(package):
    files = sorted((ROOT / package).glob("*.py"))
    assert files
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        taken = {module for module in imported(path) if module.partition(".")[0] == "trainer"}
        if name == STARTS_THE_TRAINER[0]:
            taken -= {STARTS_THE_TRAINER[1]}
        assert taken <= SHARED, name
        if package == "launcher":
            assert not [module for module in imported(path) if module.partition(".")[0] == "multirun"], name


@pytest.mark.parametrize("module", sorted(SHARED))
def test_shared_modules_need_the_standard_library_only(module):
    code = (
        f"import sys; before = set(sys.modules); import {module}; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "sys.exit(str(sorted(new - set(sys.stdlib_module_names) - {'trainer'})) if "
        "new - set(sys.stdlib_module_names) - {'trainer'} else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
