"""Token documents, compact in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Documents:
    """Token documents, one after the other: document i is ids[starts[i] : starts[i + 1]]."""

    ids: np.ndarray  # int32 [tokens]
    supervised: np.ndarray  # bool [tokens]: the token is a target
    starts: np.ndarray  # int64 [documents + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.starts)

    def content(self, document: int) -> bytes:
        """Equal for documents with equal tokens."""
        return self.ids[self.starts[document] : self.starts[document + 1]].tobytes()

    def select(self, indices: np.ndarray) -> Documents:
        """Some documents, in the given order."""
        lengths = self.lengths[indices]
        starts = np.concatenate(([0], np.cumsum(lengths)))
        # Position p of the result is p - (its document's start there) + (its document's start here).
        take = np.arange(starts[-1]) + np.repeat(self.starts[:-1][indices] - starts[:-1], lengths)
        return Documents(self.ids[take], self.supervised[take], starts)
