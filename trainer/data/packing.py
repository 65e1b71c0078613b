"""Packing documents into rows of seq_len, every token accounted for. Pure."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

OPEN_ROWS = 256  # rows that may still take a document; more pack tighter and mix documents from further apart


@dataclass(frozen=True)
class Packing:
    """Pieces of documents, row after row: those of row r are rows[r] up to rows[r + 1].

    The documents' tokens = packed + truncated + dropped; packed + padded = number of rows * seq_len.
    """

    document: np.ndarray  # int64 [pieces]
    start: np.ndarray  # int64 [pieces], within the document
    length: np.ndarray  # int64 [pieces]
    rows: np.ndarray  # int64 [rows + 1]
    packed_tokens: int
    truncated_tokens: int
    dropped_tokens: int
    padded_tokens: int

    def __len__(self) -> int:
        return len(self.rows) - 1


def pack(lengths: np.ndarray, order: np.ndarray, seq_len: int, long_documents: str) -> Packing:
    """Pack all documents in this order.

    A document longer than seq_len is cut into pieces that attend only to themselves (`split`), loses its end
    (`truncate`), or is left out (`drop`).
    """
    long = lengths > seq_len
    dropped = int(lengths[long].sum()) if long_documents == "drop" else 0
    truncated = int((lengths[long] - seq_len).sum()) if long_documents == "truncate" else 0
    used = order[lengths[order] > 0]
    if long_documents == "drop":
        used = used[~long[used]]
    pieces = -(-lengths[used] // seq_len) if long_documents == "split" else np.ones_like(used)
    document = np.repeat(used, pieces)
    # A piece's number within its document: its place less the place of the document's first.
    number = np.arange(len(document)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = number * seq_len
    length = np.minimum(lengths[document] - start, seq_len)
    row, row_count = best_fit(length.tolist(), seq_len)
    by_row = np.argsort(row, kind="stable")
    packed = int(length.sum())
    return Packing(
        document=document[by_row],
        start=start[by_row],
        length=length[by_row],
        rows=np.concatenate(([0], np.cumsum(np.bincount(row, minlength=row_count)))),
        packed_tokens=packed,
        truncated_tokens=truncated,
        dropped_tokens=dropped,
        padded_tokens=row_count * seq_len - packed,
    )


def best_fit(lengths: list[int], seq_len: int) -> tuple[np.ndarray, int]:
    """The row of each piece, and the number of rows: a piece goes to the open row that it fills best, or a new one."""
    rows = np.empty(len(lengths), np.int64)
    row_count = 0
    space: list[tuple[int, int]] = []  # (free positions, row) of the open rows, sorted
    for piece, length in enumerate(lengths):
        at = bisect.bisect_left(space, (length, 0))
        if at < len(space):
            free, row = space.pop(at)
        else:
            free, row = seq_len, row_count
            row_count += 1
        rows[piece] = row
        if free > length:
            bisect.insort(space, (free - length, row))
            if len(space) > OPEN_ROWS:
                space.pop(0)  # the fullest
    return rows, row_count
