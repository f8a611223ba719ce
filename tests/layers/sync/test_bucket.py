"""Buckets: what travels together; and made on all ranks or, with everything as it was, on none."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Machine, SegmentError
from distdl_rma.layers import DistributedConv1d
from distdl_rma.layers.sync.bucket import BucketKind, GradientSlot, bucketed
from distdl_rma.layers.sync.gradient_groups import ParameterEntry
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.segments.consensus import gather_words
from tests.layers.partitioned.same_error import same_error


def slots(ranks, *sizes):
    """Slots of one module, of gradients of so many bytes."""
    parameters = [nn.Parameter(torch.zeros(nbytes // 4)) for nbytes in sizes]
    kind = BucketKind(ranks, torch.float32, 1)
    return [GradientSlot(ParameterEntry(p, "p", []), kind) for p in parameters]


def test_the_last_module_travels_first_and_modules_stay_whole():
    a, b, c = slots((0, 1), 40, 4), slots((0, 1), 80), slots((0, 1), 20, 4)
    assert bucketed([a, b, c], 0) == [c, b, a]
    assert bucketed([a, b, c], 104) == [[*c, *b], a]
    assert bucketed([a, b, c], 1000) == [[*c, *b, *a]]


def test_what_other_ranks_sum_does_not_part_what_these_do():
    a, b, c = slots((0, 1), 40), slots((0, 2), 80), slots((0, 1), 20)
    assert bucketed([a, b, c], 60) == [[*c, *a], b]


@pytest.mark.mpi(min_size=2)
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("on", ["all ranks", "one rank"])
@pytest.mark.parametrize("way", ["model", "register"])
def test_gradients_that_do_not_fit_into_the_segment_are_refused_on_all_ranks(comm, on, way):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size))
        segments = machine.segments
        small, wide = DistributedConv1d(P_x, 1, 1, 3, padding=1), nn.Linear(256, 256, bias=False)
        # What the ranks say to each other has its memory.
        gather_words(segments, comm.rank, "before")
        # So much is left that the first bucket fits, and the second does not.
        short = on == "all ranks" or comm.rank == 1
        taken = segments.get_segment_buffer(segments.stats().largest_free - (200 << 10)) if short else None
        model = nn.Sequential(small, wide)
        before = [parameter.clone() for parameter in model.parameters()]
        sync = GradientSync(small if way == "register" else None, machine, bucket_nbytes=0)
        used = segments.stats().used
        act = partial(GradientSync, model, machine, bucket_nbytes=0)
        if way == "register":
            act = partial(sync.register, model, get_ranks_synch_norm=list)
        same_error(comm, act, SegmentError, r"GradientSync: on rank \d: segment exhausted")
        assert segments.stats().used == used
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert "get_ranks_synch_norm" not in vars(model)
        if taken is not None:
            taken.free()
        if way == "register":
            # What was synchronised still is.
            assert [row["parameters"] for row in sync.describe()] == [
                [f"{small.label}.weight", f"{small.label}.bias"]
            ]
            small(torch.ones(1, 1, 4)).sum().backward()
            assert small.bias.grad == 4 * comm.size
        sync.close()
        # Nobody has the parameters, and the layer sums its own.
        small.zero_grad()
        small(torch.ones(1, 1, 4)).sum().backward()
        assert small.bias.grad == 4 * comm.size
        with GradientSync(model, machine):
            small.zero_grad()
            small(torch.ones(1, 1, 4)).sum().backward()
            assert small.bias.grad == 4 * comm.size


@pytest.mark.mpi
def test_a_failure_after_memory_was_agreed_on_gives_the_parameters_back(P_world, monkeypatch):
    layer = nn.Linear(2, 2)

    def connect(_allreduce):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Allreduce, "connect", connect)
        if P_world.size > 1:
            with pytest.raises(ZeroDivisionError):
                GradientSync(layer, P_world)
    with GradientSync(layer, P_world):
        layer(torch.ones(1, 2)).sum().backward()
        assert layer.weight.grad[0, 0] == P_world.size
