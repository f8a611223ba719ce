"""Concatenation along channels of tensors that may be distributed differently."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Unpack

import torch

from distdl_rma.errors import PartitionError, ShapeError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.core.layer import nbytes_of
from distdl_rma.layers.moves.base import MovementLayer
from distdl_rma.ops.core.autograd import GradientNeeds, anchored, tells_peers
from distdl_rma.ops.core.tensors import trouble_with
from distdl_rma.ops.moves.concat import CHANNELS, Concat, joined


class DistributedConcat(MovementLayer[Concat]):
    """Concatenation along the channels, dimension 1, of tensors split over ranks in any of their dimensions.

    Local inputs: the shards of this rank. Local output: the balanced shard of the concatenated tensor on
    P_y; where that is the partition of the first input, the batch stays cut as it is there. Where all
    partitions are the same and cut no channels, the shards of the output are those of the inputs, and
    nothing is communicated: then only the ranks that see what is wrong with a call raise; the others learn
    it in their next wait, and the machine cannot be used afterwards.

    Inputs of different types become one type, as in ``torch.cat``. Each travels as it is, and its gradient
    comes back in its own type.

    Parameters
    ----------
    P_xs
        Partition of each input, as many dimensions as the tensors.
    P_y
        Partition of the output; that of the first input if None.

    Notes
    -----
    Interface document, chapter 5; requirement A20.
    """

    def __init__(
        self,
        P_xs: Sequence[Partition],
        P_y: Partition | None = None,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        kind, P_xs = type(self).__name__, tuple(P_xs)
        if not P_xs:
            raise PartitionError(f"{kind}: needs the partition of one input at least, got none")
        P_y = P_xs[0] if P_y is None else P_y
        for which, partition in (*((f"P_xs[{at}]", P_x) for at, P_x in enumerate(P_xs)), ("P_y", P_y)):
            if partition.dim != P_y.dim or partition.dim <= CHANNELS:
                raise PartitionError(
                    f"{kind}: {which} has {partition.dim} dimensions {partition.shape} but P_y {P_y.dim}"
                    f" {P_y.shape}; all need those of the tensors, batch and channels first"
                )
        super().__init__(P_xs, P_y, name=name, **callbacks)
        self._stays = all(P_x == P_y for P_x in P_xs) and P_y.shape[CHANNELS] == 1

    def plan(self, facts: dict[int, InputFacts]) -> Concat:
        """Each input to where its channels are in the output."""
        inputs = []
        for at, P_x in enumerate(self.P_xs):
            try:
                inputs.append(source_of(P_x, {rank: fact.of(at) for rank, fact in facts.items()}))
            except ShapeError as error:
                raise ShapeError(f"input {at}: {error}") from None
        sources, dtypes = zip(*inputs, strict=True)
        return Concat(self.site, sources, dtypes, self.P_y, keep_batch=self.P_xs[0] == self.P_y)

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return f"P_xs={[P_x.shape for P_x in self.P_xs]}, P_y={self.P_y.shape}"

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of all inputs."""
        return sum(nbytes_of(x) for x in inputs)

    @tells_peers
    def connect(  # type: ignore[override]
        self, shapes: Sequence[Sequence[int]] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """As of every layer, with the global shape of each input; ``dtype`` is torch's default if None."""
        given = [None] * len(self.P_xs) if shapes is None else list(shapes)
        if self._stays or self.agreement is None:
            self._count(given)
        pairs = enumerate(zip(self.P_xs, given, strict=False))
        xs = [self.expected(P_x, shape, dtype, at) for at, (P_x, shape) in pairs]
        if not self._stays:
            # One too many is for all ranks to refuse.
            self.connect_for([*xs, *[torch.empty(0)] * (len(given) - len(xs))])

    @tells_peers
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """Concatenate ``inputs``, the local shards, or tensors without elements outside of a partition."""
        if self.agreement is None:
            self._count(inputs)
        elif self._stays:
            dtype = self._check(inputs)
            return torch.cat([x.to(dtype) for x in inputs], CHANNELS)
        return self.apply_to(*inputs)

    def leave(self, y: torch.Tensor, x: torch.Tensor, needs: GradientNeeds) -> torch.Tensor:
        """Result as the caller gets it; in a graph if any rank's is, wherever the types are not the same."""
        return anchored(super().leave(y, x, needs), needs.any)

    def _count(self, given: Sequence[object]) -> None:
        if len(given) != len(self.P_xs):
            raise self._refuse(f"takes {len(self.P_xs)} inputs, got {len(given)}")

    def _check(self, inputs: Sequence[torch.Tensor]) -> torch.dtype:
        self._count(inputs)
        for at, x in enumerate(inputs):
            problem = trouble_with(x, f"input {at}")
            if problem:
                raise self._refuse(problem)
        try:
            return joined([tuple(x.shape) for x in inputs], [x.dtype for x in inputs], self.P_y.dim)[1]
        except ShapeError as error:
            raise self._refuse(str(error)) from None

    def _refuse(self, problem: str) -> ShapeError:
        # Nobody else is asked: what is wrong here may be right elsewhere, and the others would wait.
        wrong = ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if self.machine.size > 1 and self.machine.rank in self.members:
            self.machine.fail(wrong)
        return wrong
