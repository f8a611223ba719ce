"""Distributions: instances per dimension, and where they sit in the machine."""

import itertools
import re
from dataclasses import dataclass
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distdl_rma import Distribution, PartitionError
from distdl_rma.geometry import Partition
from distdl_rma.geometry.distribution import INPUT, NORM, OUTPUT


@dataclass
class M:
    """An ordered list of ranks."""

    ranks: tuple[int, ...]


def line(size):
    return M(tuple(range(size)))


def test_everything_that_the_inequalities_permit_is_placed_on_ranks_of_its_own():
    found = not_by_formula = 0
    for n, c, p, box_n, box_c, box_p in itertools.product(range(1, 5), repeat=6):
        distribution, size = Distribution(n, c, p, strides=(box_n, box_c, box_p)), box_n * box_c * box_p
        if p > box_p or c * p > box_c * box_p or n * c * p > size:
            with pytest.raises(PartitionError, match=r"\(3\.[123]\)"):
                distribution.active_ranks(line(size))
            continue
        ranks = distribution.active_ranks(line(size))
        assert len(set(ranks)) == len(ranks) == n * c * p and max(ranks) < size, distribution
        found += 1
        # By the strides of the box, whether it fits or not.
        places = {(i * box_c + j) * box_p + k for i, j, k in itertools.product(range(n), range(c), range(p))}
        not_by_formula += len(places) < len(ranks) or max(places) >= size
    assert (found, not_by_formula) == (1626, 564)


def test_a_shard_sits_where_the_strides_say():
    machine = M((5, 3, 8, 1, 0, 2, 7, 9, 11, 10, 4, 6))
    tight = Distribution(1, 2, 3, 2)
    assert [
        tight.rank_of((0, c, h, w), machine) for c in range(2) for h in range(3) for w in range(2)
    ] == list(machine.ranks)
    holes = Distribution(2, 1, 2, strides=(2, 2, 3))
    assert holes.active_ranks(machine) == (5, 3, 7, 9)
    assert holes.coords_of(3, machine) == (0, 0, 1)
    assert holes.coords_of(8, machine) is None
    assert Distribution(2, 1, 2, strides=(2, 1, 4)).active_ranks(machine) == (5, 3, 0, 2)


@pytest.mark.parametrize(
    ("counts", "strides", "indices"),
    [
        # Batch and channels fit into the box.
        ((2, 2, 1), (2, 2, 2), [0, 2, 4, 6]),
        # More channels than the box has: packed among themselves.
        ((2, 3, 1), (2, 2, 2), [0, 1, 2, 4, 5, 6]),
        # More batches than the box has: all packed.
        ((3, 1, 2), (2, 2, 2), [0, 1, 2, 3, 4, 5]),
        ((3, 2, 1), (2, 2, 2), [0, 1, 2, 3, 4, 5]),
    ],
)
def test_what_does_not_fit_into_the_box_is_packed(counts, strides, indices):
    assert list(Distribution(*counts, strides=strides).active_ranks(line(prod(strides)))) == indices


@st.composite
def distributions(draw):
    counts = draw(st.lists(st.integers(1, 3), min_size=3, max_size=5))
    kind = draw(st.sampled_from(["tight", "three", "all"]))
    if kind == "tight":
        return Distribution(*counts)
    space = counts[2:] if kind == "all" else [prod(counts[2:])]
    lead = [draw(st.integers(1, 3)) for _ in range(2)]
    box = [n + draw(st.integers(0, 1)) for n in space]
    # Large enough in batch that (3.3) holds whatever the channels do.
    lead[1] = max(lead[1], -(-counts[1] * prod(counts[2:]) // prod(box)))
    lead[0] = max(lead[0], -(-prod(counts) // (lead[1] * prod(box))))
    return Distribution(*counts, strides=[*lead, *box])


@given(distributions(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_places_and_ranks_are_inverse_on_any_machine(distribution, rng, more):
    size = prod(distribution.strides) + more
    machine = M(tuple(rng.sample(range(2 * size), size)))
    seen = {}
    for coords in itertools.product(*(range(n) for n in distribution.shape)):
        rank = distribution.rank_of(coords, machine)
        assert distribution.coords_of(rank, machine) == coords
        assert rank not in seen
        seen[rank] = coords
    assert tuple(seen) == distribution.active_ranks(machine)
    assert all(distribution.coords_of(r, machine) is None for r in machine.ranks if r not in seen)


@given(distributions(), st.data())
def test_shards_cover_a_tensor_once_and_idle_ranks_have_none(distribution, data):
    shape = [data.draw(st.integers(0, 5)) for _ in distribution.shape]
    machine = line(prod(distribution.strides) + 1)
    shards = distribution.shards(shape, machine)
    assert list(shards) == list(machine.ranks)
    active = distribution.active_ranks(machine)
    assert sum(box.volume for box in shards.values()) == prod(shape)
    assert all(box.empty for rank, box in shards.items() if rank not in active)
    for box, other in itertools.combinations(shards.values(), 2):
        assert (box & other).empty


def test_the_partition_has_the_shards_on_a_grid_and_knows_who_looks():
    world = Partition((4, 2, 0, 1, 3), (5,), me=2, home=None)
    P = Distribution(1, 1, 2, strides=(1, 2, 2)).on(world)
    assert (P.ranks, P.shape, P.me, P.rank) == ((4, 2), (1, 1, 2), 2, 1)
    assert Distribution(1, 2, 1, strides=(1, 2, 2)).on(world).ranks == (4, 0)


@pytest.mark.parametrize(
    ("distribution", "size", "message"),
    [
        (Distribution(1, 1, 2, 2, strides=(4, 1, 3)), 12, "(3.1): 2 x 2 = 4 > 3"),
        (Distribution(1, 1, 4, strides=(4, 1, 3)), 12, "(3.1): 4 > 3"),
        (Distribution(1, 2, 3, 1, strides=(9, 1, 4)), 36, "(3.2): 2 x 3 x 1 = 6 > 1 x 4 = 4"),
        (Distribution(3, 1, 2, 1, strides=(1, 2, 2)), 4, "(3.3): 3 x 1 x 2 x 1 = 6 > 1 x 2 x 2 = 4"),
        (Distribution(1, 1, 2, 1, strides=(1, 2, 2)), 3, "(3.3): 1 x 2 x 2 = 4 > |M| = 3"),
        (Distribution(1, 2, 3, 2, 1), 11, "(3.3): 1 x 2 x 6 = 12 > |M| = 11"),
    ],
)
def test_an_inequality_that_does_not_hold_is_quoted_with_its_numbers(distribution, size, message):
    for equations in (INPUT, OUTPUT, NORM):
        number = equations[int(message[3]) - 1]
        quoted = message.replace(message[1:4], number, 1)
        with pytest.raises(PartitionError) as caught:
            distribution.check(size, equations, "enc1")
        assert str(caught.value) == f"enc1: {quoted}"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Distribution(1, 1.5, 2), r"instances must be integers, got \(1, 1.5, 2\)"),
        (lambda: Distribution(1, "2", 2), "instances must be integers"),
        (lambda: Distribution(1, 0, 2), r"instances must be at least 1, got \(1, 0, 2\)"),
        (lambda: Distribution(1, 2), r"1 to 3 spatial dimensions, got \(1, 2\)"),
        (lambda: Distribution(1, 2, 1, 1, 1, 1), "1 to 3 spatial dimensions"),
        (lambda: Distribution(1, 2, 3, 1, strides=(1, 2)), r"strides are \(N~, C~, P~\), or 4 numbers"),
        (lambda: Distribution(1, 2, 3, 1, strides=(1, 2, 3, 1, 1)), r"got \(1, 2, 3, 1, 1\)"),
        (lambda: Distribution(1, 2, 3, strides=(1, 2, 0)), "strides must be at least 1"),
        (lambda: Distribution(1, 2, 3, strides=(1, 2, None)), "strides must be integers"),
    ],
)
def test_what_counts_nothing_is_refused(make, message):
    with pytest.raises(PartitionError, match=message):
        make()


def test_what_is_not_there_is_refused():
    distribution = Distribution(1, 2, 1)
    with pytest.raises(PartitionError, match=r"no coordinates \(0, 2, 0\)"):
        distribution.rank_of((0, 2, 0), line(2))
    with pytest.raises(PartitionError, match=r"no coordinates \(0, 1\)"):
        distribution.rank_of((0, 1), line(2))
    for coords in ("ab", (0, 0.5, 0), 1):
        with pytest.raises(
            PartitionError, match=rf"coordinates must be integers, got {re.escape(repr(coords))}"
        ):
            distribution.rank_of(coords, line(2))
    with pytest.raises(PartitionError, match=r"rank 7 is not in M = \(0, 1\)"):
        distribution.coords_of(7, line(2))
    with pytest.raises(PartitionError, match=r"shape \(4, 4\) has 2"):
        distribution.shards((4, 4), line(2))


def test_equal_distributions_are_equal_however_their_strides_are_given():
    assert Distribution(1, 2, 3, 2, strides=(1, 2, 3, 2)) == Distribution(1, 2, 3, 2)
    assert hash(Distribution(1, 2, 3, 2, strides=(1, 2, 6))) == hash(Distribution(1, 2, 3, 2))
    assert Distribution(1, 2, 3, strides=(1, 2, 4)) != Distribution(1, 2, 3)
    assert repr(Distribution(1, 2, 3, 2)) == "Distribution(1, 2, 3, 2)"
    assert repr(Distribution(1, 2, 3, strides=(1, 2, 4))) == "Distribution(1, 2, 3, strides=(1, 2, 4))"
