"""Collectives with random arguments, and what they must give."""

import numpy as np

from distdl_rma.segments import Group

REDUCE = {
    # As numpy does it in the type itself: integers wrap around.
    "sum": lambda rows: rows.sum(0, dtype=rows.dtype),
    "mean": lambda rows: rows.sum(0) / len(rows),
    "prod": lambda rows: rows.prod(0, dtype=rows.dtype),
    "min": lambda rows: rows.min(0),
    "max": lambda rows: rows.max(0),
    "band": np.bitwise_and.reduce,
    "bor": np.bitwise_or.reduce,
    "bxor": np.bitwise_xor.reduce,
}
KINDS = ["f2", "f4", "f8", "c8", "c16", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]
# Operations that mean nothing for a kind of numbers.
BITS = {"band", "bor", "bxor"}
MEANINGLESS = {"i": {"mean"}, "u": {"mean"}, "b": {"sum", "mean"}, "c": {"min", "max", *BITS}, "f": BITS}
COUNTS = [0, 1, 2, 3, 5, 7, 100, 3001, 40_000]


def operand(number, rank, step, count, dtype):
    draw = np.random.default_rng((number, rank, step))
    if dtype.kind in "iu":
        # Sums and products wrap around.
        return draw.integers(0, 256, count * dtype.itemsize, np.uint8).view(dtype)
    if dtype.kind == "b":
        # True on most ranks, so that now and then it is on all.
        return draw.random(count) < 0.7
    return (
        draw.integers(-9, 9, count) + (1j if dtype.kind == "c" else 0) * draw.integers(-9, 9, count)
    ).astype(dtype)


class Case:
    """A collective over random ranks, and what it must give."""

    def __init__(self, segments, rng, number):
        self.number = number
        everyone = segments.ranks
        self.ranks = rng.sample(everyone, rng.randint(1, len(everyone)))
        self.kind = rng.choice(["allreduce", "allgather", "broadcast"])
        self.dtype = np.dtype(rng.choice(KINDS))
        # Products of floats of many ranks overflow.
        meaningless = MEANINGLESS[self.dtype.kind] | ({"prod"} if len(everyone) > 8 else set())
        self.op = rng.choice([op for op in REDUCE if op not in meaningless])
        self.counts = [rng.choice(COUNTS) // len(everyone) for _ in self.ranks]
        self.count = rng.choice(COUNTS)
        self.root = rng.choice(self.ranks)
        self.active = segments.rank in self.ranks
        if self.active:
            self.me = self.ranks.index(segments.rank)
            options = {"allreduce": {"op": self.op}, "broadcast": {"root": self.root}}.get(self.kind, {})
            make = getattr(Group(segments, self.ranks, f"group {number}"), self.kind)
            count = self.counts if self.kind == "allgather" else self.count
            self.job = make(count, self.dtype, name=f"case {number}", **options)

    def operand(self, at, step):
        size = self.counts[at] if self.kind == "allgather" else self.count
        return operand(self.number, self.ranks[at], step, size, self.dtype)

    def expected(self, step):
        rows = [self.operand(at, step) for at in range(len(self.ranks))]
        if self.kind == "broadcast":
            return rows[self.ranks.index(self.root)]
        if self.kind == "allgather":
            return np.concatenate(rows)
        return REDUCE[self.op](np.array(rows))

    def check(self, result, step):
        tolerance = 1e-3 if self.dtype == np.float16 else 1e-6
        np.testing.assert_allclose(result, self.expected(step), rtol=tolerance, atol=tolerance)
