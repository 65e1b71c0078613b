"""The rules of the `cluster` group: what would break a job script, what excludes what, and what means nothing here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

from launcher.job_script import container_mounts
from launcher.problem import Problem, problem
from trainer.config import ClusterConfig, RunConfig, looks_secret

# The others mean something to SLURM only.
ANYWHERE = ("name", "device", "env", "grace_s", "time_limit_min", "setup", "node_check", "node_check_min_share")
MAIL_TYPES = ("NONE", "BEGIN", "END", "FAIL", "REQUEUE", "ALL", "INVALID_DEPEND", "STAGE_OUT", "TIME_LIMIT")
MAIL_TYPES += ("TIME_LIMIT_90", "TIME_LIMIT_80", "TIME_LIMIT_50", "ARRAY_TASKS")
# What the launcher writes itself, by option; the key that it comes from, or why it is not for the user to set.
_OURS = {
    "nodes": "parallelism.nodes", "N": "parallelism.nodes", "ntasks": "parallelism.*", "n": "parallelism.*",
    "ntasks-per-node": "parallelism.gpus_per_node", "gpus-per-node": "parallelism.gpus_per_node",
    "cpus-per-task": "cluster.cpus_per_task", "c": "cluster.cpus_per_task", "time": "cluster.time_limit_min",
    "t": "cluster.time_limit_min", "chdir": "the frozen code", "D": "the frozen code",
    "kill-on-bad-exit": "1, so that a failed rank ends all", "K": "1, so that a failed rank ends all",
    "output": "logs/ of the run", "o": "logs/ of the run", "error": "logs/ of the run", "e": "logs/ of the run",
    "array": "the runs of a sweep", "a": "the runs of a sweep", "signal": "the warning before the time limit",
    "job-name": "launch.name", "J": "launch.name", "export": "ALL",
}  # fmt: skip
_KEYS = (
    "partition",
    "account",
    "qos",
    "constraint",
    "reservation",
    "exclusive",
    "gres",
    "mem",
    "mail-type",
    "mail-user",
)
_SHORT = {"p": "partition", "A": "account", "q": "qos", "C": "constraint"}


def check_cluster(config: RunConfig) -> Iterator[Problem]:
    """Every broken rule of the group."""
    cluster = config.cluster
    yield from _secrets(config)
    if not 0 < cluster.node_check_min_share < 1:
        yield problem(config, ["cluster.node_check_min_share"], "is a share of the median, between 0 and 1", "0.8")
    if cluster.name == "local":
        plain = ClusterConfig()
        names = [field.name for field in fields(cluster) if field.name not in ANYWHERE]
        given = [f"cluster.{name}" for name in names if getattr(cluster, name) != getattr(plain, name)]
        if given:
            yield problem(config, ["cluster.name", *given], "mean something to SLURM only", "cluster=slurm")
        return
    yield from _memory(config)
    yield from _container(config)
    yield from _mail(config)
    yield from _arguments(config)


def _secrets(config: RunConfig) -> Iterator[Problem]:
    """run.json, the job script and W&B would show them to everybody."""
    for name in sorted(filter(looks_secret, config.cluster.env)):
        message = "looks like a secret, which run.json, the job script and W&B would show"
        cure = "export it in the shell that submits, which hands it on, or read it from a file in cluster.setup"
        yield Problem((f"cluster.env.{name}",), ("<set>",), message, (cure,))


def _memory(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    for name in ("mem", "mem_per_cpu"):
        if not re.fullmatch(r"(\d+[KMGT]?)?", getattr(cluster, name)):
            key = f"cluster.{name}"
            yield problem(config, [key], "is not SLURM's spelling of memory", f"{key}=500G", f"{key}=0")
    if cluster.mem and cluster.mem_per_cpu:
        keys = ["cluster.mem", "cluster.mem_per_cpu"]
        yield problem(config, keys, "SLURM takes memory a node or a CPU, not both", "one of them")
    for key, options in (("srun_args", ("--mem",)), ("sbatch_args", ("--mem-per-gpu",))):
        clash = [item for item in getattr(cluster, key) if item.startswith(options)]
        given = [f"cluster.{name}" for name in ("mem", "mem_per_cpu") if getattr(cluster, name)]
        if clash and given:
            yield problem(config, [*given, f"cluster.{key}"], f"SLURM takes --mem or {clash[0]}, not both")


def _container(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    if cluster.container == "none":
        given = [f"cluster.{name}" for name in ("container_image", "container_mounts") if getattr(cluster, name)]
        if given:
            message = "nothing reads it without a container"
            yield problem(config, ["cluster.container", *given], message, "cluster.container=pyxis|apptainer")
        return
    if not cluster.container_image:
        keys = ["cluster.container", "cluster.container_image"]
        yield problem(config, keys, "needs an image", "cluster.container_image=IMAGE", "cluster.container=none")
    odd = [mount for mount in container_mounts(config) if "," in mount]
    odd += [mount for mount in container_mounts(config) if ":" in mount and mount not in cluster.container_mounts]
    if odd:
        message = f"{odd[0]} cannot be mounted: a comma or a colon separates mounts"
        yield problem(config, ["cluster.container", "cluster.container_mounts"], message)


def _mail(config: RunConfig) -> Iterator[Problem]:
    cluster = config.cluster
    unknown = [word for word in cluster.mail_type.split(",") if cluster.mail_type and word not in MAIL_TYPES]
    if unknown:
        yield problem(config, ["cluster.mail_type"], f"SLURM has no {unknown[0]!r}; it has {', '.join(MAIL_TYPES)}")
    if cluster.mail_user and not cluster.mail_type:
        keys = ["cluster.mail_user", "cluster.mail_type"]
        yield problem(config, keys, "says to whom, but not when", "cluster.mail_type=END,FAIL")


def _arguments(config: RunConfig) -> Iterator[Problem]:
    """Options that are set through a key, or by the launcher itself, are refused as free arguments."""
    for key in ("sbatch_args", "srun_args"):
        for item in getattr(config.cluster, key):
            option = item.removeprefix("--").partition("=")[0] if item.startswith("--") else item[1:2]
            name = _SHORT.get(option, option)
            if not item.startswith("--" if key == "sbatch_args" else "-"):
                message = f"{item!r} is not written as an option"
                yield problem(config, [f"cluster.{key}"], message, f"'cluster.{key}=[--option=value]'")
            elif option in _OURS:
                yield problem(config, [f"cluster.{key}"], f"{item} is set by the launcher ({_OURS[option]})")
            elif key == "sbatch_args" and name in _KEYS:
                own = f"cluster.{name.replace('-', '_')}"
                yield problem(config, [f"cluster.{key}"], f"{item} has a key of its own", f"{own}=...")
