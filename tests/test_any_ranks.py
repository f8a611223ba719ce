"""Laws on any number of virtual ranks and nodes, of which hypothesis draws and shrinks examples."""

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, rehearse, shard
from distdl_rma.geometry import Decomposition, Exchange
from distdl_rma.segments import Channel
from tests.geometry.strategies import splits
from tests.segments.cases import Case
from tests.segments.exchanges import NAMES, expected, movements, values

MOST = 64


@st.composite
def worlds(draw, most=MOST):
    """Ranks, the number of ranks of each node, and the seed of the order, as arguments of ``rehearse``."""
    ranks = draw(st.integers(1, most))
    cuts = draw(st.lists(st.integers(1, max(1, ranks - 1)), unique=True, max_size=6)) if ranks > 1 else []
    ends = [0, *sorted(cuts), ranks]
    nodes = tuple(stop - start for start, stop in itertools.pairwise(ends))
    return {"ranks": ranks, "nodes": nodes, "seed": draw(st.integers(0, 1 << 30))}


WIDE = {"ranks": MOST, "nodes": (1, 30, 33), "seed": 5}


@settings(max_examples=12)
@given(world=worlds(), extent=st.integers(0, 70), data=st.data())
def test_an_exchange_sums_all_that_overlaps(world, extent, data):
    own, need = (data.draw(splits(extent, world["ranks"])) for _ in range(2))

    def play(comm):
        machine = Machine.on()
        line = machine.partition()
        source, target = (
            Decomposition.balanced(line, (extent,)).with_splits({0: split}) for split in (own, need)
        )
        for exchange in (Exchange(machine.rank, source, target), Exchange(machine.rank, target, source)):
            channel = Channel(machine.segments, exchange, np.int64, "drawn")
            for epoch in (1, 2, 3):
                y = channel.move(values(exchange, machine.rank, epoch))
                assert (y == expected(exchange, epoch)).all()
            channel.close()

    rehearse(function=play, **world)


@settings(max_examples=12)
@given(world=worlds(), name=st.sampled_from(NAMES), epochs=st.integers(1, 6), ahead=st.booleans())
@example(world=WIDE, name="halo", epochs=3, ahead=True)
def test_a_channel_keeps_its_epochs_apart(world, name, epochs, ahead):
    def play(comm):
        machine = Machine.on()
        exchange = movements(machine)[name]
        channel, flights = Channel(machine.segments, exchange, np.int64, name), []
        delays = random.Random(world["seed"] + comm.rank)
        for epoch in range(1, epochs + 1):
            x = values(exchange, machine.rank, epoch)
            flights.append((epoch, x, channel.start(channel.cut(x))))
            for _ in range(delays.randrange(3)):
                machine.segments.progress()
            while len(flights) > ahead:
                epoch, x, flight = flights.pop(0)
                assert (channel.gather(x, flight, np.add) == expected(exchange, epoch)).all()
        for epoch, x, flight in flights:
            assert (channel.gather(x, flight, np.add) == expected(exchange, epoch)).all()
        channel.close()

    rehearse(function=play, **world)


@settings(max_examples=12)
@given(world=worlds(24), number=st.integers(0, 1 << 20))
@example(world={"ranks": MOST, "nodes": 5, "seed": 1}, number=3)
def test_collectives_of_any_ranks_give_what_numpy_gives(world, number):
    def play(comm):
        segments, drawn = Machine.on().segments, random.Random(number)
        cases = [Case(segments, drawn, number + k) for k in range(3)]
        for step in range(2):
            mine = [case for case in cases if case.active]
            for case in mine:
                case.job.active[...] = case.operand(case.me, step)
                case.job.start()
            # Each rank waits in an order of its own.
            random.Random(comm.rank + step).shuffle(mine)
            for case in mine:
                case.check(case.job.wait(), step)

    rehearse(function=play, **world)


FUNCTIONS = {
    "conv2d": lambda x: F.conv2d(x, torch.linspace(-1, 1, 27, dtype=x.dtype).reshape(1, 3, 3, 3), padding=1),
    "pool": lambda x: F.max_pool2d(x, 3, stride=2, padding=1),
    "softmax": lambda x: x.softmax(2),
    "norm": lambda x: F.group_norm(x, 1),
    "sum": lambda x: x.sum((0, 2)),
    "flip": lambda x: x.flip(3) * 2,
    "transpose": lambda x: x.transpose(2, 3) @ x,
}


@settings(max_examples=12)
@given(
    world=worlds(16),
    name=st.sampled_from(sorted(FUNCTIONS)),
    shape=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    upright=st.booleans(),
)
@example(world={"ranks": MOST, "nodes": 4, "seed": 2}, name="conv2d", shape=(70, 9), upright=True)
def test_functions_of_split_tensors_are_those_of_whole_ones(world, name, shape, upright):
    function = FUNCTIONS[name]
    x = torch.randn(2, 3, *shape, dtype=torch.float64, requires_grad=True)
    expected_y = function(x)
    expected_y.square().sum().backward()

    def play(comm):
        mine = shard({"H" if upright else "W": comm.size}, x.detach()).requires_grad_()
        y = function(mine)
        torch.testing.assert_close(y.full_tensor(), expected_y.detach())
        y.square().sum().backward()
        torch.testing.assert_close(mine.grad.full_tensor(), x.grad)

    rehearse(function=play, **world)


def test_a_failing_law_shrinks_to_the_fewest_ranks():
    @settings(max_examples=120, derandomize=True, database=None)
    @given(world=worlds())
    def law(world):
        def play(comm):
            assert comm.allgather(comm.rank)[-1] < 2, f"{world['ranks']} ranks"

        rehearse(function=play, **world)

    with pytest.raises(AssertionError, match=r"^3 ranks"):
        law()
