"""Where a collective is carried out."""

import pytest

from distdl_rma.errors import PartitionError
from distdl_rma.segments.collectives.engine.collective_site import CollectiveSite

pytestmark = pytest.mark.mpi


def test_ranks_are_checked_and_laid_out_by_node(segments):
    manager, layout, name = CollectiveSite.checked(segments, segments.ranks[::-1], "here")
    assert (manager, name) == (segments, "here")
    assert layout.ranks == segments.ranks[::-1] and layout.me == segments.rank
    assert {frozenset(node) for node in layout.nodes} == {*map(frozenset, segments.segment.direct_nodes)}
    with pytest.raises(PartitionError, match="'here': ranks must be unique"):
        CollectiveSite.checked(segments, (), "here")
