"""The endless sequence of rows, the same on every rank: epoch follows epoch, each a new seeded packing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np

from trainer.config import DataConfig
from trainer.data.batch import IGNORE, PADDING, DataError, Row
from trainer.data.documents import Documents
from trainer.data.packing import Packing, pack

_EPOCH, _VALIDATION, _RANDOM = range(3)  # what a random generator is for, beside the seed

MakeRow = Callable[[], Row]  # a rank makes only the rows that it takes


class Rows(Protocol):
    """A sequence of rows with a position."""

    epoch: int

    @property
    def counts(self) -> dict[str, int]: ...
    def take(self, count: int) -> list[MakeRow]: ...
    def validation(self) -> list[MakeRow]: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


class RandomRows:
    """Uniform token ids in documents of data.document_len. Every row is a function of the seed and of its number."""

    def __init__(self, config: DataConfig, vocab_size: int, seed: int):
        self._config, self._vocab_size, self._seed = config, vocab_size, seed
        self._row = 0
        self.epoch = 0  # for ever: no row comes twice

    @property
    def counts(self) -> dict[str, int]:
        """Of all rows so far."""
        rows, seq_len = self._row, self._config.seq_len
        documents = -(-seq_len // (self._config.document_len or seq_len))
        return {
            "documents": rows * documents,
            "tokens": rows * seq_len,
            "supervised_tokens": rows * (seq_len - documents),
            "truncated_tokens": 0,
            "dropped_tokens": 0,
            "padded_tokens": 0,
            "rows": rows,
        }

    def take(self, count: int) -> list[MakeRow]:
        first, self._row = self._row, self._row + count
        return [partial(self._make, 0, number) for number in range(first, self._row)]

    def validation(self) -> list[MakeRow]:
        """As many as one step takes, of another sequence."""
        count = self._config.global_batch_size if self._config.validation_fraction else 0
        return [partial(self._make, 1, number) for number in range(count)]

    def _make(self, split: int, number: int) -> Row:
        generator = np.random.default_rng([self._seed, _RANDOM, split, number])
        ids = generator.integers(0, self._vocab_size, self._config.seq_len, dtype=np.int64)
        labels, positions = np.append(ids[1:], IGNORE), np.arange(len(ids))
        length = self._config.document_len
        if not length:
            return Row(ids, labels, positions, None)
        labels[length - 1 :: length] = IGNORE  # the next token belongs to another document
        return Row(ids, labels, positions % length, positions // length)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._row = state["row"]


class PackedRows:
    """Rows of packed documents, of which a share is held out."""

    def __init__(self, config: DataConfig, documents: Documents, padding_id: int, seed: int):
        self._config, self._padding_id, self._seed = config, padding_id, seed
        held_out = hold_out(documents, config.validation_fraction, seed)
        self._documents = documents.select(np.flatnonzero(~held_out))
        self._held_out = documents.select(np.flatnonzero(held_out))
        self._held_out_packing = self._pack(self._held_out, np.arange(len(self._held_out)))
        self._held_out_targets = count(self._held_out, self._held_out_packing)["supervised_tokens"]
        self._start_epoch(0, 0)

    def _pack(self, documents: Documents, order: np.ndarray) -> Packing:
        return pack(documents.lengths, order, self._config.seq_len, self._config.long_documents)

    def _start_epoch(self, epoch: int, row: int) -> None:
        order = np.arange(len(self._documents))
        if self._config.shuffle:
            order = np.random.default_rng([self._seed, _EPOCH, epoch]).permutation(order)
        self.epoch, self._row = epoch, row
        self._packing = self._pack(self._documents, order)
        self.counts = count(self._documents, self._packing)
        self.counts["held_out_documents"] = len(self._held_out)
        self.counts["held_out_supervised_tokens"] = self._held_out_targets

    def take(self, count: int) -> list[MakeRow]:
        rows = []
        while len(rows) < count:
            if self._row == len(self._packing):
                self._start_epoch(self.epoch + 1, 0)
            rows.append(partial(self._make, self._documents, self._packing, self._row))
            self._row += 1
        return rows

    def validation(self) -> list[MakeRow]:
        """The held-out documents, always packed alike."""
        packing = self._held_out_packing
        return [partial(self._make, self._held_out, packing, row) for row in range(len(packing))]

    def _make(self, documents: Documents, packing: Packing, row: int) -> Row:
        pieces = slice(packing.rows[row], packing.rows[row + 1])
        lengths = packing.length[pieces]
        ends = np.cumsum(lengths)
        used, padding = ends[-1], self._config.seq_len - ends[-1]
        positions = np.arange(used) - np.repeat(ends - lengths, lengths)
        first = documents.starts[packing.document[pieces]] + packing.start[pieces]
        take = np.repeat(first, lengths) + positions  # into the documents' tokens
        ids = documents.ids[take].astype(np.int64)
        targets = np.where(documents.supervised[take], ids, IGNORE)
        labels = np.append(targets[1:], IGNORE)
        labels[ends - 1] = IGNORE  # the next token belongs to another piece
        return Row(
            input_ids=np.pad(ids, (0, padding), constant_values=self._padding_id),
            labels=np.pad(labels, (0, padding), constant_values=IGNORE),
            position_ids=np.pad(positions, (0, padding)),
            document_ids=np.pad(np.repeat(np.arange(len(lengths)), lengths), (0, padding), constant_values=PADDING),
        )

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Raises DataError where the position does not exist in this data."""
        self._start_epoch(state["epoch"], state["row"])
        if self._row > len(self._packing):
            raise DataError(
                f"the run is to continue at row {self._row} of epoch {self.epoch}, which has {len(self._packing)} rows "
                "now: data.path or another key of data has changed"
            )


def hold_out(documents: Documents, fraction: float, seed: int) -> np.ndarray:
    """Which documents are held out: bool [documents], at most ceil(fraction * documents) of them.

    Documents with the same tokens go the same way, else the model would be tested on what it has read.
    """
    count = int(np.ceil(fraction * len(documents)))
    chosen = np.zeros(len(documents), bool)
    if not count:
        return chosen
    same: dict[bytes, list[int]] = {}
    for document in range(len(documents)):
        same.setdefault(documents.content(document), []).append(document)
    groups = list(same.values())
    for group in np.random.default_rng([seed, _VALIDATION]).permutation(len(groups)):
        if len(groups[group]) <= count:
            chosen[groups[group]] = True
            count -= len(groups[group])
    return chosen


def count(documents: Documents, packing: Packing) -> dict[str, int]:
    """What became of the documents in this packing, in tokens unless the name says otherwise."""
    first = documents.starts[packing.document] + packing.start
    supervised_before = np.concatenate(([0], np.cumsum(documents.supervised)))
    # The first token of a piece is no position's target.
    targets = supervised_before[first + packing.length] - supervised_before[first + 1]
    targets_of_document = np.bincount(packing.document, weights=targets, minlength=len(documents))
    packed_documents = np.unique(packing.document)
    return {
        "documents": len(documents),
        "documents_dropped": len(documents) - len(packed_documents),
        "documents_without_supervised_tokens": int((targets_of_document[packed_documents] == 0).sum()),
        "tokens": len(documents.ids),
        "packed_tokens": packing.packed_tokens,
        "truncated_tokens": packing.truncated_tokens,
        "dropped_tokens": packing.dropped_tokens,
        "padded_tokens": packing.padded_tokens,
        "supervised_tokens": int(targets.sum()),
        "targets_lost_at_cuts": int(documents.supervised[first[packing.start > 0]].sum()),
        "rows": len(packing),
    }
