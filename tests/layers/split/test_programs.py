"""Random programs of torch's functions on split tensors give the numbers of the whole."""

import pytest

from tests.fuzz import programs
from tests.matrix import check_each, over_seeds


@pytest.mark.mpi
@over_seeds(60, each=20)
def test_programs_agree_with_whole_tensors(P_world, comm, seeds):
    check_each(programs.check, P_world, comm, seeds)
