"""What happens to one rank of a call happens to all."""

import pytest

from distdl_rma import DataError, Machine, MismatchError, ShapeError
from distdl_rma.segments.consensus import together

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    ("error", "kind"), [(ShapeError("too long"), ShapeError), (OSError("gone"), DataError)]
)
def test_an_error_of_a_rank_is_raised_on_all(error, kind, comm, P_world):
    last, machine = comm.size - 1, Machine.of(P_world)

    def call():
        with together(machine, P_world.ranks, "call") as facts:
            facts["x"] = comm.rank
            if comm.rank == last:
                raise error

    with pytest.raises(kind) as caught:
        call()
    if comm.rank != last:
        words = str(error) if kind is ShapeError else f"OSError: {error}"
        assert str(caught.value) == f"call: rank {last}: {words}"
    elif kind is ShapeError:
        assert caught.value is error
    else:
        assert caught.value.__cause__ is error
    with together(machine, P_world.ranks, "call") as facts:
        facts["x"] = 1


@pytest.mark.mpi(min_size=2)
def test_a_fact_that_differs_is_the_same_error_on_all_ranks(comm, P_world):
    texts, last = [], comm.size - 1
    with (
        pytest.raises(ShapeError, match="call: step") as caught,
        together(Machine.of(P_world), P_world.ranks, "call", differs=ShapeError, advice="wait") as facts,
    ):
        facts |= {"shape": (2, 3), "step": int(comm.rank == last)}
    texts = comm.allgather(str(caught.value))
    assert texts == [f"call: step: 0 on rank 0, but 1 on rank {last}; wait"] * comm.size


@pytest.mark.sizes(1, 2, 3, 4)
def test_facts_of_other_names_are_not_compared(comm, P_world):
    with together(Machine.of(P_world), P_world.ranks, "call") as facts:
        facts |= {f"of rank {comm.rank}": comm.rank, "of all": [1, "x"]}


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_calls_are_told(comm, P_world):
    title = "read" if comm.rank else "write"
    with (
        pytest.raises(MismatchError, match="'write' but rank 1 in 'read'"),
        together(Machine.of(P_world), P_world.ranks, title),
    ):
        pass
