"""What ranks compare when calls begin and end, without a model; tests/layers/model has the rest."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from distdl_rma import Machine, MismatchError, distribute
from distdl_rma.layers.checks.model_calls import (
    Calls,
    CallTrace,
    by_ranks,
    equal_on_all_ranks,
    first_difference,
)


@pytest.mark.mpi(min_size=2)
def test_facts_are_described_once_for_those_that_say_the_same(P_world, comm):
    calls, odd = Calls(Machine.of(P_world), P_world.ranks, "Some model"), comm.rank == 1
    others = {2: "rank 0", 3: "ranks 0, 2", 4: "ranks 0, 2, 3"}[comm.size]
    with pytest.raises(MismatchError, match=rf"{others}: is even; rank 1: is odd"):
        calls.begin((odd,), lambda: "is odd" if odd else "is even", CallTrace())
    calls.begin((), str, CallTrace())
    calls.end(CallTrace())


class Flag:
    """A check of a number, which may differ on some ranks without being wrong."""

    what = "flags"

    def __init__(self, number, wrong):
        self._number, self._wrong = number, wrong

    def number(self):
        return self._number

    def words(self):
        return self._number

    def problem(self, said):
        return f"flags {sorted({*said.values()})}" if self._wrong else ""


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("wrong", [True, False])
def test_words_of_checks_decide_where_numbers_differ(P_world, comm, wrong):
    checks = Flag(7, True), Flag(comm.rank == 1, wrong)
    calls = Calls(Machine.of(P_world), P_world.ranks, "Some model", checks)
    for _ in range(2):
        checks[0]._wrong = wrong
        with pytest.raises(MismatchError, match=r"Some model: flags \[7\]") if wrong else nullcontext():
            calls.begin((), str, CallTrace())
            calls.end(CallTrace())
        calls.begin((), str, CallTrace(), checked=False)
        calls.end(CallTrace())


@pytest.mark.mpi(min_size=2)
def test_inputs_of_a_new_kind_are_compared_whole_and_once(P_world, comm):
    calls, x = Calls(Machine.of(P_world), P_world.ranks, "Some model"), torch.zeros(3)
    # Of a known kind nothing is exchanged: every call that is checked samples it.
    for given in (x, x + comm.rank):
        calls.begin((), str, CallTrace(), [given], checked=False)
        calls.end(CallTrace())
    for other in (torch.full((4,), float(comm.rank)), x.double() + comm.rank):
        with pytest.raises(MismatchError, match="an input of a distributed model"):
            calls.begin((), str, CallTrace(), [other], checked=False)
        calls.abandon()


@pytest.mark.mpi(min_size=2)
def test_tensors_that_differ_are_refused(P_world):
    machine, x = Machine.of(P_world), torch.arange(4.0)
    equal_on_all_ranks(machine, P_world.ranks, [x], "x")
    with pytest.raises(MismatchError, match="x differs between rank"):
        equal_on_all_ranks(machine, P_world.ranks, [x + (P_world.rank == 1)], "x")


class Filled(nn.Module):
    """Fills a tensor whose memory differs between ranks, by indices that are computed of split tensors."""

    def __init__(self, rank, how):
        super().__init__()
        self.rank, self.how = rank, how

    def forward(self, x):
        places = torch.full((8,), float(self.rank))
        if self.how == "indices":
            places.index_fill_(0, (x.amax((0, 1, 2, 3)) < -9).long() + torch.arange(8), 0.5)
        else:
            places.masked_fill_(x.flatten()[:8] > -9, 0.5)
        return x * places.sum()


@pytest.mark.mpi(min_size=2)
@pytest.mark.filterwarnings("ignore:distribute")
@pytest.mark.parametrize("how", ["indices", "a mask"])
def test_memory_that_is_overwritten_is_not_compared(comm, how):
    model, x = distribute(Filled(comm.rank, how), {"H": -1}), torch.rand(1, 1, 6, 8)
    torch.testing.assert_close(model(x).full_tensor(), 4 * x)


def test_differences_are_found_and_told_by_ranks():
    assert first_difference([[1, 2], [1, 2]]) is None
    assert first_difference([[1, 2], [1, 3]]) == 1 == first_difference([[1], [1, 2]])
    assert by_ranks({3: "a", 5: "b", 7: "a"}) == "ranks 3, 7: a; rank 5: b"
