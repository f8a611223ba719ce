"""Random moving layers against the same operation on global tensors, exactly, on integer-valued data."""

from __future__ import annotations

import itertools
import random
import warnings
from math import prod

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError, layers
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Listed
from tests.pretended import pretended_nodes

REAL = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
COMPLEX = [torch.complex64, torch.complex128]
WHOLE = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
RARE = [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex32]
# Types that torch differentiates.
SMOOTH = [*REAL, *COMPLEX, torch.complex32]


def random_grid(rng, size, dims):
    """A grid of so many dimensions and at most so many places."""
    grids = [grid for grid in itertools.product(range(1, size + 1), repeat=dims) if prod(grid) <= size]
    largest = [grid for grid in grids if prod(grid) == size]
    return rng.choice(largest if rng.random() < 0.6 else grids)


def random_partition(rng, P_world, grid):
    ranks = rng.sample(range(P_world.size), prod(grid))
    if rng.random() < 0.4:
        ranks.sort()
    return P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition(grid)


def random_lengths(rng, grid):
    """Lengths of the parts of every dimension: balanced, uneven, some empty."""
    lengths = []
    for parts in grid:
        if rng.random() < 0.5:
            lengths.append([len(part) for part in torch.arange(rng.randint(1, 7)).tensor_split(parts)])
        else:
            lengths.append([rng.randint(0, 4) for _ in range(parts)])
    return lengths


def padded(x, dim, left, right, mode, value):
    """Tensor padded in one dimension, by its definition."""
    n, index = x.shape[dim], torch.arange(-left, x.shape[dim] + right)
    if mode in ("zeros", "constant"):
        return F.pad(x.movedim(dim, -1), (left, right), value=value).movedim(-1, dim)
    if mode == "circular":
        index = index % n
    elif mode == "replicate":
        index = index.clamp(0, n - 1)
    else:
        index = index.abs()
        index = torch.where(index >= n, 2 * (n - 1) - index, index)
    return x.index_select(dim, index)


def index_in(P, rank, flipped):
    return P.index_of(rank)[::-1] if flipped else P.index_of(rank)


class Case:
    """One random layer: its partitions, how it is made, local input shapes, and what it shall do."""

    def __init__(self, rng, P_world):
        self.rng, self.P_world = rng, P_world
        choices = {
            "SumReduce": self.choose_groups,
            "Broadcast": self.choose_groups,
            "AllSumReduce": self.choose_axes,
            "AllGather": self.choose_axes,
            "ReduceScatter": self.choose_axes,
            "Repartition": self.choose_repartition,
            "HaloExchange": self.choose_halo_exchange,
        }
        self.kind = rng.choice(list(choices))
        self.preserve = rng.random() < 0.5
        self.options = {}
        self.dtypes = [*REAL, *REAL, *COMPLEX, *WHOLE, *RARE]
        choices[self.kind]()

    def partition(self, dims):
        return random_partition(self.rng, self.P_world, random_grid(self.rng, self.P_world.size, dims))

    def choose_groups(self):
        """Of sums and copies between a grid and one of fewer places, either of them transposed or not."""
        many = self.partition(self.rng.randint(1, 3))
        flip_many, flip_few = self.rng.random() < 0.3, self.rng.random() < 0.3
        grid = many.shape[::-1] if flip_many else many.shape
        grid = tuple(self.rng.choice([1, n]) for n in grid)
        first = self.rng.randint(0, len(grid) - 1)
        while first and prod(grid[:first]) > 1:
            first -= 1
        grid = grid[first:]
        few = random_partition(self.rng, self.P_world, grid[::-1] if flip_few else grid)

        def belongs(one, other):
            # Places match, from the right, wherever the smaller grid is not 1.
            at, place = index_in(few, one, flip_few), index_in(many, other, flip_many)[first:]
            return all(n == 1 or a == b for a, b, n in zip(at, place, grid, strict=True))

        self.groups = {one: [other for other in many.ranks if belongs(one, other)] for one in few.ranks}
        ends = (many, flip_many), (few, flip_few)
        (self.P_x, flip_x), (self.P_y, flip_y) = ends if self.kind == "SumReduce" else ends[::-1]
        self.options = {"transpose_src": flip_x, "transpose_dest": flip_y, "preserve_batch": self.preserve}

    def choose_axes(self):
        self.P_x = self.P_y = self.partition(self.rng.randint(1, 3))
        dims = self.P_x.dim
        self.axes = [d for d in range(dims) if self.rng.random() < 0.6]
        keep = [d for d in range(dims) if d not in self.axes]
        if self.rng.random() < 0.5:
            name = {"AllSumReduce": "reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter"}
            self.options[f"axes_{name[self.kind]}"] = [d - self.rng.choice([0, dims]) for d in self.axes]
        else:
            self.options["axes_keep"] = keep
        self.groups = {
            rank: [r for r in self.P_x.ranks if all(self.at(r)[d] == self.at(rank)[d] for d in keep)]
            for rank in self.P_x.ranks
        }
        self.preserve = True

    def at(self, rank):
        return self.P_x.index_of(rank)

    def choose_repartition(self):
        dims = self.rng.randint(1, 4)
        self.P_x, self.P_y = self.partition(dims), self.partition(dims)
        self.options["preserve_batch"] = self.preserve

    def choose_halo_exchange(self):
        spatial = self.rng.randint(1, 3)
        self.P_x = self.P_y = self.partition(2 + spatial)
        self.mode = self.rng.choice(["zeros", "constant", "reflect", "replicate", "circular"])
        self.widths = [(self.rng.randint(0, 4), self.rng.randint(0, 4)) for _ in range(spatial)]
        self.value = self.rng.choice([0, 1, 3]) if self.mode == "constant" else 0
        # Indexing is not there for the rare types.
        self.dtypes = [*REAL, *REAL, *COMPLEX, *WHOLE]
        self.preserve = True

    def make(self):
        if self.kind == "HaloExchange":
            width = [pair[0] if pair[0] == pair[1] else pair for pair in self.widths]
            if len({*self.widths}) == 1 and isinstance(width[0], int):
                width = width[0]
            return layers.HaloExchange(self.P_x, width, self.mode, self.value)
        partitions = (self.P_x,) if self.P_x is self.P_y else (self.P_x, self.P_y)
        return getattr(layers, self.kind)(*partitions, **self.options)

    # New input shapes for every call.

    def shapes(self):
        if self.kind in ("SumReduce", "AllSumReduce"):
            found = {}
            for group in self.groups.values():
                shape = found.get(group[0]) or self.any_shape()
                found.update(dict.fromkeys(group, shape))
            return found
        if self.kind == "Broadcast":
            return {rank: self.any_shape() for rank in self.P_x.ranks}
        lengths = random_lengths(self.rng, self.P_x.shape)
        for d in self.axes if self.kind == "ReduceScatter" else ():
            lengths[d] = [self.rng.randint(0, 6)] * self.P_x.shape[d]
        if self.kind == "HaloExchange" and self.mode in ("reflect", "replicate", "circular"):
            for pair, parts in zip(self.widths, lengths[2:], strict=True):
                least = max(*pair, 1) + (self.mode == "reflect")
                if sum(parts) < least:
                    parts[self.rng.randrange(len(parts))] += least
        splits = tuple(Listed(tuple(parts)) for parts in lengths)
        self.blocks = Decomposition(self.P_x, splits, tuple(range(len(splits))))
        return {rank: self.blocks.box(rank).shape for rank in self.P_x.ranks}

    def any_shape(self):
        if self.rng.random() < 0.1:
            # Long enough for an all-reduction in shares.
            return (self.rng.choice([4097, 5000]),)
        return tuple(self.rng.choice([0, 1, 2, 3, 5]) for _ in range(self.rng.randint(0, 3)))

    def expected(self, x):
        """Outputs of the ranks of P_y from the inputs of those of P_x."""
        if self.kind == "SumReduce":
            return {few: sum(x[rank] for rank in group) for few, group in self.groups.items()}
        if self.kind == "Broadcast":
            return {rank: x[few] for few, group in self.groups.items() for rank in group}
        if self.kind == "AllSumReduce":
            return {rank: sum(x[other] for other in group) for rank, group in self.groups.items()}
        if self.kind == "ReduceScatter":
            y = {rank: sum(x[other] for other in group) for rank, group in self.groups.items()}
            for rank, d in itertools.product(y, self.axes):
                y[rank] = y[rank].tensor_split(self.P_x.shape[d], d)[self.at(rank)[d]]
            return y
        whole, blocks = torch.zeros(self.blocks.shape, dtype=next(iter(x.values())).dtype), self.blocks
        for rank, part in x.items():
            whole[blocks.slices(rank)] = part
        if self.kind == "Repartition":
            target = Decomposition.balanced(self.P_y, blocks.shape)
            return {rank: whole[target.slices(rank)] for rank in self.P_y.ranks}
        if self.kind == "AllGather":
            parts = {rank: list(blocks.slices(rank)) for rank in self.P_x.ranks}
            for rank, d in itertools.product(parts, self.axes):
                parts[rank][d] = slice(None)
            return {rank: whole[tuple(part)] for rank, part in parts.items()}
        for d, (left, right) in enumerate(self.widths, 2):
            whole = padded(whole, d, left, right, self.mode, self.value)
        y, around = {}, [0, 0, *map(sum, self.widths)]
        for rank in self.P_x.ranks:
            ends = zip(blocks.box(rank).bounds, around, strict=True)
            y[rank] = whole[tuple(slice(a, b + more * (a < b)) for (a, b), more in ends)]
        return y


def random_nodes(machine, rng):
    """The nodes that there are, or ranks spread over nodes at random."""
    true = machine.segments.segment.nodes
    members = list(true[0])
    if len(true) > 1 or rng.random() >= 0.6:
        return true
    rng.shuffle(members)
    cuts = sorted(rng.sample(range(1, len(members)), rng.randint(0, len(members) - 1)))
    return tuple(tuple(members[a:b]) for a, b in itertools.pairwise([0, *cuts, len(members)]))


def values(rng_torch, shape, wide):
    low = -2 if wide.is_floating_point or wide.is_complex else 0
    x = torch.randint(low, 3, shape, generator=rng_torch)
    if wide.is_complex:
        return torch.complex(x.double(), torch.randint(-2, 3, shape, generator=rng_torch).double())
    return x.double()


def check(P_world, comm, seed):
    """Compare one random moving layer with the operation on global tensors; alike on all ranks."""
    rng = random.Random(seed)
    machine = Machine.of(P_world)
    with pretended_nodes(machine, random_nodes(machine, rng)), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="ComplexHalf support is experimental")
        case = Case(rng, P_world)
        layer = case.make()
        if rng.random() < 0.2:
            refuse(case, layer, comm.rank, rng, seed)
        flights = [call(case, layer, comm.rank, rng, seed) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.5:
            flights.reverse()
        for finish in flights:
            finish()


def refuse(case, layer, me, rng, seed):
    """One rank passes another type, or elements that it should not have: an error on all ranks."""
    members = {*case.P_x.ranks, *case.P_y.ranks}
    outside = sorted(members - {*case.P_x.ranks})
    shapes = case.shapes()
    shape = shapes.get(me, (0,))
    if outside and rng.random() < 0.5:
        wrong, x = rng.choice(outside), torch.zeros(shape)
        x = torch.zeros(1) if me == wrong else x
    elif case.P_x.size > 1:
        x = torch.zeros(shape, dtype=torch.int32 if me == rng.choice(case.P_x.ranks) else torch.float32)
    else:
        return
    if me in members:
        with pytest.raises(ShapeError, match=f"{layer.name}': rank"):
            layer(x)
    else:
        assert layer(x).shape == x.shape, f"seed {seed}"


def call(case, layer, me, rng, seed):
    """One forward, compared; returns what runs its backward and compares the gradient."""
    dtype = rng.choice(case.dtypes)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    shapes = case.shapes()
    x = {rank: values(generator, shape, dtype).requires_grad_() for rank, shape in shapes.items()}
    # What each rank really has, if the type has no sign or no more than two values.
    if dtype == torch.bool:
        x = {rank: (t.detach() != 0).double().requires_grad_() for rank, t in x.items()}
    expected = case.expected(x)
    smooth = dtype in SMOOTH
    wanting = {rank for rank in case.P_world.ranks if smooth and rng.random() < 0.7}
    members = {*case.P_x.ranks, *case.P_y.ranks}
    batch, strided = rng.choice([None, 0, 2, 3]), rng.random() < 0.3
    if me in shapes:
        mine = x[me].detach().to(dtype)
        if strided and mine.dim() > 1:
            mine = mine.transpose(0, -1).contiguous().transpose(0, -1)
    else:
        mine = torch.empty((0,) if batch is None else (batch, 0), dtype=dtype)
    mine.requires_grad_(me in wanting)
    what = f"seed {seed}, {layer}, {dtype}, rank {me}"
    y = layer(mine)
    assert y.dtype == dtype, what
    if me in expected:
        torch.testing.assert_close(y.detach(), expected[me].detach().to(dtype), rtol=0, atol=0, msg=what)
    else:
        keeps = case.preserve or me not in members
        rows = None if not mine.dim() else mine.shape[0] if keeps else None
        here = mine.shape if me not in members else ((0,) if rows is None else (rows, 0))
        assert y.shape == here, f"{what}: {y.shape} {here}"
    assert not y.numel() or y.data_ptr() != mine.data_ptr(), what
    needed = bool(wanting & members)
    if me in members:
        assert y.requires_grad == needed, f"{what}: {y.requires_grad}"
    gradients = {rank: values(generator, t.shape, dtype) for rank, t in expected.items()}

    def finish():
        if not smooth:
            return
        if needed and me in members:
            y.backward(gradients[me].to(dtype) if me in gradients else torch.zeros_like(y))
        if not any(t.requires_grad for t in expected.values()):
            return
        wanted = [gradients[rank].to(t.dtype) for rank, t in expected.items()]
        torch.autograd.backward(list(expected.values()), wanted)
        if me in wanting and me in members:
            wanted = torch.zeros(mine.shape) if me not in x else x[me].grad
            assert mine.grad is not None, what
            torch.testing.assert_close(mine.grad, wanted.to(dtype), rtol=0, atol=0, msg=f"{what}: gradient")

    return finish
