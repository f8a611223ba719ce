"""Make layouts and partitions: of blocks that the ranks pass, and of grids as users write them."""

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

    All ranks raise ``ShapeError`` if a rank has a problem with its block, or the blocks form no grid.
    """
    machine = Machine.of(partition)
    THREAD.place = None
    site = site_of(machine, caller)
    cache: PlanCache[Decomposition, None] = site.kept(partition, PlanCache)
    block: Any = None
    if not problem:
        block = (DTYPES.index(local.dtype), local.requires_grad, local.dim()), tuple(local.shape)
    row = json.dumps(block).encode()
    words = number, *_ = cache.compared(row)
    consensus = Consensus.of(machine.segments, partition.ranks)
    alike = consensus.alike(f"{site.name} (shapes)", *words)
    if alike and number:
        if number != cache.number:
            cache.switch_to(number, row)
        return cache[number].plan
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
    dtype, needs, dims = kind
    return f"a block of {DTYPES[dtype]} with {dims} dimensions{' that requires a gradient' if needs else ''}"


def grid_for(
    grid: Any, machine: Machine | None, dims: int, ranks: tuple[int, ...] | None = None
) -> Partition:
    """Partition with ``dims`` dimensions of a user's ``"2x2"``, ``(2, 2)``, ``{"H": 2}`` or ``Partition``.

    A text or a tuple cuts the last dimensions, a dict those of its letters ``N``, ``C``, ``D``, ``H`` and
    ``W``. One number of a tuple or dict may be -1, for the ranks that the others leave. A grid is on
    ``ranks``, all of the machine if None.
    """
    if isinstance(grid, Partition):
        if grid.dim != dims:
            raise PartitionError(f"grid {grid.shape} has {grid.dim} dimensions, the tensor has {dims}")
        return grid
    everyone, rank = (machine.ranks, machine.rank) if machine is not None else ((), 0)
    ranks = everyone if ranks is None else ranks
    shape = _blocks(grid, dims, len(ranks))
    if shape is None:
        raise ArgumentError(
            f"a grid is given as '2x2', (2, 2), {{'H': 2, 'W': 2}} or a Partition, of at most {dims}"
            f" dimensions, got {grid!r}"
        )
    if min(shape) < 1 or prod(shape) != len(ranks):
        # Cites the user's grid: the shape has dimensions that the user did not name.
        raise PartitionError(
            f"grid {grid!r}: the numbers of blocks are at least 1, and their product is the number of ranks,"
            f" which is {len(ranks)}; a number of {{'H': -1, 'W': 2}} may be -1, for all ranks that the"
            " others leave"
        )
    return Partition(ranks, shape, rank, machine)


def _blocks(grid: Any, dims: int, ranks: int) -> tuple[int, ...] | None:
    # The number of blocks in each dimension; None if the grid is of no known form.
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
