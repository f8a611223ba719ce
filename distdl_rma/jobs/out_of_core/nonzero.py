"""Where a volume is not 0: the box around this, and the zeros that it encloses.

Zeros are *enclosed* if no path of zeros, by faces, leads from them to the border of the volume. Boxes are
looked at one by one, each with the first row of the next one. In this row both number the components of zeros
alike, for both see the same zeros, so that a few numbers join the components of boxes::

    row 0    x x x x x x      x  not 0        box 0, of rows 0 to 2 and row 3: a component does not reach the
        1    x . . x . x      .  zeros        border, one is enclosed
        2    x . x x x x
        3    x . . . x x      both boxes have one piece of zeros in row 3, which joins
        4    x x x . x x
        5    x x x . x x      box 1, of rows 3 to 5: its component reaches the border, so that of box 0 does
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from distdl_rma.errors import DataError
from distdl_rma.jobs.out_of_core.prepared import Prepared, longest, of_boxes
from distdl_rma.jobs.out_of_core.processes import Processes
from distdl_rma.layers.sources.reading import Slices
from distdl_rma.layers.sources.remote import needed

# It is not 0, and changes no sum of floats but of numbers that are as small.
_LEAST = torch.finfo(torch.float32).tiny


def box_of_nonzero(source: Prepared, processes: Processes) -> Slices:
    """The box in space outside of which all channels are 0; collective, blocking. ``DataError`` if all is."""

    def ends(box: Slices) -> list[torch.Tensor]:
        places = (source[box] != 0).any(0).nonzero() + torch.tensor([each.start for each in box[1:]])
        return [places.amin(0), places.amax(0) + 1] if len(places) else []

    found = [each for part in of_boxes(source, processes, ends) for each in part]
    if not found:
        raise DataError(f"predict: {source.path}: all elements are 0")
    rows = torch.stack(found)
    return tuple(map(slice, rows.amin(0).tolist(), rows.amax(0).tolist()))


class _Zeros(NamedTuple):
    """Components of zeros of a box, by numbers from 1 to ``total``, 0 for other elements.

    ``first`` and ``last`` have those of the pieces of two rows: the first one, and that behind the box.
    ``at_border`` has those that reach the border of the volume; of others, ``places`` and ``numbers``.
    """

    total: int
    first: Any
    last: Any
    at_border: Any
    places: Any
    numbers: Any


def with_mask(source: Prepared, processes: Processes) -> Prepared:
    """The source whose zeros are those outside of its mask; collective over the processes, blocking.

    The mask has what is not 0 in some channel, and the zeros that this encloses. Zeros within it become the
    least normal number, so that steps which leave out zeros do not leave them out.
    """
    parts = of_boxes(source, processes, partial(_zeros, source, longest(source.shape)))
    # Node 0 is the border; those of a box are behind those of the boxes before it.
    before = np.cumsum([0, *(part.total for part in parts)])
    edges = [
        (np.zeros_like(part.at_border), part.at_border + n) for part, n in zip(parts, before, strict=False)
    ]
    for (one, other), (n, m) in zip(pairwise(parts), pairwise(before), strict=False):
        edges.append((one.last + n, other.first + m))
    starts, ends = (np.concatenate([pair[side] for pair in edges]) for side in (0, 1))
    graph, size = needed("scipy.sparse", "nnunet"), int(before[-1]) + 1
    matrix = graph.coo_array((np.ones(len(starts)), (starts, ends)), shape=(size, size))
    _, sets = needed("scipy.sparse.csgraph", "nnunet").connected_components(matrix, directed=False)
    holes = [part.places[sets[part.numbers + n] != sets[0]] for part, n in zip(parts, before, strict=False)]
    masked = _Masked(source.source, source.spatial, holes=np.concatenate(holes))
    return replace(source, source=masked)


def _zeros(source: Prepared, dim: int, box: Slices) -> _Zeros:
    ndimage, rows = needed("scipy.ndimage", "nnunet"), box[dim]
    wide = [*box]
    wide[dim] = slice(rows.start, min(rows.stop + 1, source.shape[dim]))
    zero = np.moveaxis((source[tuple(wide)] == 0).all(0).numpy(), dim - 1, 0)
    found, count = ndimage.label(zero)
    border = [found.take(end, d).ravel() for d in range(1, found.ndim) for end in (0, -1)]
    border += [found[0].ravel()] * (rows.start == 0) + [found[-1].ravel()] * (rows.stop == source.shape[dim])
    at_border = np.unique(np.concatenate(border))
    at_border = at_border[at_border > 0]

    def of_row(at: int) -> Any:
        pieces, most = ndimage.label(zero[at])
        return np.array(ndimage.maximum(found[at], pieces, range(1, most + 1)), dtype=np.int64)

    own = found[: rows.stop - rows.start]
    places = np.argwhere((own > 0) & ~np.isin(own, at_border))
    numbers = own[tuple(places.T)]
    places[:, 0] += rows.start
    return _Zeros(count, of_row(0), of_row(-1), at_border, places.astype(np.int32), numbers)


@dataclass(frozen=True)
class _Masked(Prepared):
    """A source without zeros within its mask; ``holes`` are places, the longest dimension first."""

    holes: Any = None

    def __getitem__(self, box: Slices) -> torch.Tensor:
        """A box, with all channels."""
        values, dim = super().__getitem__(box), longest(self.shape)
        inside = (values != 0).any(0)
        begin, end = np.searchsorted(self.holes[:, 0], [box[dim].start, box[dim].stop])
        order = [dim, *(d for d in range(1, len(box)) if d != dim)]
        near = self.holes[begin:end] - [box[d].start for d in order]
        near = near[((near >= 0) & (near < [box[d].stop - box[d].start for d in order])).all(1)]
        inside.movedim(dim - 1, 0)[tuple(torch.from_numpy(near).T)] = True
        return torch.where(inside & (values == 0), _LEAST, values)
