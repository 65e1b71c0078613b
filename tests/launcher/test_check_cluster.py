"""The cluster group: what SLURM would refuse, or nobody would read, is refused before anything is queued."""

import pytest

from launcher.check import check

SLURM = ("cluster=slurm", "launch.dry_run=true")
BROKEN = [
    (["cluster.mem=5G", "cluster.mem_per_cpu=1G"], ["cluster.mem", "cluster.mem_per_cpu"], "not both"),
    (["cluster.mem_per_cpu=much"], ["cluster.mem_per_cpu"], "spelling"),
    (
        ["cluster.mem_per_cpu=1G", "cluster.sbatch_args=[--mem-per-gpu=5G]"],
        ["cluster.mem_per_cpu", "cluster.sbatch_args"],
        "both",
    ),
    (["cluster.container_image=x"], ["cluster.container", "cluster.container_image"], "without a container"),
    (["cluster.container=pyxis"], ["cluster.container_image"], "needs an image"),
    (
        ["cluster.container=pyxis", "cluster.container_image=x", "cluster.container_mounts=['/a,/b']"],
        ["cluster.container_mounts"],
        "'/a,/b'",
    ),
    (["cluster.mail_user=me"], ["cluster.mail_user", "cluster.mail_type"], "not when"),
    (["cluster.mail_type='END,SOMETIMES'"], ["cluster.mail_type"], "SOMETIMES"),
    (["cluster.sbatch_args=[exclude=n1]"], ["cluster.sbatch_args"], "not written as an option"),
    (["cluster.sbatch_args=[--partition=x]"], ["cluster.sbatch_args"], "key of its own"),
    (["cluster.sbatch_args=[--mail-user=x]"], ["cluster.sbatch_args"], "key of its own"),
    (["cluster.sbatch_args=[--array=0-3]"], ["cluster.sbatch_args"], "set by the launcher"),
    (["cluster.srun_args=[--output=x]"], ["cluster.srun_args"], "set by the launcher"),
    (["cluster.srun_args=[-K0]"], ["cluster.srun_args"], "set by the launcher"),
    (["cluster.srun_args=[--kill-on-bad-exit=0]"], ["cluster.srun_args"], "set by the launcher"),
    (["cluster.node_check_min_share=1.5"], ["cluster.node_check_min_share"], "share of the median"),
    (["cluster.env.WANDB_API_KEY=hush"], ["cluster.env.WANDB_API_KEY"], "export it in the shell that submits"),
    (["cluster.env.AWS_SECRET=hush"], ["cluster.env.AWS_SECRET"], "AWS_SECRET=<set>: looks like a secret"),
    (["cluster.array_parallelism=-1"], ["cluster.array_parallelism"], "0 or more"),
]


@pytest.mark.parametrize("arguments, keys, words", BROKEN, ids=lambda value: " ".join(value) if value else "")
def test_what_breaks_a_job_is_refused_by_key(resolved, machine, arguments, keys, words):
    found = check(resolved(*SLURM, *arguments), machine)
    assert len(found) == 1 and set(keys) <= set(found[0].keys) and words.strip("'") in found[0].text


@pytest.mark.parametrize(
    "arguments",
    [
        ["cluster.mem=0"],
        ["cluster.mem_per_cpu=4000M"],
        ["cluster.gres=none"],
        ["cluster.mail_type='END,FAIL'", "cluster.mail_user=me@here"],
        ["cluster.container=apptainer", "cluster.container_image=x.sif", "cluster.container_mounts=['/a:/b']"],
        ["cluster.sbatch_args=[--exclude=n1,--nice]", "cluster.srun_args=[--mpi=none,-v]"],
    ],
)
def test_what_slurm_takes_is_accepted(resolved, machine, arguments):
    assert check(resolved(*SLURM, *arguments), machine) == []


@pytest.mark.parametrize(
    "key", ["mem_per_cpu=1G", "python=/x", "container=pyxis", "mail_type=END", "sbatch_args=[--nice]"]
)
def test_what_means_something_to_slurm_only_is_refused_here(resolved, machine, key):
    (problem,) = check(resolved("cluster=local", f"cluster.{key}"), machine)
    assert problem.keys == ("cluster.name", f"cluster.{key.partition('=')[0]}")
