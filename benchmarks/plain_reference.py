"""Runs a frozen run directory with the plain reference of every kernel, to compare its losses with the real run's.

    python -m launcher ... compile=none ac=none launch.submit=false   ->  RUN_DIR
    python benchmarks/plain_reference.py RUN_DIR

One process; a loop over experts, explicit attention scores, all logits at once.
"""

import sys
from pathlib import Path
from unittest.mock import patch

from trainer.__main__ import main
from trainer.kernels.attention import AttentionKernels, attention_reference
from trainer.kernels.cross_entropy import linear_cross_entropy_reference
from trainer.kernels.grouped_mm import grouped_mm_reference

if __name__ == "__main__":
    with (
        patch("trainer.models.moe.grouped_mm", grouped_mm_reference),
        patch("trainer.models.qwen3.attention", attention_reference),
        patch("trainer.kernels.attention.choose_kernels", lambda *_, **__: AttentionKernels()),
        patch("trainer.models.qwen3.linear_cross_entropy", linear_cross_entropy_reference),
    ):
        main(Path(sys.argv[1]).resolve())
