"""Where conversations come from, and how they become token documents."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer.config import DataConfig
from trainer.data.batch import DataError
from trainer.data.tokenizer import Tokenizer

Conversation = list[dict[str, str]]  # OpenAI-style messages: role, content


@dataclass(frozen=True)
class Documents:
    """Token documents, one after the other: document i is ids[starts[i] : starts[i + 1]]."""

    ids: np.ndarray  # int64
    supervised: np.ndarray  # bool: the token is a target
    starts: np.ndarray  # int64 [documents + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def piece(self, document: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Ids and supervision of a part of a document."""
        first = self.starts[document] + start
        return self.ids[first : first + length], self.supervised[first : first + length]

    def select(self, indices: np.ndarray) -> Documents:
        """Some documents, in the given order."""
        lengths = self.lengths[indices]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        # Position p of the result is p - (its document's start there) + (its document's start here).
        take = np.arange(starts[-1]) + np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        return Documents(self.ids[take], self.supervised[take], starts)


def tokenize(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Documents:
    """One document per conversation."""
    ids, supervised, starts = [], [], [0]
    for conversation in conversations:
        document_ids, document_supervised = tokenizer.encode_chat(conversation)
        ids += document_ids
        supervised += document_supervised
        starts.append(len(ids))
    return Documents(np.array(ids, np.int64), np.array(supervised, bool), np.array(starts, np.int64))


def conversations(config: DataConfig) -> Iterator[Conversation]:
    """The conversations of data=sample or data=chat; raises DataError for what cannot be read."""
    if config.name == "sample":
        return sample_conversations()
    if Path(config.path).is_file():
        return jsonl_conversations(Path(config.path))
    if config.path.endswith((".jsonl", ".json")):
        raise DataError(f"data.path={config.path}: no such file on this host")
    return dataset_conversations(config.path, config.split)


def sample_conversations() -> Iterator[Conversation]:
    """2,026 short English conversations of the package chatterbot-corpus (BSD), in a fixed order."""
    import yaml

    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None:
        raise DataError(
            "data=sample needs the package chatterbot-corpus: pip install chatterbot-corpus, or data=random"
        )
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    folder = Path(spec.submodule_search_locations[0]) / "data" / "english"
    for file in sorted(folder.glob("*.yml")):
        for turns in yaml.load(file.read_text(encoding="utf-8"), loader)["conversations"]:
            texts = [str(turn) for turn in turns if turn is not None]
            yield [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def jsonl_conversations(path: Path) -> Iterator[Conversation]:
    """A JSON object with "messages" per line; empty lines are skipped, anything else is an error with its line."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield checked(json.loads(line))
                except ValueError as error:
                    raise DataError(f"{path}:{number}: {error}") from error


def dataset_conversations(name: str, split: str) -> Iterator[Conversation]:
    """Rows with "messages" of a Hugging Face dataset (a name or a local directory)."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path={name} is no file here; as the name of a Hugging Face dataset it needs the package datasets: "
            "pip install datasets, or give a JSONL file"
        ) from error
    for number, row in enumerate(datasets.load_dataset(name, split=split)):
        try:
            yield checked(row)
        except ValueError as error:
            raise DataError(f"dataset {name}, split {split}, row {number}: {error}") from error


def checked(row: object) -> Conversation:
    """The messages of a row; raises ValueError that says what is wrong with it."""
    messages = row.get("messages") if isinstance(row, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError('expected {"messages": [{"role": ..., "content": ...}, ...]}')
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"a message needs the strings role and content, found {str(message)[:80]}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]
