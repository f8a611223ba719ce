"""The interface document's definitions, segments and layers, tests by the number of the requirement.

Elsewhere are A2, where a process sits (A4) and A5 (``geometry/test_distribution.py``), A7
(``segments/memory/test_buffer.py``), and in ``layers/partitioned`` idle ranks (A6, ``core/test_idle.py``),
connecting (A8, ``core/test_connect.py``), random layers from global parameters and torch's, with input and
output in any distributions, with holes too, and sizes before the first call (A3, A4, A13, A17,
``test_random.py``), inequalities (A5, ``test_from_global.py``), numbers of A19 (``test_twins.py``), and A20
(``data_movement/test_concat.py``).
"""

import pytest
import torch

from distdl_rma import Distribution, GradientSync, Machine
from distdl_rma.layers import Conv, InstanceNorm
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.layers.partitioned.sequential import shard

pytestmark = pytest.mark.mpi

DOUBLE = {"dtype": torch.float64}


@pytest.fixture
def M(comm):  # noqa: N802
    """The full machine, its list of ranks turned round."""
    with Machine(comm, ranks=range(comm.size - 1, -1, -1), segment_size="16MiB", timeout=15) as machine:
        yield machine


def test_a1_the_machine_is_an_ordered_list_of_ranks_and_r_is_one_of_them(M, comm):
    assert M.ranks == tuple(range(comm.size - 1, -1, -1))
    assert (M.size, M.rank) == (comm.size, comm.rank)
    first = Distribution(1, 1, 1).active_ranks(M)
    assert first == (comm.size - 1,)


@pytest.mark.mpi(min_size=3)
def test_a8_who_is_no_neighbour_gets_no_pointer(M, comm, monkeypatch):
    asked, exchange = [], SegmentBuffer.exchange

    def counted(buffer, notes, label, *rest, **named):
        asked.append((label, set(notes)))
        return exchange(buffer, notes, label, *rest, **named)

    split = Distribution(1, 1, comm.size)
    layer = Conv(M, (2, 3, 4, 3 * comm.size), split, kernel_size=3, padding=1, name="c1", **DOUBLE)
    monkeypatch.setattr(SegmentBuffer, "exchange", counted)
    layer.connect()
    at = M.ranks.index(comm.rank)
    near = {M.ranks[i] for i in (at - 1, at + 1) if 0 <= i < comm.size}
    # All ranks agree on shapes; only neighbours know where the others' exchange buffers are.
    assert [peers for label, peers in asked if not label.startswith("agreement")] == [near, near]


@pytest.mark.mpi(min_size=2)
def test_a19_one_norm_allreduce_forward_and_one_backward_gamma_and_beta_go_elsewhere(M):
    rows = Distribution(1, 1, M.size, 1)
    norm = InstanceNorm(M, (2, 3, 11, 7), rows, affine=True, name="norm")
    x = shard(M.distribute(rows), torch.randn(2, 3, 11, 7)).requires_grad_()
    with GradientSync(norm, M):
        norm(x).sum().backward()
        x.grad = None
        with M.record() as recording:
            y = norm(x)
        forward = [event.name for event in recording.events if event.travels]
        with M.record() as recording:
            y.sum().backward()
        backward = [event.name for event in recording.events if event.travels]
    assert len([name for name in forward if "(norm" in name]) == 1
    assert len([name for name in backward if "(norm" in name]) == 1
    assert [name for name in backward if "(norm" not in name] == ["gradients 0"]
    assert not [name for name in forward if "(norm" not in name]
