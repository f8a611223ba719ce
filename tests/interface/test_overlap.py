"""What overlaps with what in forward and backward, after the interface document, by recorded orders."""

import time
from itertools import pairwise

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedConv2d, DistributedInstanceNorm2d, DistributedMSELoss
from distdl_rma.layers.ops.conv.own_and_halo import Patch
from distdl_rma.layers.split.shard import balanced_block as shard
from distdl_rma.segments.collectives.allreduce import Allreduce

pytestmark = pytest.mark.mpi

SHAPE = (2, 3, 24, 10)
TAG = 7
# Long enough to tell that a wait was one, and never what an assertion is about.
LATE_SECONDS = 0.02


@pytest.fixture
def P_x(machine):  # noqa: N802
    return machine.partition((1, 1, machine.size, 1))


@pytest.fixture
def x(P_x):
    return shard(P_x, torch.randn(SHAPE))


def of(recording, name, *kinds, backward=False, travels=False):
    """Events of a layer, of some kinds, in the order in which they began."""
    found = [
        event
        for event in recording.events
        if event.name == name
        and (not kinds or event.kind in kinds)
        and (event.backward, event.travels) == (backward, travels)
    ]
    return sorted(found, key=lambda event: event.begin)


def one_after_the_other(*groups):
    """Whether all events of a group are over before the next group begins; none of them is empty."""
    return all(groups) and all(
        max(event.end for event in earlier) <= min(event.begin for event in later)
        for earlier, later in pairwise(groups)
    )


def conv(P_x, **options):
    return DistributedConv2d(P_x, 3, 4, 3, padding=1, **options)


# --------------------------------------------------------------------------------- A18: the order of a layer


def test_a18_forward_starts_then_computes_local_then_remote_data_and_fuses(machine, P_x, x):
    layer = conv(P_x, name="conv")
    for _ in range(2):  # the first call has no plan to go ahead with
        with machine.record() as recording:
            layer(x)
        start, local, wait = (of(recording, "conv", kind) for kind in ("start", "local", "wait"))
        assert one_after_the_other(start, local, wait)
        if machine.size > 1:
            assert one_after_the_other(wait, of(recording, "conv", "remote", "fuse"))
            parts = [event.kind for event in of(recording, "conv", "remote", "fuse")]
            assert parts == ["remote", "fuse"] * (1 + (0 < machine.rank < machine.size - 1))


def test_a18_backward_starts_then_computes_local_data_and_fuses(machine, P_x, x):
    layer = conv(P_x, name="conv")
    layer(x.requires_grad_()).sum().backward()
    y = layer(x)
    with machine.record() as recording:
        y.sum().backward()
    # What a neighbour waits for goes out first; it was computed from data that came in the forward.
    remote, start, local, wait = (
        of(recording, "conv", kind, backward=True) for kind in ("remote", "start", "local", "wait")
    )
    fuse = of(recording, "conv", "fuse", backward=True)
    assert one_after_the_other(remote, start, local, fuse[:1], wait[:1])
    # Then what neighbours sent is added, piece by piece.
    assert len(wait) == len(fuse)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("channels", [False, True])
def test_a18_forward_computes_local_data_first_where_the_distribution_changes_too(machine, channels):
    # Rows come in, columns or filters go out: most of what is read is remote, but not all.
    P_x = machine.partition((1, 1, machine.size, 1))
    P_y = machine.partition((1, machine.size, 1, 1) if channels else (1, 1, 1, machine.size))
    layer = DistributedConv2d(P_x, 1, machine.size, 3, padding=1, P_y=P_y, name="conv")
    x = torch.randn(1, 1, 4, 8).requires_grad_()
    layer(x).sum().backward()
    with machine.record() as recording:
        y = layer(x)
    (start,), (local,), (wait,) = (of(recording, "conv", kind) for kind in ("start", "local", "wait"))
    rest = of(recording, "conv", "remote", "fuse")
    assert one_after_the_other([start], [local], [wait], rest)
    assert [event.kind for event in rest] == ["remote", "fuse"] * (len(rest) // 2) != []
    with machine.record() as recording:
        y.sum().backward()
    # The error signal for the others leaves before that of this rank is waited for.
    start, wait = (of(recording, "conv", kind, backward=True) for kind in ("start", "wait"))
    assert one_after_the_other(start, wait)


@pytest.mark.mpi(min_size=2)
def test_a18_halo_is_in_flight_from_its_start_to_its_arrival(machine, P_x, x):
    layer = conv(P_x, name="conv")
    layer(x.requires_grad_()).sum().backward()
    with machine.record() as recording:
        layer(x).sum().backward()
    for name, backward in (("conv", False), ("conv (adjoint)", True)):
        (start,) = of(recording, "conv", "start", backward=backward)
        last = of(recording, "conv", "wait", backward=backward)[-1]
        (halo,) = of(recording, name, "exchange", travels=True)
        assert start.begin <= halo.begin <= start.end
        assert halo.end <= last.end


def hold_back(monkeypatch, comm, method, recording, layer_call):
    """Have the last rank call a layer only after all others are done with their local data.

    Returns the result, and the second of the recording at which this rank was done with its local data.
    """
    last = comm.size - 1
    if comm.rank == last:
        for rank in range(last):
            comm.recv(source=rank, tag=TAG)
        return layer_call(), recording.now
    original, told = getattr(Patch, method), []

    def telling(patch, *arguments):
        result = original(patch, *arguments)
        # A strip has a row of outputs of each sample, local data have more.
        if patch.outputs.volume > SHAPE[0] * SHAPE[3] and not told:
            told.append(recording.now)
            comm.send(None, dest=last, tag=TAG)
        return result

    with monkeypatch.context() as patches:
        patches.setattr(Patch, method, telling)
        return layer_call(), *told


@pytest.mark.mpi(min_size=2)
def test_a18_local_convolution_needs_nothing_of_a_neighbour_that_comes_late(
    machine, comm, P_x, x, monkeypatch
):
    layer = conv(P_x, name="conv")
    expected = layer(x)
    with machine.record() as recording:
        y, done = hold_back(monkeypatch, comm, "convolve", recording, lambda: layer(x))
    assert torch.equal(y, expected)
    (local,), (halo,) = of(recording, "conv", "local"), of(recording, "conv", "exchange", travels=True)
    if machine.rank == machine.size - 2:
        # Its neighbour put nothing before this rank's local data were done.
        assert halo.begin <= local.begin <= done <= halo.end


@pytest.mark.mpi(min_size=2)
def test_a18_local_gradients_need_nothing_of_a_neighbour_that_comes_late(machine, comm, P_x, x, monkeypatch):
    layer = conv(P_x, name="conv")
    # Weights synchronise themselves before the backward returns; the input alone is what this is about.
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).square().sum().backward()
    expected, x.grad = x.grad, None
    loss = layer(x).square().sum()
    with machine.record() as recording:
        _, done = hold_back(monkeypatch, comm, "convolve_adjoint", recording, loss.backward)
    assert torch.equal(x.grad, expected)
    (local,) = of(recording, "conv", "local", backward=True)
    (halo,) = of(recording, "conv (adjoint)", "exchange", travels=True)
    if machine.rank == machine.size - 2:
        assert halo.begin <= local.begin <= done <= halo.end


def test_a18_composed_form_gathers_then_computes(machine, P_x, x):
    layer = conv(P_x, name="conv", padding_mode="circular")
    layer(x)
    with machine.record() as recording:
        layer(x)
    (local,) = of(recording, "conv", "local")
    gather = [event for event in recording.events if event.name.startswith("conv (") and not event.travels]
    if machine.size > 1:
        start, wait = ([event for event in gather if event.kind == kind] for kind in ("start", "wait"))
        assert one_after_the_other(start, wait, [local])


# ----------------------------------------------------------------- A15: weight allreduces behind the backward


LAYERS = 4


@pytest.mark.mpi(min_size=2)
def test_a15_weight_allreduce_of_a_layer_is_under_way_while_the_next_backward_computes(machine, P_x, x):
    model = nn.Sequential(
        *(DistributedConv2d(P_x, 3, 3, 3, padding=1, name=f"conv {k}") for k in range(LAYERS))
    )
    criterion = DistributedMSELoss(P_x)
    sync = GradientSync(model, machine, bucket_nbytes=0)
    criterion(model(x), x).backward()
    loss = criterion(model(x), x)
    with machine.record() as recording:
        loss.backward()
    sync.close()
    allreduces = sorted(
        (event for event in recording.events if event.kind == "allreduce"), key=lambda event: event.begin
    )
    assert len(allreduces) == LAYERS
    # Backward goes through the layers from the last to the first.
    for k, weights in zip(reversed(range(LAYERS)), allreduces, strict=True):
        (start,) = of(recording, weights.name, "start")
        waits = of(recording, weights.name, "wait")
        mine = of(recording, f"conv {k}", backward=True)
        assert max(event.end for event in mine if event.kind in ("remote", "local")) <= start.begin
        if k:
            before = of(recording, f"conv {k - 1}", "remote", "local", backward=True)
            assert one_after_the_other([start], before, waits)


@pytest.mark.mpi(min_size=2)
def test_a15_weight_allreduce_travels_while_this_rank_computes(machine, comm):
    sums = Allreduce(machine.segments, machine.ranks, 1 << 14, name="weights")
    sums.connect()
    with machine.record() as recording:
        if machine.rank == 0:
            # The others have computed meanwhile.
            for rank in range(1, machine.size):
                comm.recv(source=rank, tag=TAG)
        sums.active[:] = machine.rank
        sums.start()
        if machine.rank:
            with machine.trace.span("local", "next"):
                time.sleep(LATE_SECONDS)
            comm.send(None, dest=0, tag=TAG)
        assert (sums.wait() == sum(range(machine.size))).all()
    (weights,) = of(recording, "weights", "allreduce", travels=True)
    if machine.rank:
        (local,) = of(recording, "next", "local")
        assert weights.begin <= local.begin and local.end <= weights.end
    sums.close()


# ------------------------------------------------------------- A16: the norm allreduce is behind no other


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("batch", [4, 9000], ids=["one round", "in shares"])
def test_a16_norm_allreduce_completes_while_a_weight_allreduce_is_under_way(machine, comm, P_x, batch):
    channels = 8
    norm = DistributedInstanceNorm2d(P_x, channels, affine=True, name="norm")
    x = torch.randn(batch, channels, 2, 3).requires_grad_()
    norm(x).square().sum().backward()
    sums = Allreduce(machine.segments, machine.ranks, 1 << 14, name="weights")
    sums.connect()
    late = machine.rank == machine.size - 1
    with machine.record() as recording:
        if not late:
            sums.start()
        # One rank has not started: the weight allreduce cannot complete on any.
        norm(x).square().sum().backward()
        comm.Barrier()
        if late:
            sums.start()
        sums.wait()
    (weights,) = of(recording, "weights", "allreduce", travels=True)
    in_norm = [e for e in recording.events if e.kind == "allreduce" and e.name.startswith("norm (norm")]
    assert len(in_norm) == (2 if batch == 4 else 3)
    for allreduce in in_norm:
        assert allreduce.end <= weights.end
        assert late or weights.begin <= allreduce.begin
    sums.close()


def test_a16_norm_computes_local_statistics_then_meets_then_scales(machine, P_x, x):
    norm = DistributedInstanceNorm2d(P_x, SHAPE[1], affine=True, name="norm")
    norm(x.requires_grad_()).square().sum().backward()
    with machine.record() as recording:
        norm(x).square().sum().backward()
    local, scale = of(recording, "norm", "local"), of(recording, "norm", "scale")
    sums, rest = (of(recording, "norm", kind, backward=True) for kind in ("local", "scale"))
    fuse = of(recording, "norm", "fuse", backward=True)
    assert one_after_the_other(local, scale, sums, rest, fuse)
    if machine.size > 1:
        (there,) = of(recording, "norm (norm)", "allreduce", travels=True)
        (back,) = of(recording, "norm (norm, adjoint)", "allreduce", travels=True)
        assert one_after_the_other(local, [there], scale)
        # The gradient is scaled while the sums travel.
        (start,), (wait,) = (of(recording, back.name, kind) for kind in ("start", "wait"))
        assert one_after_the_other(sums, [start], rest, [wait], fuse)
