"""Writes trainer/data/byte_tokenizer.json: byte-level BPE on the sample conversations, 509 ids and ChatML's three.

python benchmarks/train_byte_tokenizer.py [PATH]
"""

import sys
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.sources import sample_conversations
from trainer.data.tokenizer import CHATML


def train() -> Tokenizer:
    """The same tokenizer at every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=512 - len(CHATML), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = (message["content"] for conversation in sample_conversations() for message in conversation)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens(list(CHATML))
    return tokenizer


if __name__ == "__main__":
    default = Path(__file__).parents[1] / "trainer" / "data" / "byte_tokenizer.json"
    train().save(sys.argv[1] if len(sys.argv) > 1 else str(default), pretty=False)
