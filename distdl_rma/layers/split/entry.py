"""Make layouts and partitions: of blocks that the ranks pass, and of grids as users write them.

Behind the door of split tensors no rank asks another for a shape: layouts say all. At the door a rank knows
its block only, and the ranks must agree once (``agree_on_layout``)::

    rank 0 passes 3 x 4, rank 1 passes 2 x 4, on a grid (2, 1)     ->     a tensor of 5 x 4, rows 3 + 2

The comparison is that of layers with plain shards (``ShapeAgreement``): an id for a known combination of all
ranks' blocks, and their rows only if ids differ. It is shorter here. The result is needed at once, so there
is nothing to start on a guess; and no operation is planned that some rank may have to give up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from numbers import Integral
from typing import Any

import torch

from distdl_rma.errors import ArgumentError, PartitionError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import DTYPES
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.site import THREAD, site_of
from distdl_rma.segments.consensus import Consensus
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.plan_cache import PlanCache, digest


def agree_on_layout(
    local: torch.Tensor, partition: Partition, problem: str, caller: Callable[..., Any]
) -> Decomposition:
    """Layout of the blocks that the ranks of a partition pass to ``caller``; collective over it, blocking.

    All ranks raise ``ShapeError`` if a rank has a problem with its block, or the blocks form no grid. A rank
    with a problem sends no block, null in JSON, so that the others do not wait for it.

    Plans are kept for each place of the program: a loader and a loss may pass blocks of other shapes in turn,
    and each of them finds its own again. A program that passes the same as before costs one small message.
    """
    machine = Machine.of(partition)
    THREAD.place = None
    site = site_of(machine, caller)
    cache: PlanCache[Decomposition, None] = site.kept(partition, PlanCache)
    block: Any = None
    if not problem:
        block = (DTYPES.index(local.dtype), local.requires_grad, local.dim()), tuple(local.shape)
    row = json.dumps(block).encode()
    # Three integers that are equal on all ranks if and only if all expect the same combination.
    words = number, *_ = cache.compared(row)
    consensus = Consensus.of(machine.segments, partition.ranks)
    alike = consensus.alike(f"{site.name} (shapes)", *words)
    if alike and number:
        if number != cache.number:
            cache.switch_to(number, row)
        return cache[number].plan
    # Equal and new on all ranks, or different: then each rank's row goes to all.
    rows = [row] * partition.size if alike else consensus.rows(row, consensus.largest[-1])
    if problem:
        raise ShapeError(f"SplitTensor.from_local: {problem}")
    found = dict(zip(partition.ranks, map(json.loads, rows), strict=True))
    for rank, its in found.items():
        if its is None:
            raise ShapeError(f"SplitTensor.from_local: rank {rank} passes what is no block")
    kinds = {tuple(each): rank for rank, (each, _) in found.items()}
    if len(kinds) > 1:
        (first, one), (second, other), *_ = kinds.items()
        raise ShapeError(
            f"SplitTensor.from_local: rank {one} passes {_text(first)} but rank {other} {_text(second)}"
        )
    shapes = {rank: tuple(shape) for rank, (_, shape) in found.items()}
    layout, key = lay.normal(Decomposition.from_local_shapes(partition, shapes)), digest(b"".join(rows))
    cache.switch_to(cache.add(layout, None, key, key, max(map(len, rows))), row)
    return layout


def _text(kind: tuple[int, ...]) -> str:
    # What ranks must have alike in a block, in words: shapes may differ, as long as they form a grid.
    dtype, needs, dims = kind
    return f"a block of {DTYPES[dtype]} with {dims} dimensions{' that requires a gradient' if needs else ''}"


def grid_for(
    grid: Any, machine: Machine | None, dims: int, ranks: tuple[int, ...] | None = None
) -> Partition:
    """Partition with ``dims`` dimensions of a user's ``"2x2"``, ``(2, 2)``, ``{"H": 2}`` or ``Partition``.

    A text or a tuple cuts the last dimensions, a dict those of its letters ``N``, ``C``, ``D``, ``H`` and
    ``W``. One number of a tuple or dict may be -1, for the ranks that the others leave. A grid is on
    ``ranks``, all of the machine if None.

    Examples
    --------
    >>> machine = Machine(MPI.COMM_WORLD)  # of two ranks
    >>> grid_for("2x1", machine, 4).shape  # batch and channels stay whole
    (1, 1, 2, 1)
    >>> grid_for({"H": -1}, machine, 4).shape
    (1, 1, 2, 1)
    """
    if isinstance(grid, Partition):
        if grid.dim != dims:
            raise PartitionError(f"grid {grid.shape} has {grid.dim} dimensions, the tensor has {dims}")
        return grid
    everyone, rank = (machine.ranks, machine.rank) if machine is not None else ((), 0)
    ranks = everyone if ranks is None else ranks
    shape = blocks_of(grid, dims, len(ranks))
    if shape is None:
        raise ArgumentError(
            f"a grid is given as '2x2', (2, 2), {{'H': 2, 'W': 2}} or a Partition, of at most {dims}"
            f" dimensions, got {grid!r}"
        )
    if min(shape) < 1 or prod(shape) != len(ranks):
        # Cites the user's grid: the shape has dimensions that the user did not name. The check is of what the
        # user wrote, before a Partition complains of numbers that the user never saw.
        raise PartitionError(
            f"grid {grid!r}: the numbers of blocks are at least 1, and their product is the number of ranks,"
            f" which is {len(ranks)}; a number of {{'H': -1, 'W': 2}} may be -1, for all ranks that the"
            " others leave"
        )
    return Partition(ranks, shape, rank, machine)


def blocks_of(grid: Any, dims: int, ranks: int) -> tuple[int, ...] | None:
    """The number of blocks in each dimension; None if the grid is of no known form."""
    # Letters are those of torch's documents, for tensors with batch and channels: "NCDHW" in 3-D, "NCHW" in
    # 2-D, "NCW" in 1-D.
    letters = "NC" + "DHW"[5 - dims :] if 3 <= dims <= 5 else ""
    numbers: tuple[int, ...] = ()
    if isinstance(grid, str):
        parts = grid.lower().split("x")
        numbers = tuple(int(part) for part in parts if part.strip().isdecimal())
        return (1,) * (dims - len(parts)) + numbers if len(numbers) == len(parts) <= dims else None
    if isinstance(grid, Mapping):
        unknown = [key for key in grid if key not in tuple(letters)]
        if unknown and not letters:
            raise ArgumentError(
                f"a grid of letters such as {unknown[0]!r} is of a tensor with batch, channels and 1 to 3"
                f" more dimensions, this one has {dims}: say (2, 1) for the last dimensions"
            )
        if unknown:
            # A letter of tensors with more dimensions.
            missing = "; or is the batch dimension of the tensor missing? x.unsqueeze(0) is a batch of one"
            raise ArgumentError(
                f"a grid names the dimensions {', '.join(letters)} of a tensor of {dims}, got {unknown[0]!r}"
                f"{missing if unknown[0] in tuple('NCDHW') else ''}"
            )
        grid = [grid.get(letter, 1) for letter in letters]
    if not isinstance(grid, Sequence) or not all(isinstance(n, Integral) for n in grid) or len(grid) > dims:
        return None
    numbers = (1,) * (dims - len(grid)) + tuple(map(int, grid))
    # The number for -1; -1 stays if none fits.
    rest = ranks // -prod(numbers) if numbers.count(-1) == 1 and 0 not in numbers else -1
    return tuple(rest if n == -1 else n for n in numbers)
