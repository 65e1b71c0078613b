"""One micro-batch of packed rows."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch

from trainer.config import ConfigError

IGNORE = -100  # a label that is not supervised
PADDING = -1  # the document id of padding


class DataError(ConfigError):
    """The data cannot be trained on; the text says what is there and what is needed."""


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on a device; does not wait for what is queued there, as a copy from pageable memory does."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True)
class Batch:
    """int64 tensors [B, S]. labels[i] is the target of position i; positions restart with each document.

    document_ids None: every row is one document that fills it. document_starts [documents + 1] int32: where each
    document, or stretch of padding, begins in the flattened batch, and B * S at the end. It and the counts are made
    once, on the host.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None
    document_starts: torch.Tensor | None = None
    supervised_tokens: int = -1
    real_tokens: int = -1

    def __post_init__(self):
        if self.supervised_tokens < 0:
            object.__setattr__(self, "supervised_tokens", int((self.labels != IGNORE).sum()))
        ids = self.document_ids
        if ids is not None and self.document_starts is None:
            object.__setattr__(self, "document_starts", starts_of(ids))
        if self.real_tokens < 0:
            object.__setattr__(self, "real_tokens", self.labels.numel() if ids is None else int((ids != PADDING).sum()))

    @property
    def inputs(self) -> tuple[torch.Tensor | None, ...]:
        """The arguments of a model that returns the loss."""
        return self.input_ids, self.position_ids, self.document_ids, self.labels, self.document_starts

    def to(self, device: torch.device) -> Batch:
        """The same batch on a device; does not wait for it."""
        moved = {
            name: to_device(tensor, device)
            for name in ("input_ids", "labels", "position_ids", "document_ids", "document_starts")
            if (tensor := getattr(self, name)) is not None
        }
        return dataclasses.replace(self, **moved)


@dataclass(frozen=True)
class Row:
    """One sequence as int64 arrays [S]; document_ids None: one document fills it."""

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    document_ids: np.ndarray | None

    def without_labels(self) -> Row:
        """A row to fill up a batch: it costs time and changes nothing."""
        return dataclasses.replace(self, labels=np.full_like(self.labels, IGNORE))


def starts_of(document_ids_BS: torch.Tensor) -> torch.Tensor:
    """Where each document or stretch of padding begins in the flattened batch, and its length at the end; int32."""
    first = torch.ones_like(document_ids_BS, dtype=torch.bool)
    first[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    starts = first.flatten().nonzero()[:, 0]
    return torch.cat((starts, starts.new_tensor([document_ids_BS.numel()]))).int()


def collate(rows: list[Row]) -> Batch:
    """Stack rows of one kind into a batch."""

    def stack(name: str) -> torch.Tensor:
        return torch.from_numpy(np.stack([getattr(row, name) for row in rows]))

    packed = rows[0].document_ids is not None
    names = ("input_ids", "labels", "position_ids") + (("document_ids",) if packed else ())
    return Batch(**{"document_ids": None, **{name: stack(name) for name in names}})
