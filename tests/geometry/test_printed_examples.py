"""The examples of the repartition document on grids as printed, all their ranks in one process."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.partition import Partition
from tests.geometry.simulation import equal, execute, plans_of

EXAMPLES = {
    "1: remap 1-D": ((5,), (3,)),
    "2: remap 2-D": ((3, 4), (4, 2)),
    "3: remap 3-D": ((3, 2, 2), (1, 2, 3)),
    "4: scatter": ((1, 1, 1), (1, 3, 2)),
    "5: gather": ((1, 3, 2), (1, 1, 1)),
    "sketch": ((3, 3), (4, 4)),
}


def grid(shape):
    return Partition(tuple(range(prod(shape))), shape, me=0)


@pytest.mark.parametrize("grids", EXAMPLES.values(), ids=EXAMPLES)
@pytest.mark.parametrize("extent", [13, 2])
def test_tensor_arrives_balanced_and_comes_back(grids, extent):
    P_x, P_y = map(grid, grids)
    shape = (extent,) * P_x.dim
    whole = np.arange(prod(shape)).reshape(shape)
    source, target = Decomposition.balanced(P_x, shape), Decomposition.balanced(P_y, shape)
    ranks = range(max(P_x.size, P_y.size))
    shards = [{rank: whole[d.slices(rank)] for rank in ranks} for d in (source, target)]
    plans = plans_of(source, target, ranks)
    there = execute(
        plans, {r: shards[0][r] if r in P_x else np.zeros(plans[r].own.shape, int) for r in ranks}
    )
    assert equal({r: there[r] for r in P_y.ranks}, {r: shards[1][r] for r in P_y.ranks})
    back = execute({rank: plan.T for rank, plan in plans.items()}, there)
    assert equal({r: back[r] for r in P_x.ranks}, {r: shards[0][r] for r in P_x.ranks})


def test_middle_of_3_x_3_goes_to_the_4_middle_ranks_of_4_x_4():
    source, target = (Decomposition.balanced(grid(shape), (12, 12)) for shape in ((3, 3), (4, 4)))
    middle, P_y = 4, target.partition
    pieces = Exchange(middle, source, target)
    places = [P_y.index_of(piece.peer) for piece in sorted(pieces.sends + pieces.local, key=lambda p: p.peer)]
    assert places == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert sum(piece.box.volume for piece in pieces.sends + pieces.local) == source.box(middle).volume


def test_all_to_all_of_16_elements_on_4_ranks_transposes_a_matrix():
    P = grid((4, 1))
    rows = Decomposition.balanced(P, (4, 4))
    columns = Decomposition.balanced(grid((1, 4)), (4, 4))
    matrix = np.arange(16).reshape(4, 4)
    plans = plans_of(rows, columns, P.ranks)
    y = execute(plans, {rank: matrix[rank : rank + 1] for rank in P.ranks})
    assert equal(y, {rank: matrix[:, rank : rank + 1] for rank in P.ranks})
    origin = Box.of_shape((4, 4))
    assert all(len(plan.sends) == 3 and plan.own & origin == plan.own for plan in plans.values())
