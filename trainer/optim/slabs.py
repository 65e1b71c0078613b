"""Where masters and moments lie: parameter after parameter in contiguous slabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import ProcessGroup

from trainer.memory.offload import Placement, flat_spans, move
from trainer.optim.rule import Matrices, Part, Rule
from trainer.parallel import local

ALIGNMENT = 64  # elements; parameters start at whole cache lines


@dataclass(frozen=True)
class LocalParameter:
    """This rank's part of a trained parameter."""

    name: str
    tensor: torch.Tensor  # the local shard, contiguous, sharing the parameter's storage; may have 0 elements
    parameter: nn.Parameter  # carries the hook; its .grad may be a DTensor
    decay: bool  # takes weight decay
    matrix: bool  # a matrix of a block, or a stack [experts, out, in]: Muon's
    shard_group: ProcessGroup | None  # over which dim 0 of the full tensor is sharded; None: whole here
    full_rows: int  # dim 0 of the full tensor

    @property
    def live(self) -> torch.Tensor:
        """The shard as it is now, flat: FSDP2 may pad a shard anew, and then the parameter has another storage."""
        return local(self.parameter).view(-1)


class Slab:
    """The parameters that share a rule and a decay, one after the other in each of a few flat tensors."""

    def __init__(self, members: list[LocalParameter], rule: Rule, decay: float, place: Placement):
        self.members, self.rule, self._decay = members, rule, decay
        self._ranges: dict[str, slice] = {}
        self.numel = 0
        for member in members:
            self._ranges[member.name] = slice(self.numel, self.numel + member.tensor.numel())
            self.numel += -(-member.tensor.numel() // ALIGNMENT) * ALIGNMENT
        self.master = place.zeros(self.numel, torch.float32, place.compute)
        self.moments = {kind: place.zeros(self.numel, torch.float32, place.moments) for kind in rule.moments}

    def view(self, slab: torch.Tensor, member: LocalParameter) -> torch.Tensor:
        """One parameter's part of a slab, flat."""
        return slab[self._ranges[member.name]]

    def states(self) -> dict[str, torch.Tensor]:
        """The slabs that outlive a step, by kind."""
        return {"master": self.master, **self.moments}

    def spans(self, member: LocalParameter, at_most: int) -> Iterator[tuple[slice, Matrices | None]]:
        """Ranges of a parameter's elements that are updated at once: `at_most` elements, but no less than a matrix."""
        shape = member.tensor.shape
        if not self.rule.of_matrices:
            yield from ((span, None) for span in flat_spans(shape.numel(), at_most))
        elif len(shape) == 2:  # also without a row here: the others need this rank when they gather
            yield slice(0, shape.numel()), Matrices((1, *shape), member.full_rows, member.shard_group)
        else:
            count, rows, columns = shape  # sharded by whole matrices
            at_once = max(1, at_most // (rows * columns))
            for first in range(0, count, at_once):
                last = min(first + at_once, count)
                span = slice(first * rows * columns, last * rows * columns)
                yield span, Matrices((last - first, rows, columns), rows)

    def part(
        self,
        member: LocalParameter,
        span: slice,
        matrices: Matrices | None,
        grad: torch.Tensor,
        scale: torch.Tensor | None,
        moments: dict[str, torch.Tensor] | None = None,
        parameter: torch.Tensor | None = None,
    ) -> Part:
        """What the rule needs to update a span; moments and parameter are the slab's and the live one unless given."""
        if moments is None:
            moments = {kind: self.view(slab, member)[span] for kind, slab in self.moments.items()}
        parameter = member.live[span] if parameter is None else parameter
        master = self.view(self.master, member)[span]
        return Part(master, grad[span], scale, moments, parameter, self._decay, matrices)

    def write_parameters(self) -> None:
        for member in self.members:
            move(member.live, self.view(self.master, member))

    def read_parameters(self) -> None:
        for member in self.members:
            move(self.view(self.master, member), member.live)
