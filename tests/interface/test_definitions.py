"""The interface document's definitions, segments and layers, tests by the number of the requirement.

A few lines each, by the names that the document has; the tests of the modules go deeper.
"""

import itertools
from math import prod

import pytest
import torch
from torch import nn

from distdl_rma import (
    ArgumentError,
    Distribution,
    Machine,
    PartitionError,
    SegmentError,
    ShapeError,
    UnsupportedError,
    zero_volume_tensor,
)
from distdl_rma.layers import Concat, Conv, InstanceNorm
from distdl_rma.segments.memory.buffer import SegmentBuffer
from tests.fuzz.interface import compare
from tests.layers.sequential import agree, shard

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


def test_a2_the_first_parts_get_one_element_more(M, comm):
    n = comm.size
    shards = Distribution(1, 1, n, 1).shards((2, 3, 2 * n + 1, 5), M)
    lengths = [shards[rank].shape[2] for rank in M.ranks]
    assert lengths == [3, *(2 for _ in range(n - 1))]
    assert shards[M.ranks[0]].shape == (2, 3, 3, 5)


def test_a2_more_parts_than_elements_leave_ranks_without(M, comm):
    shards = Distribution(1, comm.size, 1).shards((2, 1, 4), M)
    assert [shards[rank].empty for rank in M.ranks] == [False, *(True for _ in range(comm.size - 1))]


@pytest.mark.parametrize("counts", [(2, 1, 1), (1, 2, 1, 1), (1, 1, 2, 1, 1)])
def test_a2_instances_are_counted_in_one_to_three_spatial_dimensions(counts):
    assert Distribution(*counts).size == 2
    assert Distribution(*counts).dim == len(counts)


def test_a3_input_and_output_are_distributed_independently(M, comm):
    n = comm.size
    kinds = [
        Distribution(n, 1, 1, 1),
        Distribution(1, n, 1, 1),
        Distribution(1, 1, n, 1),
        Distribution(1, 1, 1, n),
    ]
    module = nn.Conv2d(3, 5, 3, padding=1, **DOUBLE)
    for bar, hat in itertools.product(kinds, repeat=2):
        layer = Conv(M, (4, 3, 5, 7, 6), bar, hat, kernel_size=3, padding=1, **DOUBLE)
        layer.load_state_dict(module.state_dict())
        compare(layer, module, [M.distribute(bar)], M.distribute(hat), [(4, 3, 7, 6)], f"{bar} to {hat}")


def test_a4_a_process_sits_where_the_strides_say(M, comm):
    # The document's (n, c, p), two places for space of which one is used.
    tilde = Distribution(1, 1, 1, 1, strides=(1, 1, 2))
    pair = Distribution(2, 1, 1, 1, strides=(2, 1, 1))
    if comm.size >= 2:
        assert pair.active_ranks(M) == M.ranks[:2]
        assert tilde.active_ranks(M) == M.ranks[:1]
        assert tilde.coords_of(M.ranks[1], M) is None
    if comm.size >= 4:
        holes = Distribution(2, 1, 1, 1, strides=(2, 1, 1, 2))
        assert holes == Distribution(2, 1, 1, 1, strides=(2, 1, 2))
        assert holes.active_ranks(M) == (M.ranks[0], M.ranks[2])
        assert Distribution(2, 1, 2, 1).rank_of((1, 0, 1, 0), M) == M.ranks[3]


def test_a4_a_layer_works_on_a_distribution_with_holes(M, comm):
    half = (comm.size + 1) // 2
    holes = Distribution(1, half, 1, 1, strides=(1, half, comm.size // half))
    layer = InstanceNorm(M, (2, 4, 5, 3), holes, **DOUBLE)
    P_x = M.distribute(holes)
    compare(layer, nn.InstanceNorm2d(4, **DOUBLE), [P_x], P_x, [(2, 4, 5, 3)], "holes")


def test_a5_everything_that_the_inequalities_permit_has_ranks_of_its_own():
    found = 0
    for *counts, box_n, box_c, box_p in itertools.product(range(1, 5), repeat=6):
        n, c, p = counts
        if p <= box_p and c * p <= box_c * box_p and n * c * p <= box_n * box_c * box_p:
            world = _Line(box_n * box_c * box_p)
            ranks = Distribution(n, c, p, strides=(box_n, box_c, box_p)).active_ranks(world)
            assert len(set(ranks)) == prod(counts)
            found += 1
    assert found == 1626


class _Line:
    def __init__(self, size):
        self.ranks = tuple(range(size))


def test_a5_an_inequality_that_does_not_hold_is_quoted_on_every_rank_before_anything_is_sent(M, comm):
    puts, image = M.segments.counters.puts, (4, 3, 2, 6, 6)
    bad, good = Distribution(1, 2, 3, 1, strides=(1, 1, 4)), Distribution(1, 1, 1, 1)
    for equation, make in [
        ("3.2", lambda: Conv(M, image, bad, kernel_size=1)),
        ("3.5", lambda: Conv(M, image, good, bad, kernel_size=1)),
        ("4.2", lambda: InstanceNorm(M, (4, 3, 6, 6), bad)),
    ]:
        with pytest.raises(PartitionError) as caught:
            make()
        assert f"({equation}): 2 x 3 x 1 = 6 > 1 x 4 = 4" in str(caught.value)
        assert len(set(comm.allgather(str(caught.value)))) == 1
    large = Distribution(1, 1, comm.size + 1, 1)
    with pytest.raises(PartitionError, match=rf"\(3.3\): .* > \|M\| = {comm.size}"):
        Conv(M, image, large, kernel_size=1)
    assert M.segments.counters.puts == puts


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


def test_a7_a_segment_buffer_has_address_offset_size_and_view(M):
    buffer = M.segments.get_segment_buffer(24)
    assert buffer.nbytes == 24 and buffer.offset >= 0
    view = buffer.view("float64", (3,))
    assert view.ctypes.data == buffer.address
    torch.from_numpy(view).fill_(2.0)
    assert view.tolist() == [2.0, 2.0, 2.0]
    assert M.segments.get_segment_buffer(0).nbytes == 0


def test_a7_a_size_that_is_none_is_refused(M):
    for size in (-1, 2.5, "8"):
        with pytest.raises(ArgumentError, match="bytes"):
            M.segments.get_segment_buffer(size)
    with pytest.raises(SegmentError, match=r"asked for \d+ bytes, .* free, largest block .*SEGMENT_SIZE"):
        M.segments.get_segment_buffer(1 << 40)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("early", [False, True], ids=["first forward", "connect"])
def test_a8_neighbours_exchange_their_pointers_once(M, comm, monkeypatch, early):
    peers, exchange = [], SegmentBuffer.exchange

    def counted(buffer, notes, *rest, **named):
        peers.append(set(notes))
        return exchange(buffer, notes, *rest, **named)

    split = Distribution(1, 1, comm.size)
    layer = Conv(M, (2, 3, 4, 3 * comm.size), split, kernel_size=3, padding=1, **DOUBLE)
    x = shard(M.distribute(split), torch.randn(2, 3, 3 * comm.size, **DOUBLE))
    monkeypatch.setattr(SegmentBuffer, "exchange", counted)
    if early:
        layer.connect()
        assert peers
        peers.clear()
    layer(x)
    assert bool(peers) == (not early)
    peers.clear()
    layer(x)
    assert not peers


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


def test_a13_the_sizes_of_local_tensors_are_known_before_the_first_call(M, comm):
    bar, hat = Distribution(1, 1, comm.size), Distribution(1, 1, 1)
    layer = Conv(M, (2, 3, 5, 9), bar, hat, kernel_size=3)
    assert layer.get_sizeof_input_tensor() == 4 * bar.shards((2, 3, 9), M)[comm.rank].volume
    assert layer.get_sizeof_output_tensor() == 4 * hat.shards((2, 5, 7), M)[comm.rank].volume
    norm = InstanceNorm(M, (2, 3, 9), hat, **DOUBLE)
    assert norm.get_sizeof_tensor() == (8 * 2 * 3 * 9 if comm.rank == M.ranks[0] else 0)


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


def test_a17_other_patterns_of_weights_are_refused(M):
    with pytest.raises(UnsupportedError, match=r"weights='root'.*\"replicated\", the only pattern"):
        Conv(M, (2, 4, 6, 12, 7), Distribution(1, 1, 1, 1), kernel_size=1, weights="root")


def test_a20_concat_joins_channels_of_tensors_with_different_distributions(M, comm):
    n = comm.size
    inputs = [Distribution(1, 1, n, 1), Distribution(1, n, 1, 1), Distribution(n, 1, 1, 1)]
    for output in (None, Distribution(1, 1, 1, n)):
        layer = Concat(M, (3, (2, 4, 1), 5, 6), inputs, output, **DOUBLE)
        xs = [torch.randn(3, c, 5, 6, **DOUBLE) for c in (2, 4, 1)]
        places = [M.distribute(d) for d in inputs]
        local = [shard(P, x).requires_grad_() for P, x in zip(places, xs, strict=True)]
        y = layer(*local)
        P_y = M.distribute(output or inputs[0])
        agree(y, shard(P_y, torch.cat(xs, 1)))
        gradient = torch.randn(3, 7, 5, 6, **DOUBLE)
        y.backward(shard(P_y, gradient))
        for part, P, x in zip(gradient.split([2, 4, 1], 1), places, local, strict=True):
            agree(x.grad, shard(P, part))


def test_a20_concat_of_one_distribution_without_a_channel_split_is_local(M, comm):
    split = Distribution(1, 1, comm.size, 1)
    layer, P = Concat(M, (3, (2, 4), 5, 6), [split, split]), M.distribute(split)
    before = M.segments.stats(), M.segments.counters.puts
    xs = [torch.randn(3, c, 5, 6) for c in (2, 4)]
    assert torch.equal(layer(*(shard(P, x) for x in xs)), shard(P, torch.cat(xs, 1)))
    assert (M.segments.stats(), M.segments.counters.puts) == before


def test_a20_concat_has_nothing_to_synchronise(M, comm):
    cut = Distribution(1, comm.size, 1)
    layer = Concat(M, (3, (2, 4), 5), [cut, cut])
    assert layer.get_ranks_synch_weights() == layer.get_ranks_synch_norm() == []
    assert layer.get_sizeof_gradients() == layer.get_sizeof_norm() == 0
    with pytest.raises(ShapeError, match="takes 2 inputs, got 1"):
        layer(torch.zeros(3, 2, 5))
