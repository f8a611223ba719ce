"""What happens to one rank of a call happens to all."""

import pytest

from distdl_rma import DataError, Machine, MismatchError, ShapeError
from distdl_rma.checks.outcome import agreed


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_all_ranks_get_the_facts_of_all(comm, P_world):
    found = agreed(Machine.of(P_world), P_world.ranks, "call", None, [comm.rank, "x"])
    assert found == {rank: [rank, "x"] for rank in range(comm.size)}


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("error", "kind"), [(ShapeError("too long"), ShapeError), (OSError("gone"), DataError)]
)
def test_an_error_of_a_rank_is_raised_on_all(error, kind, comm, P_world):
    last = comm.size - 1
    mine = error if comm.rank == last else None
    with pytest.raises(kind) as caught:
        agreed(Machine.of(P_world), P_world.ranks, "call", mine)
    if mine is None:
        words = str(error) if kind is ShapeError else f"OSError: {error}"
        assert str(caught.value) == f"call: rank {last}: {words}"
    elif kind is ShapeError:
        assert caught.value is error
    else:
        assert caught.value.__cause__ is error
    assert agreed(Machine.of(P_world), P_world.ranks, "call", None) == dict.fromkeys(range(comm.size))


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_calls_are_told(comm, P_world):
    with pytest.raises(MismatchError, match="'write' but rank 1 in 'read'"):
        agreed(Machine.of(P_world), P_world.ranks, "read" if comm.rank else "write", None)
