"""Start from a Hugging Face directory: every rank reads the rows of its own shards from the safetensors files.

Our parameter names are Hugging Face's without the leading "model.", except that an expert-parallel rank's experts are
two tensors here and three files' entries per expert there:
    layers.0.mlp.experts.gate_up_proj [L, 2 I, D]  <-  model.layers.0.mlp.experts.<e>.{gate_proj,up_proj}.weight
    layers.0.mlp.experts.down_proj    [L, D, I]    <-  model.layers.0.mlp.experts.<e>.down_proj.weight
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from trainer.config import ConfigError, ModelConfig
from trainer.models.moe import Experts
from trainer.parallel import local
from trainer.parallel.mesh import Mesh
from trainer.parallel.shard import local_rows

DTYPES = ("BF16", "F16", "F32", "F64")  # in safetensors' spelling; others need scales that we do not apply
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of each tensor in a Hugging Face directory, from its index or its only file."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{index} is no index of tensors: {type(error).__name__}: {error}") from error
    single = directory / "model.safetensors"
    if not single.is_file():
        raise ConfigError(
            f"model.weights={directory}: neither model.safetensors nor model.safetensors.index.json is there"
        )
    with readable(single), safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Name the file in what safetensors says of it, which it does not."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Copy the model.weights directory again") from error


def hugging_face_names(name: str, config: ModelConfig) -> list[str]:
    """The Hugging Face tensors that make up one of our (whole) parameters."""
    head, _, part = name.rpartition(".")
    if part in EXPERT_PARTS:
        return [
            f"model.{head}.{expert}.{source}.weight"
            for expert in range(config.num_experts)
            for source in EXPERT_PARTS[part]
        ]
    return [name if name.startswith("lm_head.") else f"model.{name}"]


def check_names(model: nn.Module, config: ModelConfig, files: dict[str, Path]) -> None:
    """Refuse a directory whose tensors are not exactly the model's; a tied head may be stored or left out."""
    expected = {theirs for name, _ in model.named_parameters() for theirs in hugging_face_names(name, config)}
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing, extra = sorted(expected - set(files)), sorted(set(files) - expected - optional)
    if missing or extra:
        raise ConfigError(
            f"model.weights={config.weights} does not fit model={config.name}: "
            f"{len(missing)} tensors missing {missing[:5]}, {len(extra)} not known {extra[:5]}"
        )


class _Reader:
    """Opens each safetensors file once."""

    def __init__(self, files: dict[str, Path]):
        self._files = files
        self._open: dict[Path, safe_open] = {}

    def rows(self, name: str, shape: tuple[int, ...], start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of a tensor, which must have the given shape as a whole."""
        path = self._files[name]
        with readable(path):
            if path not in self._open:
                self._open[path] = safe_open(path, framework="pt")
            entry = self._open[path].get_slice(name)
            if tuple(entry.get_shape()) != shape:
                raise ConfigError(f"{path}: {name} has shape {tuple(entry.get_shape())}, the model wants {shape}")
            if entry.get_dtype() not in DTYPES:
                raise ConfigError(f"{path}: {name} is {entry.get_dtype()}, quantised; give one of {', '.join(DTYPES)}")
            return entry[start:stop]


def _pieces(
    name: str, parameter: torch.Tensor, experts: Experts | None, ep_rank: int, reader: _Reader, config: ModelConfig
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of (part of this rank's shard, what belongs there)."""
    shard, (start, stop) = local(parameter), local_rows(parameter)
    if experts is None:
        if stop > start:
            yield shard, reader.rows(*hugging_face_names(name, config), tuple(parameter.shape), start, stop)
        return
    head, _, part = name.rpartition(".")
    sources = EXPERT_PARTS[part]
    out_features, in_features = parameter.shape[1] // len(sources), parameter.shape[2]
    for row in range(stop - start):
        expert = ep_rank * experts.num_local_experts + start + row
        for target, source in zip(shard[row].chunk(len(sources)), sources, strict=True):
            theirs = f"model.{head}.{expert}.{source}.weight"
            yield target, reader.rows(theirs, (out_features, in_features), 0, out_features)


@torch.no_grad()
def load_weights(model: nn.Module, config: ModelConfig, mesh: Mesh) -> None:
    """Fill this rank's shards from `config.weights`; raises ConfigError for missing, extra and misshapen tensors.

    A stored head of a tied model has to equal its embedding: a different one would be dropped in silence.
    """
    files = tensor_files(Path(config.weights))
    check_names(model, config, files)
    reader = _Reader(files)
    experts = {p: module for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for name, parameter in model.named_parameters():
        for target, source in _pieces(name, parameter, experts.get(parameter), mesh.ep_rank, reader, config):
            target.copy_(source)
    if config.tie_word_embeddings and "lm_head.weight" in files:
        start, stop = local_rows(model.embed_tokens.weight)
        shape = tuple(model.embed_tokens.weight.shape)
        head, embedding = (reader.rows(n, shape, start, stop) for n in ("lm_head.weight", "model.embed_tokens.weight"))
        if not torch.equal(head, embedding):
            raise ConfigError(
                f"model.weights={config.weights}: lm_head.weight differs from the embedding, but model="
                f"{config.name} ties them: set model.tie_word_embeddings=false"
            )
