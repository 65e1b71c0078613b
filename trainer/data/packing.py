"""Packing documents into rows of seq_len, every token accounted for. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

OPEN_ROWS = 256  # rows that may still take a document; more pack tighter and mix documents from further apart


class Piece(NamedTuple):
    """Part of a document in a row."""

    document: int
    start: int
    length: int


@dataclass
class Packing:
    """Rows of pieces. tokens of the documents = packed + truncated + dropped; packed + padded = rows * seq_len."""

    rows: list[list[Piece]] = field(default_factory=list)
    packed_tokens: int = 0
    truncated_tokens: int = 0
    dropped_tokens: int = 0
    padded_tokens: int = 0


def pack(lengths: np.ndarray, order: Iterable[int], seq_len: int, long_documents: str) -> Packing:
    """Best fit over the open rows, in the given order of documents.

    A document longer than seq_len is cut into pieces that attend only to themselves (`split`), loses its end
    (`truncate`), or is left out (`drop`).
    """
    packing = Packing()
    space: list[tuple[int, int]] = []  # (free positions, row) of the open rows, sorted
    for document in order:
        for piece in _pieces(int(document), int(lengths[document]), seq_len, long_documents, packing):
            at = bisect.bisect_left(space, (piece.length, 0))
            if at < len(space):
                free, row = space.pop(at)
            else:
                free, row = seq_len, len(packing.rows)
                packing.rows.append([])
            packing.rows[row].append(piece)
            packing.packed_tokens += piece.length
            if free > piece.length:
                bisect.insort(space, (free - piece.length, row))
            if len(space) > OPEN_ROWS:
                space.pop(0)  # the fullest
    packing.padded_tokens = len(packing.rows) * seq_len - packing.packed_tokens
    return packing


def _pieces(document: int, length: int, seq_len: int, long_documents: str, packing: Packing) -> list[Piece]:
    if length == 0:
        return []
    if length <= seq_len:
        return [Piece(document, 0, length)]
    if long_documents == "drop":
        packing.dropped_tokens += length
        return []
    if long_documents == "truncate":
        packing.truncated_tokens += length - seq_len
        return [Piece(document, 0, seq_len)]
    return [Piece(document, start, min(seq_len, length - start)) for start in range(0, length, seq_len)]
