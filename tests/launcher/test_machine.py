"""SLURM counts as there where a cluster takes its jobs, not where only its client packages are installed."""

import pytest

from launcher import machine


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """`tools(sbatch="...", scontrol="...")`: a PATH on which these bash scripts lie."""
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setattr(machine, "_SLURM_CONF", (str(tmp_path / "slurm.conf"),))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()

    def make(**scripts: str) -> None:
        for name, text in scripts.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)

    return make


NO_CLUSTER = "echo 'scontrol: fatal: Could not establish a configuration source' >&2; exit 1"


def test_slurm_is_there_only_where_a_cluster_takes_jobs(tools, tmp_path, monkeypatch):
    assert not machine.takes_slurm_jobs()
    tools(sbatch="exit 0")
    assert machine.takes_slurm_jobs()
    tools(scontrol=NO_CLUSTER)
    assert not machine.takes_slurm_jobs()
    tools(scontrol="echo 'Slurmctld(primary) at there is DOWN'; exit 1")
    assert machine.takes_slurm_jobs()  # a cluster in trouble is still the one that was meant


@pytest.mark.parametrize("configured", ["environment", "file"])
def test_a_configuration_file_is_enough(tools, tmp_path, monkeypatch, configured):
    tools(sbatch="exit 0", scontrol=NO_CLUSTER)
    if configured == "file":
        (tmp_path / "slurm.conf").touch()
    else:
        monkeypatch.setenv("SLURM_CONF", "/somewhere/slurm.conf")
    assert machine.takes_slurm_jobs()
