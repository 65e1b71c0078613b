"""sbatch, squeue, scancel and scontrol as scripts in a directory: what they say is what a test wrote, what they were asked
is in `calls`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SCRIPTS = {
    "sbatch": """
[ -e refuse ] && { cat refuse >&2; exit 1; }
id=$((4711 + $(ls | grep -c '[.]sh$')))
cp "$script" $id.sh; env >$id.env
echo Submitted batch job $id""",
    "squeue": """
[ -e queue ] || { echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; }
for word in "$@"; do case $word in --jobs=*) ids=${word#--jobs=};; esac; done
found=$(grep -E "^(${ids//,/|})[_|]" queue) || { echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; }
echo "$found" """,
    "sacct": "[ -e accounting ] || { echo 'Slurm accounting storage is disabled' >&2; exit 1; }\ncat accounting",
    "scancel": 'echo "$@" >>cancelled',
    "scontrol": 'echo "MaxArraySize            = $(cat max_array_size 2>/dev/null || echo 1001)"',
}


@dataclass(frozen=True)
class FakeSlurm:
    """The scripts, and the files through which a test talks to them."""

    path: Path

    def __post_init__(self) -> None:
        (self.path / "bin").mkdir(parents=True)
        for name, text in SCRIPTS.items():
            self.install(name, text)

    def install(self, name: str, text: str) -> None:
        """Put a command on PATH; it runs in this directory."""
        script = self.path / "bin" / name
        head = f'#!/bin/bash\nscript=$(realpath "$1" 2>/dev/null); cd {self.path}; echo "{name} $*" >>calls\n'
        script.write_text(f"{head}{text.strip()}\n")
        script.chmod(0o755)

    def says(self, *lines: str) -> None:
        """What squeue knows: `id|state|reason|start`; without lines it cannot reach SLURM."""
        if lines:
            (self.path / "queue").write_text("".join(f"{line}\n" for line in lines))
        else:
            (self.path / "queue").unlink(missing_ok=True)

    def read(self, name: str) -> str:
        """One of: calls, cancelled, <job id>.sh, <job id>.env; empty where there is none."""
        path = self.path / name
        return path.read_text() if path.exists() else ""

    def calls(self, command: str) -> list[str]:
        """Every call of a command, with its arguments."""
        return [line for line in self.read("calls").splitlines() if line.split()[0] == command]

    @property
    def scripts(self) -> list[str]:
        """What sbatch got, in order."""
        return [path.read_text() for path in sorted(self.path.glob("*.sh"))]
