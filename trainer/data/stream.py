"""The endless stream of rows, the same on every rank, of which each rank takes its own.

Epoch follows epoch, each a new seeded packing of all documents. A step takes the next global_batch_size rows, and
micro-batch m of rank r those from (m * world_size + r) * micro_batch_size on, so that one rank with four micro-batches
sees what four ranks see with one. No rank can run out before another.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from trainer.config import DataConfig, RunConfig
from trainer.data.batch import IGNORE, PADDING, Batch, DataError, Row, collate
from trainer.data.packing import Packing, Piece, pack
from trainer.data.sources import Documents, conversations, tokenize
from trainer.data.tokenizer import build_tokenizer

_EPOCH, _VALIDATION, _RANDOM = range(3)  # what a random generator is for, beside the seed


class Rows(Protocol):
    """A source of rows with a position."""

    epoch: int
    counts: dict[str, int]

    def take(self, count: int) -> list[Row]: ...
    def validation(self) -> list[Row]: ...
    def state_dict(self) -> dict[str, int]: ...
    def load_state_dict(self, state: dict[str, int]) -> None: ...


class RandomRows:
    """Uniform token ids; one document fills a row. Endless, and every row a function of the seed and its number."""

    def __init__(self, config: DataConfig, vocab_size: int, seed: int):
        self._config, self._vocab_size, self._seed = config, vocab_size, seed
        self._row = 0
        self.epoch = 0
        self.counts: dict[str, int] = {}

    def take(self, count: int) -> list[Row]:
        first, self._row = self._row, self._row + count
        return [self._make(0, number) for number in range(first, self._row)]

    def validation(self) -> list[Row]:
        return [self._make(1, number) for number in range(8)] if self._config.validation_fraction else []

    def _make(self, split: int, number: int) -> Row:
        generator = np.random.default_rng([self._seed, _RANDOM, split, number])
        ids = generator.integers(0, self._vocab_size, self._config.seq_len, dtype=np.int64)
        return Row(ids, np.append(ids[1:], IGNORE), np.arange(len(ids)), None)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": 0, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._row = state["row"]


class PackedRows:
    """Rows of packed documents, of which a share is held out."""

    def __init__(self, config: DataConfig, documents: Documents, padding_id: int, seed: int):
        self._config, self._padding_id, self._seed = config, padding_id, seed
        order = np.random.default_rng([seed, _VALIDATION]).permutation(len(documents))
        held_out = int(np.ceil(config.validation_fraction * len(documents)))
        self._held_out = documents.select(np.sort(order[:held_out]))
        self._documents = documents.select(np.sort(order[held_out:]))
        self.epoch, self._row = 0, 0
        self._packing = self._pack_epoch()

    def _pack_epoch(self) -> Packing:
        order = np.arange(len(self._documents))
        if self._config.shuffle:
            order = np.random.default_rng([self._seed, _EPOCH, self.epoch]).permutation(len(order))
        return pack(self._documents.lengths, order, self._config.seq_len, self._config.long_documents)

    @property
    def rows_per_epoch(self) -> int:
        return len(self._packing.rows)

    @property
    def counts(self) -> dict[str, int]:
        """Of the current epoch."""
        packing, documents = self._packing, self._documents
        targets = np.add.reduceat(documents.supervised, documents.starts[:-1]) if len(documents) else np.zeros(0)
        return {
            "documents": len(documents),
            "documents_without_supervised_tokens": int((targets == 0).sum()),
            "tokens": len(documents.ids),
            "supervised_tokens": sum(self._supervised(piece) for row in packing.rows for piece in row),
            "truncated_tokens": packing.truncated_tokens,
            "dropped_tokens": packing.dropped_tokens,
            "padded_tokens": packing.padded_tokens,
            "rows": len(packing.rows),
        }

    def _supervised(self, piece: Piece) -> int:
        return int(self._documents.piece(*piece)[1][1:].sum())  # the first token of a piece is nobody's target

    def take(self, count: int) -> list[Row]:
        rows = []
        while len(rows) < count:
            if self._row == len(self._packing.rows):
                self.epoch, self._row = self.epoch + 1, 0
                self._packing = self._pack_epoch()
            rows.append(self._make(self._documents, self._packing.rows[self._row]))
            self._row += 1
        return rows

    def validation(self) -> list[Row]:
        """The held-out documents, in a fixed packing."""
        lengths = self._held_out.lengths
        packing = pack(lengths, range(len(lengths)), self._config.seq_len, self._config.long_documents)
        return [self._make(self._held_out, pieces) for pieces in packing.rows]

    def _make(self, documents: Documents, pieces: list[Piece]) -> Row:
        S = self._config.seq_len
        input_ids = np.full(S, self._padding_id, np.int64)
        labels, document_ids = np.full(S, IGNORE, np.int64), np.full(S, PADDING, np.int64)
        position_ids = np.zeros(S, np.int64)
        at = 0
        for number, piece in enumerate(pieces):
            ids, supervised = documents.piece(*piece)
            span = slice(at, at + piece.length)
            input_ids[span], document_ids[span] = ids, number
            position_ids[span] = np.arange(piece.length)
            labels[at : at + piece.length - 1] = np.where(supervised[1:], ids[1:], IGNORE)
            at += piece.length
        return Row(input_ids, labels, position_ids, document_ids)

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self._row = state["epoch"], state["row"]
        self._packing = self._pack_epoch()


class TrainData:
    """This rank's micro-batches of the stream."""

    def __init__(self, rows: Rows, config: RunConfig, rank: int, world_size: int):
        self._rows, self._rank, self._world_size = rows, rank, world_size
        self._size, self._batch_rows = config.data.micro_batch_size, config.data.global_batch_size

    @property
    def epoch(self) -> int:
        return self._rows.epoch

    @property
    def counts(self) -> dict[str, int]:
        """Documents, tokens, and what packing did with them in the current epoch; empty for random data."""
        return self._rows.counts

    def micro_batches(self) -> list[Batch]:
        """This rank's part of the next optimizer step; every rank's position advances alike."""
        return self._mine(self._rows.take(self._batch_rows))

    def eval_batches(self) -> list[Batch]:
        """This rank's part of the held-out split, the same number on every rank."""
        rows = self._rows.validation()
        if not rows:
            return []
        per_round = self._size * self._world_size
        blank = rows[0]
        filler = Row(blank.input_ids, np.full_like(blank.labels, IGNORE), blank.position_ids, blank.document_ids)
        return self._mine(rows + [filler] * (-len(rows) % per_round))

    def _mine(self, rows: list[Row]) -> list[Batch]:
        starts = range(self._rank * self._size, len(rows), self._world_size * self._size)
        return [collate(rows[start : start + self._size]) for start in starts]

    def state_dict(self) -> dict[str, int]:
        """The position, equal on every rank and for every number of ranks."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rows.load_state_dict(state)


def build_data(config: RunConfig, rank: int, world_size: int) -> TrainData:
    """The data of this rank; raises DataError where there is too little of it, or it cannot be read."""
    seed = config.train.seed
    if config.data.name == "random":
        return TrainData(RandomRows(config.data, config.model.vocab_size, seed), config, rank, world_size)
    tokenizer = build_tokenizer(config.model.tokenizer)
    rows = PackedRows(config.data, tokenize(conversations(config.data), tokenizer), tokenizer.end_of_text, seed)
    counts, needed = rows.counts, config.data.global_batch_size
    found = f"data={config.data.name} has {counts['documents']} training documents with {counts['tokens']} tokens"
    if counts["rows"] < needed:
        raise DataError(
            f"{found}, {counts['rows']} rows of data.seq_len={config.data.seq_len}; one step takes "
            f"data.global_batch_size={needed} rows: give more data, shorter sequences or a smaller batch"
        )
    if not counts["supervised_tokens"]:
        raise DataError(f"{found}, none of them supervised: only what follows the role assistant is trained on")
    if config.data.eval_every_steps and not rows.validation():
        raise DataError(f"{found} and none held out: raise data.validation_fraction or set data.eval_every_steps=0")
    return TrainData(rows, config, rank, world_size)
