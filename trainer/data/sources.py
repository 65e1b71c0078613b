"""Where conversations come from, and how they become token documents."""

from __future__ import annotations

import importlib.util
import json
import socket
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import DataConfig
from trainer.data.batch import DataError
from trainer.data.documents import Documents
from trainer.data.tokenizer import Tokenizer

Conversation = list[dict[str, str]]  # OpenAI-style messages: role, content
ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED = ("tool_calls", "function_call", "weight")  # would change what is trained on


def tokenize(conversations: Iterable[Conversation], tokenizer: Tokenizer) -> Documents:
    """One document per conversation; raises DataError naming the one that the tokenizer cannot take."""
    ids, supervised, starts = array("i"), array("b"), array("q", [0])
    for number, conversation in enumerate(conversations, 1):
        try:
            document_ids, document_supervised = tokenizer.encode_chat(conversation)
        except DataError as error:
            raise DataError(f"conversation {number}: {error}") from error
        ids.extend(document_ids)
        supervised.extend(document_supervised)
        starts.append(len(ids))
    return Documents(np.array(ids, np.int32), np.array(supervised, bool), np.array(starts, np.int64))


def conversations(config: DataConfig) -> Iterator[Conversation]:
    """The conversations of data=sample or data=chat; raises DataError for what cannot be read."""
    if config.name == "sample":
        return sample_conversations()
    path = Path(config.path)
    if path.is_file():
        return jsonl_conversations(path)
    if config.path.endswith((".jsonl", ".json")) or (path.is_absolute() and not path.exists()):
        raise DataError(f"data.path={config.path}: no such file on {socket.gethostname()}")
    return dataset_conversations(config.path, config.split)


def sample_conversations() -> Iterator[Conversation]:
    """2,026 short English conversations of the package chatterbot-corpus (BSD), in a fixed order."""
    spec = importlib.util.find_spec("chatterbot_corpus")
    if spec is None or importlib.util.find_spec("yaml") is None:
        raise DataError(
            "data=sample needs the packages chatterbot-corpus and pyyaml: pip install chatterbot-corpus pyyaml, "
            "or data=random"
        )
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster where libyaml is there
    folder = Path(spec.submodule_search_locations[0]) / "data" / "english"
    for file in sorted(folder.glob("*.yml")):
        for turns in yaml.load(file.read_text(encoding="utf-8"), loader)["conversations"]:
            yield [{"role": ("user", "assistant")[i % 2], "content": str(turn)} for i, turn in enumerate(turns)]


def jsonl_conversations(path: Path) -> Iterator[Conversation]:
    """A JSON object with "messages" per line; empty lines are skipped, anything else is an error with its line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield conversation_at(f"{path}:{number}", line)


def dataset_conversations(name: str, split: str) -> Iterator[Conversation]:
    """Rows with "messages" of a Hugging Face dataset: a name, a directory of files, or one that was saved to disk."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"data.path={name} is no file on {socket.gethostname()}; a Hugging Face dataset needs the package "
            "datasets: pip install datasets, or give a JSONL file"
        ) from error
    try:
        if (Path(name) / "dataset_dict.json").is_file():
            rows = datasets.load_from_disk(name)[split]
        elif (Path(name) / "state.json").is_file():  # a single split
            rows = datasets.load_from_disk(name)
        else:
            rows = datasets.load_dataset(name, split=split)
    except (OSError, ValueError, KeyError) as error:  # not found, no network, no such split
        raise DataError(f"data.path={name}, data.split={split}: {type(error).__name__}: {error}") from error
    for number, row in enumerate(rows):
        yield conversation_at(f"data.path={name}, data.split={split}, row {number}", row)


def conversation_at(place: str, row: bytes | dict[str, Any]) -> Conversation:
    """The checked messages of a row or of a line of JSON; raises DataError naming its place."""
    try:
        return checked(json.loads(row.decode("utf-8-sig")) if isinstance(row, bytes) else row)
    except (ValueError, RecursionError, DataError) as error:  # no UTF-8, no JSON, no conversation
        raise DataError(f"{place}: {error}") from error


def checked(row: object) -> Conversation:
    """Role and content of the messages of a row; raises DataError that says what is wrong with it."""
    if not isinstance(row, dict) or "messages" not in row:
        found = f"the keys {', '.join(map(str, row))}" if isinstance(row, dict) else type(row).__name__
        raise DataError(f'expected {{"messages": [{{"role": ..., "content": ...}}, ...]}}, found {found}')
    messages = row["messages"]
    if not isinstance(messages, list) or not messages:
        raise DataError(f"messages is no list of at least one message: {str(messages)[:80]}")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: object, name: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise DataError(f"{name} is no object with role and content: {str(message)[:80]}")
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DataError(f"{name}.role is {str(role)[:80]!r}, not one of {', '.join(ROLES)}")
    for key in UNSUPPORTED:
        if message.get(key) not in (None, [], {}):
            raise DataError(f"{name}.{key} is not supported: only role and content are read")
    if not isinstance(content, str):
        raise DataError(f"{name}.content is no string: {str(content)[:80]}")
    content.encode()  # half a surrogate pair is no text: UnicodeEncodeError
    return {"role": role, "content": content}
