"""From conversations to packed micro-batches."""

from trainer.data.batch import Batch, DataError
from trainer.data.stream import TrainData, build_data
from trainer.data.tokenizer import Tokenizer, build_tokenizer

__all__ = ["Batch", "DataError", "Tokenizer", "TrainData", "build_data", "build_tokenizer"]
