"""A layer called with split tensors: it is given their blocks, and what it returns is split again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from distdl_rma.errors import PartitionError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.split import layout as lay
from distdl_rma.split.tensor import SplitTensor, local_of, mapped


def call_on_blocks(
    label: str,
    partitions: Sequence[Partition],
    call: Callable[..., Any],
    output: Callable[[], Decomposition | None],
    inputs: tuple[Any, ...],
) -> Any:
    """Result of a layer for split tensors, cut as its output is.

    ``partitions`` are those of its inputs, the last for all that follow; ``output`` says after the call how
    its output is cut. Plain tensors among the inputs are blocks, as the layer takes them.

    Raises ``PartitionError`` if an input is cut over other ranks, or otherwise.
    """
    blocks = []
    for at, x in enumerate(inputs):
        if not isinstance(x, SplitTensor):
            blocks.append(x)
            continue
        wanted, grid = partitions[min(at, len(partitions) - 1)], lay.on_grid(x.decomposition).partition
        if grid != wanted:
            raise PartitionError(
                f"{label!r}: input {at} is split over {grid}, the layer takes {wanted}: build the layer on"
                " the partition of the model, or move the tensor by redistribute() or Repartition"
            )
        with torch._C.DisableTorchFunctionSubclass():
            blocks.append(local_of(x))
    result = call(*blocks)
    found = output()
    if found is None:
        raise UnsupportedError(
            f"{label!r}: what it returns are no blocks of one tensor; call it with plain ones"
        )
    layout, rank = lay.normal(found), found.partition.me
    # A rank without a part of the output gets a tensor without elements, of any shape.
    return mapped(lambda y: SplitTensor(y.reshape(layout.box(rank).shape), layout), result)
