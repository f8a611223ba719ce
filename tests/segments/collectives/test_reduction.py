"""What reductions mean for each type of elements, over every kind of nodes."""

import pytest

from distdl_rma.segments.collectives.reduction import element_of

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("kind", ["i1", "i2", "u1", "u2"])
def test_no_mpi_is_given_short_integers_to_sum(kind):
    # Open MPI has them stop at the largest where the processor can.
    assert element_of(kind, "short").wide.itemsize >= 4
