"""A movement played by all its ranks in one process, with integer data."""

from __future__ import annotations

from collections import defaultdict, deque

import numpy as np

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.exchange import Exchange
from tests.geometry.strategies import RANKS


def plans_of(source, target, ranks):
    """Every rank's own plan of one movement."""
    return {rank: Exchange(rank, source, target) for rank in ranks}


def everywhere(source, target):
    """The plans of all ranks of the machine, those without a part in the movement included."""
    return plans_of(source, target, range(RANKS))


def inputs(plans, seed):
    """Random integers of the shape that each rank puts in."""
    rng = np.random.default_rng(seed)
    return {rank: rng.integers(-9, 10, plan.own.shape) for rank, plan in plans.items()}


def execute(plans, x):
    """Every rank's `y` from every rank's `x`, where a rank knows nothing but its own plan and its mail."""
    mail = defaultdict(deque)
    for rank, plan in plans.items():
        for piece in plan.sends:
            mail[rank, piece.peer].append((piece.box, x[rank][piece.box.slices(plan.own)]))
    y = {}
    for rank, plan in plans.items():
        y[rank] = np.zeros(plan.need.shape, dtype=np.int64)
        for piece in plan.local:
            y[rank][piece.target.slices(plan.need)] += x[rank][piece.box.slices(plan.own)]
        for piece in plan.receives:
            box, values = mail[piece.peer, rank].popleft()
            # In its own coordinates each, where an image lies elsewhere.
            assert box == (piece.box if piece.there is None else piece.there)
            y[rank][piece.box.slices(plan.need)] += values
    assert not any(mail.values())
    return y


def sum_of_owners(plans, x):
    """What `execute` must return: all owned boxes summed in one global array, needed boxes cut out of it."""
    boxes = [box for plan in plans.values() for box in (plan.own, plan.need) if not box.empty]
    if not boxes:
        return {rank: np.zeros(plan.need.shape, dtype=np.int64) for rank, plan in plans.items()}
    starts = [min(bounds) for bounds in zip(*(box.start for box in boxes), strict=True)]
    stops = [max(stop for _, stop in dim) for dim in zip(*(box.bounds for box in boxes), strict=True)]
    hull = Box(tuple(zip(starts, stops, strict=True)))
    total = np.zeros(hull.shape, dtype=np.int64)
    for rank, plan in plans.items():
        if not plan.own.empty:
            total[plan.own.slices(hull)] += x[rank]
    return {
        rank: np.zeros(plan.need.shape, dtype=np.int64) if plan.need.empty else total[plan.need.slices(hull)]
        for rank, plan in plans.items()
    }


def product_of(a, b):
    """Inner product over all ranks, exact."""
    return sum(int((a[rank] * b[rank]).sum()) for rank in a)


def equal(a, b):
    """Whether all ranks hold the same in both."""
    return a.keys() == b.keys() and all(np.array_equal(a[rank], b[rank]) for rank in a)
