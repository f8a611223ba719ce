"""The interface document's definitions, segments and layers, tests by the number of the requirement.

Elsewhere are A2, where a process sits (A4) and A5 (``geometry/test_distribution.py``), A7
(``segments/memory/test_buffer.py``), connecting (A8, ``core/test_connect.py``), random layers from global
parameters with input and output in any distributions, with holes too (A3, A4, ``test_random.py``),
inequalities and sizes before the first call (A5, A13, ``test_from_global.py``), numbers of A19
(``test_twins.py``), and A20 (``data_movement/test_concat.py``), the last four in ``layers/partitioned``.
"""

import pytest
import torch
from torch import nn

from distdl_rma import Distribution, GradientSync, Machine, zero_volume_tensor
from distdl_rma.layers import Conv, InstanceNorm
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.fuzz.interface import compare
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


def test_a6_idle_ranks_hold_nothing_but_know_the_weights(M, comm):
    one = Distribution(1, 1, 1)
    layer = Conv(M, (2, 3, 4, 9), one, kernel_size=3, **DOUBLE)
    assert layer.weight.shape == (4, 3, 3)
    assert all(
        torch.equal(layer.weight, torch.from_numpy(w)) for w in comm.allgather(layer.weight.detach().numpy())
    )
    idle = comm.rank != M.ranks[0]
    for empty in (zero_volume_tensor(), zero_volume_tensor(2)):
        y = layer(empty if idle else torch.randn(2, 3, 9, **DOUBLE))
        assert y.shape == (empty.shape if idle else (2, 4, 7))
        y.sum().backward()
    assert layer.weight.grad.abs().sum() > 0


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


def test_a17_global_parameters_and_those_of_torch_make_the_layer(M, comm):
    split = Distribution(1, 1, comm.size, 1)
    options = {"kernel_size": (3, 2), "stride": 2, "padding": (1, 0), "dilation": (1, 2), "groups": 2}
    options |= {"bias": False, "padding_mode": "reflect", **DOUBLE}
    module = nn.Conv2d(4, 6, **options)
    layer = Conv(M, (2, 4, 6, 12, 7), split, **options)
    layer.load_state_dict(module.state_dict())
    P = M.distribute(split)
    compare(layer, module, [P], P, [(2, 4, 12, 7)], "torch's arguments")
    ranks = layer.get_ranks_synch_weights()
    assert ranks == (list(M.ranks) if comm.size > 1 else [])


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
