"""From conversations to packed micro-batches."""

from trainer.data.batch import Batch
from trainer.data.stream import TrainData, build_data

__all__ = ["Batch", "TrainData", "build_data"]
