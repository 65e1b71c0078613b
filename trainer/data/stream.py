"""Each rank's micro-batches of the endless sequence of rows.

A step takes the next global_batch_size rows, and micro-batch m of rank r those from
(m * world_size + r) * micro_batch_size on, so that one rank with four micro-batches sees what four ranks see with one.
No rank can run out before another.
"""

from __future__ import annotations

from trainer.config import RunConfig
from trainer.data.batch import Batch, DataError, collate
from trainer.data.rows import MakeRow, PackedRows, RandomRows, Rows
from trainer.data.sources import conversations, tokenize
from trainer.data.tokenizer import build_tokenizer


class TrainData:
    """This rank's part of the rows."""

    def __init__(self, rows: Rows, config: RunConfig, rank: int, world_size: int):
        self._rows, self._rank, self._world_size = rows, rank, world_size
        self._data = config.data

    @property
    def epoch(self) -> int:
        """The epoch of the newest row."""
        return self._rows.epoch

    @property
    def counts(self) -> dict[str, int]:
        """Documents, tokens, and what packing did with them in the current epoch, over all ranks."""
        return self._rows.counts

    def describe(self) -> list[str]:
        """Lines for the start-up log, warnings among them."""
        if self._data.name == "random":
            length = self._data.document_len or self._data.seq_len
            return [f"data: random token ids, documents of {length:,} tokens in rows of {self._data.seq_len:,}"]
        counts = self.counts
        filled = counts["packed_tokens"] / (counts["packed_tokens"] + counts["padded_tokens"])
        summary = (
            f"data: {self._data.path or self._data.name}, {counts['documents']:,} documents of {counts['tokens']:,} "
            f"tokens in {counts['rows']:,} rows of {self._data.seq_len:,} per epoch, {filled:.1%} filled; "
            f"{counts['supervised_tokens']:,} supervised, {counts['truncated_tokens']:,} truncated, "
            f"{counts['dropped_tokens']:,} dropped; {counts['held_out_documents']:,} documents held out"
        )
        lines = [summary]
        useless, lost = counts["documents_without_supervised_tokens"], counts["targets_lost_at_cuts"]
        if useless:
            share = useless / counts["documents"]
            lines.append(f"warning: {useless:,} documents ({share:.1%}) have no supervised token in their rows")
        if counts["documents_dropped"]:
            lines.append(
                f"warning: {counts['documents_dropped']:,} documents are longer than data.seq_len and dropped "
                "(data.long_documents=drop)"
            )
        if lost:
            lines.append(
                f"data: {lost:,} tokens behind a cut of a long document are no position's target (data.long_documents=split)"
            )
        return lines

    def micro_batches(self) -> list[Batch]:
        """This rank's part of the next optimizer step; every rank's position advances alike."""
        return [
            collate([make_row() for make_row in rows])
            for rows in self._mine(self._rows.take(self._data.global_batch_size))
        ]

    def eval_batches(self) -> list[Batch]:
        """This rank's part of the held-out documents, the same number of batches on every rank."""
        rows = self._rows.validation()
        if not rows:
            return []
        fillers = [lambda: rows[0]().without_labels()] * (-len(rows) % (self._data.micro_batch_size * self._world_size))
        return [collate([make_row() for make_row in mine]) for mine in self._mine(rows + fillers)]

    def _mine(self, rows: list[MakeRow]) -> list[list[MakeRow]]:
        size = self._data.micro_batch_size
        starts = range(self._rank * size, len(rows), self._world_size * size)
        return [rows[start : start + size] for start in starts]

    def state_dict(self) -> dict[str, int]:
        """The position, equal on every rank and for every number of ranks."""
        return self._rows.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rows.load_state_dict(state)


def build_data(config: RunConfig, rank: int, world_size: int) -> TrainData:
    """The data of this rank; raises DataError where there is too little of it, or it cannot be read."""
    data, seed = config.data, config.train.seed
    at_once = data.micro_batch_size * world_size
    if data.global_batch_size % at_once or not data.global_batch_size:
        raise DataError(
            f"data.global_batch_size={data.global_batch_size} is no multiple of data.micro_batch_size="
            f"{data.micro_batch_size} x {world_size} ranks = {at_once}"
        )
    if data.name == "random":
        return TrainData(RandomRows(data, config.model.vocab_size, seed), config, rank, world_size)
    tokenizer = build_tokenizer(config.model.tokenizer)
    if tokenizer.vocab_size > config.model.vocab_size:
        raise DataError(
            f"model.tokenizer={config.model.tokenizer} has {tokenizer.vocab_size} ids, more than "
            f"model.vocab_size={config.model.vocab_size}"
        )
    documents = tokenize(conversations(data), tokenizer)
    rows = PackedRows(data, documents, tokenizer.end_of_text, seed)
    refuse_too_little(rows, config)
    return TrainData(rows, config, rank, world_size)


def refuse_too_little(rows: PackedRows, config: RunConfig) -> None:
    """Raise DataError unless one epoch fills at least one step and one row, and there is something to learn."""
    data, counts = config.data, rows.counts
    found = (
        f"data={data.name}{f' ({data.path})' if data.path else ''} has {counts['documents']} training documents "
        f"({counts['held_out_documents']} more held out) with {counts['tokens']} tokens"
    )
    if counts["rows"] < data.global_batch_size or counts["packed_tokens"] < data.seq_len:
        dropped = counts["dropped_tokens"]
        raise DataError(
            f"too little data: {found}{f', {dropped} of them dropped as longer than a row' if dropped else ''}: "
            f"{counts['rows']} rows of data.seq_len={data.seq_len}. One step takes data.global_batch_size="
            f"{data.global_batch_size} rows = {data.global_batch_size * data.seq_len} tokens: "
            "give more data, a smaller data.seq_len or a smaller data.global_batch_size"
        )
    if not counts["supervised_tokens"]:
        raise DataError(f"{found}, none of them supervised: only what the role assistant says is trained on")
    if data.eval_every_steps and not counts["held_out_supervised_tokens"]:
        raise DataError(
            f"{found}: nothing to evaluate, as the held-out documents have no supervised token. "
            f"Raise data.validation_fraction={data.validation_fraction} or set data.eval_every_steps=0"
        )
