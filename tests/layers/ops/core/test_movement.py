"""Movements under autograd."""

import random
import time

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ClosedError, Machine, gather_state_dict
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.geometry.halo import Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers import DistributedConv2d, Movement
from distdl_rma.segments import direct_receive, lanes
from tests.layers.partitioned.sequential import shard

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def halo_movement(P_world):
    """Own rows and one more on either side, zero beyond the domain."""
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    own = Decomposition.balanced(P_x, (1, 1, 8, 3))
    rows = WindowSplit(Balanced(8, P_world.size), Window(3, left=1, right=1), 8)
    exchange = Exchange(P_x.me, own, own.with_splits({2: rows}))
    return Movement(Machine.of(P_x), exchange, torch.float64, "halo")


def test_overlap_mirrors_itself(P_world, comm):
    # Forward start, compute, wait: autograd must run wait^T, compute^T, start^T.
    movement, order = halo_movement(P_world), []
    slices = movement.forward.exchange.source.slices()
    whole = torch.randn(1, 1, 8, 3, dtype=torch.float64)
    x = whole[slices].clone().requires_grad_()
    request = movement.start(x, needs_grad=True)
    middle = x * 2
    middle.register_hook(lambda _: order.append("compute"))
    y = movement.wait(request)
    assert torch.equal(y, F.pad(whole, (0, 0, 1, 1))[:, :, slices[2].start : slices[2].stop + 2])
    start, receive = movement.adjoint.start, movement.adjoint.receive
    movement.adjoint.start = lambda parts: (order.append("start"), start(parts))[1]
    movement.adjoint.receive = lambda epoch: (order.append("wait"), receive(epoch))[1]
    (y.sum() + middle.sum()).backward()
    assert order == ["start", "compute", "wait"]
    # How many ranks read a row, and once for what was computed meanwhile.
    halos = [range(a - 1, b + 1) for a, b in map(Balanced(8, comm.size).interval, range(comm.size))]
    counts = torch.tensor([2.0 + sum(row in halo for halo in halos) for row in range(8)])
    assert torch.equal(x.grad, counts.double().view(1, 1, 8, 1).expand(1, 1, 8, 3)[slices])


def held(machine, what):
    """Bytes of this rank's segment by who holds them, of those with something in their name."""
    return {name: nbytes for name, (_, nbytes) in machine.segments.stats().owners.items() if what in name}


@pytest.mark.mpi(min_size=2)
def test_an_adjoint_takes_memory_when_a_backward_needs_it(comm):
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size, 1))
        layer = DistributedConv2d(P_x, 2, 3, 5, padding=(2, 0), dtype=torch.float64)
        x = shard(P_x, torch.randn(1, 2, 11, 9, dtype=torch.float64))
        with torch.no_grad():
            layer(x)
        gather_state_dict(layer)
        assert held(machine, layer.name)
        assert not held(machine, "adjoint")
        y = layer(x.requires_grad_())
        assert not held(machine, "adjoint")
        y.sum().backward()
        assert held(machine, "adjoint")


def test_a_closed_movement_makes_no_adjoint(P_world, comm):
    movement = halo_movement(P_world)
    movement.close()
    for use in (lambda: movement.backwards, movement.connect):
        with pytest.raises(ClosedError, match="'halo': already closed"):
            use()


def test_large_results_are_their_own_whatever_moves_later(comm, monkeypatch):
    # They lie where peers of the node put straight into, and stay when the machine is gone.
    monkeypatch.setattr(direct_receive, "_SMALLEST_NBYTES", 1)
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        everyone = machine.partition()
        rows, columns = (
            Decomposition(everyone, (Balanced(6, n), Balanced(8, m)), axes)
            for n, m, axes in ((comm.size, 1, (0,)), (1, comm.size, (1,)))
        )
        exchange = Exchange(machine.rank, rows, columns)
        movement = Movement(machine, exchange, torch.float64, "transposed blocks")
        whole = torch.randn(6, 8, dtype=torch.float64)
        mine = whole[rows.slices()]
        results = []
        for step in range(1, 7):
            x = (step * mine).requires_grad_()
            y = movement(x, needs_grad=True)
            saved = y.exp()
            saved.sum().backward()
            assert torch.equal(x.grad, (step * mine).exp())
            with torch.no_grad():
                y.add_(1)
            results.append(y)
        assert any(movement.forward.landed) == bool(machine.segments.segment.arenas)
        movement.close()
    for step, y in enumerate(results, 1):
        assert torch.equal(y, step * whole[columns.slices()] + 1)


def broadcast(machine):
    """From the first rank to all."""
    everyone = machine.partition()
    root = everyone.create_partition_inclusive([0])
    ends = Decomposition.replicated(root, (5, 3)), Decomposition.replicated(everyone, (5, 3))
    return Movement(machine, Exchange(machine.rank, *ends), torch.float64, "broadcast")


def test_a_large_result_can_be_trained_on_after_calls_that_only_infer(comm, monkeypatch):
    # The memory of a result is made in a call before.
    monkeypatch.setattr(direct_receive, "_SMALLEST_NBYTES", 1)
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        movement = broadcast(machine)
        x = torch.ones((5, 3) if machine.rank == 0 else 0, dtype=torch.float64)
        with torch.inference_mode():
            for _ in range(3):
                movement(x)
        for _ in range(3):
            y, weight = movement(x), torch.ones(5, 3, dtype=torch.float64, requires_grad=True)
            y.mul_(2)
            (y * weight).sum().backward()
            assert not y.is_inference() and (weight.grad == 2).all()
        movement.close()


def sum_in_order(values, dtype):
    total = values[0].to(torch.float32) if dtype is torch.bfloat16 else values[0].clone()
    for value in values[1:]:
        total += value
    return total.to(dtype)


@pytest.mark.parametrize("what", ["to all", "to one that gives", "to one that does not", "parts"])
@pytest.mark.parametrize("turned", [False, True])
def test_sums_of_whole_contributions_are_in_the_order_of_the_givers(comm, monkeypatch, what, turned):
    monkeypatch.setattr(lanes, "_STEP_NBYTES", 16)
    delays, rng = random.Random(comm.rank), np.random.default_rng(4)
    last = comm.size - 1
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        everyone = machine.partition()
        ranks = range(min(what == "to one that does not", last), last + 1)
        givers = everyone.create_partition_inclusive(ranks[::-1] if turned else ranks)
        taker = everyone.create_partition_inclusive([last if what == "to one that gives" else 0])
        target = Decomposition.replicated(everyone if what == "to all" else taker, (7, 3))
        if what == "parts":
            target = Decomposition(everyone, (Balanced(7, comm.size), Balanced(3, 1)), (0,))
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
            exchange = Exchange(machine.rank, Decomposition.replicated(givers, (7, 3)), target)
            movement = Movement(machine, exchange, dtype, f"sums of {dtype}")
            for step in range(4):
                values = rng.normal(size=(comm.size, 7, 3)) * 10.0 ** rng.integers(-3, 4, (comm.size, 7, 3))
                given = [torch.from_numpy(v).to(dtype) for v in values]
                if step == 2:
                    movement.void()
                    continue
                time.sleep(delays.random() * 2e-3)
                before = given[comm.rank].clone()
                y = movement(given[comm.rank] if givers.active else torch.empty(0, dtype=dtype))
                if target.partition.active:
                    wanted = sum_in_order([given[rank] for rank in givers.ranks], dtype)
                    assert torch.equal(y, wanted[target.slices()])
                assert torch.equal(given[comm.rank], before)
            movement.close()


def test_what_a_root_keeps_of_what_it_sends_is_its_own(comm):
    with Machine(comm, segment_size="16MiB", timeout=15) as machine:
        movement = broadcast(machine)
        whole = torch.arange(15.0, dtype=torch.float64).reshape(5, 3)
        for step in range(1, 6):
            x = step * whole if machine.rank == 0 else torch.empty(0, dtype=torch.float64)
            if step == 3:
                movement.void()
                continue
            y = movement(x)
            assert torch.equal(y, step * whole)
            y.zero_()
            assert machine.rank or torch.equal(x, step * whole)
        movement.close()
