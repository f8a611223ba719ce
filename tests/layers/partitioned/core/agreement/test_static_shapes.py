"""Shapes that are promised not to change: one agreement, no messages, and an error that all hear of."""

import copy
from contextlib import suppress

import pytest
import torch

from benchmarks.traffic import vote_traffic
from distdl_rma import ExchangeTimeout, Machine, PeerFailedError, ProtocolError, ShapeError, static_shapes
from distdl_rma.layers import DistributedConv2d, DistributedLinearAllGather
from distdl_rma.segments.collectives.node_layout import NodeLayout

pytestmark = pytest.mark.mpi


def puts_of(machine, call):
    before = copy.copy(machine.segments.counters)
    result = call()
    return result, machine.segments.counters.puts - before.puts


def test_promised_calls_give_the_same_and_send_what_is_data_only(P_world, comm):
    P_x, machine = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1)), Machine.of(P_world)
    layer = DistributedConv2d(P_x, 2, 2, 3, padding=1)
    x = torch.randn(1, 2, 4, 5, requires_grad=True)

    def step():
        x.grad = None
        y = layer(x)
        y.square().sum().backward()
        with torch.no_grad():
            return torch.cat([y.flatten(), x.grad.flatten(), layer(x).flatten()])

    step()
    expected, usual = puts_of(machine, step)
    votes = vote_traffic(NodeLayout(machine.ranks, machine.segments.segment.direct_nodes, comm.rank)).puts
    saved = []
    with static_shapes(P_world):
        for _ in range(3):
            found, puts = puts_of(machine, step)
            assert torch.equal(found, expected)
            saved.append(usual - puts)
    assert saved == [0, *[2 * votes] * 2]
    assert puts_of(machine, step)[1] == usual
    # As soon as nothing is promised any more, shapes may change.
    assert layer(x[..., 1:]).shape == (1, 2, 4, 4)


def test_each_promise_begins_anew(P_world, comm):
    layer = DistributedLinearAllGather(P_world.create_cartesian_topology_partition((1, comm.size)), 12, 12)
    for rows in (2, 5):
        with static_shapes(P_world):
            x = torch.randn(rows, 12 // comm.size)
            assert layer(x).shape == layer(x).shape == (rows, 12 // comm.size)


def test_a_promise_is_not_made_twice(P_world):
    for _ in range(2):
        with static_shapes(P_world), pytest.raises(ProtocolError, match="within such a context already"):
            static_shapes(P_world).__enter__()


def test_parameters_may_be_frozen_and_released_on_all_ranks(P_world, comm):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size, 1))
    layer, x = DistributedConv2d(P_x, 2, 2, 3, padding=1), torch.randn(1, 2, 4, 5)
    with static_shapes(P_world):
        for frozen in ([], [layer.bias], [layer.weight], []):
            layer.requires_grad_(True).zero_grad()
            for parameter in frozen:
                parameter.requires_grad_(False)
            for _ in range(2):
                layer(x).sum().backward()
            assert [p.grad is None for p in layer.parameters()] == [
                any(p is one for one in frozen) for p in layer.parameters()
            ]


@pytest.mark.mpi(min_size=2)
def test_a_promise_that_is_broken_is_an_error_on_all_ranks(comm):
    machine, last = Machine(comm, segment_size="8MiB", timeout=15), comm.size - 1
    layer = DistributedConv2d(machine.partition((1, 1, comm.size, 1)), 1, 1, 3, padding=1, name="enc1")
    x = torch.randn(1, 1, 4, 5)

    message = rf"'enc1': rank {last} passes \(1, 1, 4, 4\) of torch.float32 and passed \(1, 1, 4, 5\) of"

    def loop(odd_turn):
        for turn in range(20):
            layer(x[..., 1:] if turn == odd_turn and comm.rank == last else x)

    with static_shapes(machine), torch.no_grad():
        with pytest.raises(ShapeError if comm.rank == last else PeerFailedError, match=message):
            loop(odd_turn=2)
        # Who goes on all the same is told why, on every rank.
        with pytest.raises(PeerFailedError, match=message):
            loop(odd_turn=None)
    comm.Barrier()
    machine.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
@pytest.mark.parametrize("known", [True, False])
def test_gradients_that_some_ranks_do_not_record_are_named_where_a_rank_waits_in_vain(comm, known):
    machine = Machine(comm, segment_size="8MiB", timeout=15)
    layer = DistributedConv2d(machine.partition((1, 1, comm.size, 1)), 1, 1, 3, padding=1, name="enc1")
    x = torch.randn(1, 1, 4, 5, requires_grad=True)
    with static_shapes(machine):
        for recording in (False, True) if known else (False,):
            with torch.set_grad_enabled(recording):
                layer(x)
        comm.Barrier()
        with torch.set_grad_enabled(comm.rank == 0):
            if comm.rank:
                layer(x)
            else:
                machine.segments.waiter.timeout = 2
                said = "it records no gradients within static_shapes, and rank 0 records gradients within"
                with pytest.raises(ExchangeTimeout, match=f"waited 2 s for ranks? 1.* 'enc1.*; {said}"):
                    layer(x).sum().backward()
    comm.Barrier()
    # Where the other one heard of the failure.
    with suppress(PeerFailedError):
        machine.close()
