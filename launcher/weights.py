"""Whether the Hugging Face directory in model.weights is the model that is configured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.problem import Problem, files_are_here, problem
from trainer.config import RunConfig

# fmt: off
SAME_NAME = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size", "rms_norm_eps",
)
# fmt: on
SPARSE_NAMES = ("num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step")
UNSUPPORTED = {"attention_bias": (False, None), "use_sliding_window": (False, None), "hidden_act": ("silu", None)}


def check_weights(config: RunConfig) -> Iterator[Problem]:
    """Problems of model.weights; none where it is empty, or where the run starts elsewhere and it cannot be seen."""
    if not config.model.weights:
        return
    directory = Path(config.model.weights)
    if not files_are_here(config) and not directory.exists():
        return
    key, random = ["model.weights"], "model.weights= for random weights"
    try:
        theirs = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        what = "has no config.json: not a Hugging Face directory" if directory.is_dir() else "is not a directory"
        yield problem(config, key, what, random)
        return
    except (OSError, ValueError) as error:
        yield problem(config, key, f"its config.json cannot be read ({error})", random)
        return
    if not any((directory / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json")):
        yield problem(config, key, "has neither model.safetensors nor model.safetensors.index.json", random)
    yield from _compare(config, theirs)


def _compare(config: RunConfig, theirs: dict[str, Any]) -> Iterator[Problem]:
    expected = published(theirs)
    sparse, dense = config.model.num_sparse_layers, config.model.num_hidden_layers - config.model.num_sparse_layers
    for name, value in expected.items():
        if (name in SPARSE_NAMES or name == "mlp_only_layers") and not sparse:
            continue
        if name == "intermediate_size" and not dense:
            continue
        if getattr(config.model, name) != value:
            key = f"model.{name}"
            fit = f"{key}={json.dumps(value) if not isinstance(value, str) else value}"
            yield problem(config, [key, "model.weights"], f"its config.json says {value}", fit)
    for name, allowed in UNSUPPORTED.items():
        if theirs.get(name) not in allowed:
            yield problem(
                config, ["model.weights"], f"its config.json has {name}={theirs[name]}, which is not built here"
            )
    rope = theirs.get("rope_parameters") or theirs.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        yield problem(config, ["model.weights"], f"its config.json scales positions ({kind}), which is not built here")


def published(theirs: dict[str, Any]) -> dict[str, Any]:
    """Our keys as a Hugging Face config.json has them, old spellings and new; keys that it leaves out are left out."""
    found = {
        name: theirs[name] for name in (*SAME_NAME, *SPARSE_NAMES, "head_dim", "intermediate_size") if name in theirs
    }
    found["num_experts"] = theirs.get("num_experts", theirs.get("num_local_experts", 0)) or 0
    found["mlp_only_layers"] = theirs.get("mlp_only_layers") or []
    found["tie_word_embeddings"] = bool(theirs.get("tie_word_embeddings", False))
    rope = theirs.get("rope_parameters") or {}
    theta = theirs.get("rope_theta", rope.get("rope_theta"))
    if theta is not None:
        found["rope_theta"] = float(theta)
    return found
