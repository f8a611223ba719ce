"""Dimensions of a grid, as the arguments of layers name them."""

from __future__ import annotations

from collections.abc import Iterable
from operator import index as as_int

from distdl_rma.errors import PartitionError
from distdl_rma.geometry.partition import Partition

# One grid dimension or several.
Axes = int | Iterable[int]


def chosen_axes(kind: str, P: Partition, what: str, axes: Axes | None, keep: Axes | None) -> tuple[int, ...]:
    """Grid dimensions that a layer works along, given themselves or by those that it keeps; sorted.

    Raises
    ------
    PartitionError
        If both or none are given, or one is no integer, out of range or listed twice.
    """
    if (axes is None) == (keep is None):
        raise PartitionError(f"{kind}: give either {what} or axes_keep, got {what}={axes}, axes_keep={keep}")
    given = axes if keep is None else keep
    try:
        listed = [as_int(axis) for axis in (given if isinstance(given, Iterable) else [given])]  # type: ignore[arg-type]
    except TypeError as error:
        raise PartitionError(f"{kind}: axes are integers, got {given}: {error}") from None
    for axis in listed:
        if not -P.dim <= axis < P.dim:
            raise PartitionError(f"{kind}: axis {axis} is out of range for grid {P.shape}")
    found = {axis % P.dim for axis in listed}
    if len(found) < len(listed):
        raise PartitionError(f"{kind}: an axis is listed more than once in {listed} for grid {P.shape}")
    return tuple(d for d in range(P.dim) if (d in found) == (keep is None))
