"""Writes trainer/data/byte_tokenizer.json: byte-level BPE, 509 ids, on the sample conversations.

python benchmarks/train_byte_tokenizer.py
"""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from trainer.data.sources import sample_conversations
from trainer.data.tokenizer import CHATML

tokenizer = Tokenizer(models.BPE())
tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
tokenizer.decoder = decoders.ByteLevel()
trainer = trainers.BpeTrainer(
    vocab_size=512 - len(CHATML), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
)
texts = (message["content"] for conversation in sample_conversations() for message in conversation)
tokenizer.train_from_iterator(texts, trainer)
tokenizer.save(str(Path(__file__).parents[1] / "trainer" / "data" / "byte_tokenizer.json"), pretty=False)
