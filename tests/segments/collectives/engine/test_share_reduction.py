"""Reductions by shares: the holders of a node reduce all of a vector between them."""

import numpy as np
import pytest

from distdl_rma.segments.collectives.engine.collective import Collective
from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite
from distdl_rma.segments.collectives.engine.reduction import Reduction, element_of
from distdl_rma.segments.collectives.engine.share_reduction import ShareReduction

pytestmark = pytest.mark.mpi
COUNT = 11


class NodeSum(ShareReduction):
    """The sum of each node, on its first rank."""

    def __init__(self, site):
        share = site.layout.share(COUNT)
        self._share = share
        reduction = Reduction("sum", element_of(np.int64, site.name), 1, site.name)
        super().__init__(site, COUNT, share.stop - share.start, reduction, "collective=NodeSum")

    def reduce(self, rows):
        shares = [row[self._share] for row in rows]
        self.reduction.reduce(shares, shares[:1])
        yield


def test_the_holders_reduce_every_element_once_and_only_then_is_the_step_complete(segments):
    job = Collective(NodeSum(CollectiveSite.checked(segments, segments.ranks, "node sum")))
    node = next(node for node in segments.segment.direct_nodes if segments.rank in node)
    for step in range(30):
        job.active[:] = np.arange(COUNT) + segments.rank + step
        job.start()
        result = job.wait()
        if segments.rank == node[0]:
            assert np.array_equal(result, sum(np.arange(COUNT) + rank + step for rank in node))
    job.close()
