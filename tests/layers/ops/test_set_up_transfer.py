"""Tensors that travel in passes: initial values and states, with little memory of the segment."""

import threading
from functools import partial
from math import prod
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distdl_rma import GradientSync, Machine, MismatchError, UnsupportedError, gather_state_dict
from distdl_rma.geometry import Decomposition, Partition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.layers import DistributedEmbedding, DistributedLinearReduceScatter
from distdl_rma.layers.ops import set_up_transfer as passes
from distdl_rma.layers.ops.set_up_transfer import (
    PASS_NBYTES,
    TransferInPasses,
    broadcast_from_first,
    gather_whole,
)
from distdl_rma.segments.collectives.allgather import Allgather, Bcast
from distdl_rma.segments.transport.heap import aligned


def all_kinds(rank):
    """Tensors of many types, shapes and memory formats, whose elements tell the rank."""
    image = torch.arange(120).reshape(2, 3, 4, 5) + 1000 * rank
    return [
        torch.tensor(rank + 0.5),
        image.float().to(memory_format=torch.channels_last),
        torch.empty(0, 3),
        image.to(torch.bfloat16)[:, ::2],
        (image % 3 == rank % 3).flatten(),
        torch.view_as_complex(image.double().reshape(-1, 2)).conj(),
        torch.full((7,), rank, dtype=torch.uint8),
        image[0, 0].short().t(),
        torch.nn.Parameter(image.half()),
    ]


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [64, 1000, 1 << 20])
def test_tensors_become_those_of_the_first_rank_whatever_they_are(machine, monkeypatch, nbytes):
    monkeypatch.setattr(passes, "PASS_NBYTES", nbytes)
    ranks = machine.ranks[::-1]
    tensors, firsts = all_kinds(machine.rank), all_kinds(ranks[0])
    strides = [tensor.stride() for tensor in tensors]
    broadcast_from_first(machine, ranks, tensors, "mixed")
    for tensor, first, stride in zip(tensors, firsts, strides, strict=True):
        assert torch.equal(tensor, first) and tensor.stride() == stride


@pytest.mark.mpi(min_size=2)
def test_a_broadcast_over_some_ranks_leaves_the_others_alone(machine, comm):
    tensor = torch.full((5,), float(machine.rank))
    if machine.rank:
        broadcast_from_first(machine, machine.ranks[1:], [tensor], "few")
    assert tensor.tolist() == [min(machine.rank, 1.0)] * 5


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("other", [torch.zeros(3, 4), torch.zeros(6, 2), torch.zeros(4, 3).double()])
def test_other_shapes_or_types_are_a_mismatch_on_all_ranks(machine, other):
    tensor = other if machine.rank == 0 else torch.zeros(4, 3)
    with pytest.raises(MismatchError, match="'layer"):
        broadcast_from_first(machine, machine.ranks, [tensor], "layer")


@pytest.mark.mpi
def test_a_type_that_does_not_move_is_refused_before_anything_moves(machine):
    tensors = [torch.zeros(2), torch.empty(2, dtype=torch.float8_e5m2fnuz)]
    with pytest.raises(UnsupportedError, match=r"layer: dtype torch\.float8_e5m2fnuz is not supported"):
        broadcast_from_first(machine, machine.ranks, tensors, "layer")


def decompositions(P):
    """Owners of a tensor: cut in one dimension or two, unevenly, with parts that are empty."""
    n = P.size
    line, grid = P.ranks, (2, n // 2) if n % 2 == 0 else (1, n)
    flat = Partition(line, (n,), P.me)
    yield Decomposition(flat, (Balanced(5, 1), Balanced(7, n)), (1,))
    yield Decomposition(
        flat, (Listed((0, *(3,) * (n - 1))) if n > 1 else Balanced(3, 1), Balanced(4, 1)), (0,)
    )
    yield Decomposition.balanced(Partition(line[::-1], grid, P.me), (6, 11))
    yield Decomposition.balanced(flat, (max(1, n - 1),))
    yield Decomposition.replicated(Partition(line[-1:], (1,), P.me), (9, 2))
    yield Decomposition.balanced(flat, (0,))


@pytest.mark.mpi
@pytest.mark.parametrize("nbytes", [40, 300, 1 << 19])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.bool])
def test_the_whole_is_put_together_wherever_it_is_kept(machine, monkeypatch, nbytes, dtype):
    monkeypatch.setattr(passes, "PASS_NBYTES", nbytes)
    everyone = machine.partition()
    for givers in decompositions(everyone):
        whole = (torch.arange(prod(givers.shape)) % 7).to(dtype).view(givers.shape)
        part = whole[givers.slices()] if givers.partition.active else whole.new_empty(0)
        for takers in (everyone, everyone.create_partition_inclusive([machine.size - 1])):
            got = gather_whole(machine, givers, takers, part, "tensor")
            assert got.dtype == dtype
            assert torch.equal(got, whole) if takers.active else got.numel() == 0


@pytest.mark.mpi
def test_large_weights_need_a_small_segment_only(comm):
    # 6 MB of weights, which took two slots for each rank where they come from, and two for where they go.
    with Machine(comm, segment_size="32MiB", timeout=15) as machine:
        P_x = machine.partition((comm.size, 1))
        torch.manual_seed(comm.rank)
        layer = DistributedEmbedding(P_x, 3000, 512)
        assert machine.segments.heap.peak < 2 * PASS_NBYTES + (16 << 10)
        sums = comm.allgather(layer.weight.detach().double().sum().item())
        assert sums == sums[:1] * comm.size
        plain = torch.nn.Linear(1000, 1000)
        sync = GradientSync(plain, machine.partition(), bucket_nbytes=0)
        sums = comm.allgather(plain.weight.detach().double().sum().item())
        assert sums == sums[:1] * comm.size
        sync.close()


@pytest.mark.mpi
@pytest.mark.parametrize("rank", [None, 0])
def test_a_large_state_needs_a_small_segment_only(comm, rank):
    with Machine(comm, segment_size="16MiB", timeout=15, transport="remote") as machine:
        P = machine.partition((1, comm.size))
        layer = DistributedLinearReduceScatter(P, 1500, 1500, bias=False)
        before = machine.segments.heap.peak
        state = gather_state_dict(layer, rank)
        # Two passes of what comes in, two of what is staged for other nodes.
        assert machine.segments.heap.peak - before < 4 * PASS_NBYTES + (16 << 10)
        if state:
            assert torch.equal(state["weight"][layer.layouts["weight"].slices()], layer.weight)


def segment_nbytes(size, per_node, make, rank=0):
    """Bytes of a rank's segment that a handle takes which ``make`` makes, on a machine that is not there."""
    nodes = tuple(tuple(range(size))[at : at + per_node] for at in range(0, size, per_node))
    asked = []

    def buffer(nbytes, words, owner):
        asked.append(aligned(nbytes) + 8 * words)
        return SimpleNamespace(flags=None, view=lambda dtype, shape, offset: np.empty(shape, dtype))

    manager = SimpleNamespace(
        closed=True,
        rank=rank,
        segment=SimpleNamespace(direct_nodes=nodes, lock=threading.RLock(), store_fence=None, acquire=None),
        waiter=SimpleNamespace(spins=0),
        counters=None,
        get_segment_buffer=buffer,
        operation=str.encode,
    )
    make(manager)
    return sum(asked)


def broadcast_nbytes(size, per_node, count):
    """Bytes of the root's segment that a broadcast of so many bytes takes."""
    return segment_nbytes(size, per_node, lambda m: Bcast(m, range(size), count, np.uint8, 0, "counted"))


@pytest.mark.parametrize("per_node", [1, 4, 64])
def test_the_first_rank_of_many_broadcasts_from_a_segment_like_that_of_few(per_node):
    few, many = (broadcast_nbytes(size, per_node, PASS_NBYTES) for size in (4, 64))
    # Of each rank of its node it has four flags.
    assert many - few <= 4 * 8 * (per_node - min(per_node, 4))
    assert many <= 2 * PASS_NBYTES + 4 * 8 * per_node


@pytest.mark.parametrize("per_node", [1, 4, 64])
@pytest.mark.parametrize("rank", [0, 63])
def test_a_state_of_many_ranks_is_gathered_in_a_segment_like_that_of_few(per_node, rank):
    # A weight of a MiB, and one of 256 MiB.
    held = []
    for size, extent in ((2, 1 << 9), (64, 1 << 9), (64, 1 << 13)):
        P = Partition(tuple(range(size)), (size, 1), min(rank, size - 1))
        runs = TransferInPasses(Decomposition.balanced(P, (extent, extent)), torch.float32).runs.lengths
        make = partial(Allgather, ranks=range(size), count=runs, dtype=np.float32, name="counted")
        nbytes = segment_nbytes(size, per_node, make, P.me)
        # Two passes of what comes in, two of what is staged, and slots begin on cache lines.
        assert nbytes <= 4 * PASS_NBYTES + 4 * 64 * size
        held.append(nbytes)
    assert held[1] == held[2]


def test_every_element_travels_in_some_pass():
    for size, shape in ((3, (1000, 1001)), (5, (4, 7)), (64, (300, 900))):
        P = Partition(tuple(range(size)), (size, 1), 0)
        givers = Decomposition.balanced(P, shape)
        plan = TransferInPasses(givers, torch.float64)
        for giver, rank in enumerate(P.ranks):
            runs = [plan.run(giver, number) for number in range(plan.count)]
            assert {run.stop - run.start for run in runs} == {plan.runs.lengths[giver]}
            covered = set().union(*(range(run.start, run.stop) for run in runs))
            assert covered == set(range(givers.box(rank).volume))
