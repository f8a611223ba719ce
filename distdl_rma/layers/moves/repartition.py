"""A tensor from one Cartesian partition to another."""

from __future__ import annotations

from typing import Unpack

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.agreement import InputFacts, source_of
from distdl_rma.layers.core.callbacks import Callbacks
from distdl_rma.layers.moves.base import MovementLayer
from distdl_rma.ops.moves.redistribute import repartition
from distdl_rma.ops.moves.staged import StagedMove


class Repartition(MovementLayer[StagedMove]):
    """Move a tensor from one Cartesian partition to another; the result is balanced.

    As of all layers that only move data, a rank's result is memory of its own, also where it is its input.
    The adjoint moves gradients back to where the input came from.

    Parameters
    ----------
    P_x, P_y
        Input and output partition, with as many dimensions as the tensor.
    preserve_batch
        Whether outputs without elements keep the batch size, as shape (b, 0).

    Notes
    -----
    Repartition document; requirement B5.
    """

    def __init__(
        self,
        P_x: Partition,
        P_y: Partition,
        preserve_batch: bool = True,
        *,
        name: str | None = None,
        **callbacks: Unpack[Callbacks],
    ) -> None:
        if P_x.dim != P_y.dim:
            raise PartitionError(
                f"{type(self).__name__}: P_x has {P_x.dim} dimensions {P_x.shape} but P_y has {P_y.dim}"
                f" {P_y.shape}"
            )
        super().__init__(P_x, P_y, preserve_batch, name=name, **callbacks)

    def plan(self, facts: dict[int, InputFacts]) -> StagedMove:
        """Blocks as they are to balanced ones."""
        source, dtype = source_of(self.P_x, facts)
        return repartition(self.site, source, self.P_y, dtype)


# The name by which this movement is known as well.
DistributedTranspose = Repartition
