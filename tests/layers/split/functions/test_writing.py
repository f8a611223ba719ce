"""Writing to parts of split tensors, and of plain ones that become split."""

import random
import re
from math import prod

import pytest
import torch
from torch import nn

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split.calls.table import RULES
from distdl_rma.testing import block
from tests.layers.split.against_whole import check, cut_along, forms, numbers
from tests.matrix import check_each, over_seeds

pytestmark = pytest.mark.mpi
SHAPE, MATRIX = (3, 6, 5), (5, 6)


def sliced(x, y):
    # Slices and elements of a cut dimension.
    z = x * 1
    z[:, 1:4] = y[:, 1:4]
    z[:, :2] += 1
    z[:, 4] = y[:, 1]
    z[1] = 3 * y[0]
    z[..., -1] = z[..., -1] * 2
    z[0, 2, 1:3] = y[0, 0, 0]
    z[2, :, None, 3] = y[1, 0, :1]
    return z


def masked(x, y):
    z = x * 1
    z[y > 0] = 0.5
    z[y[:, :, 0] > 1] = y.sum()
    return z


def indexed(x, y, v):
    z = x * 1
    z[:, torch.tensor([4, 0])] = y[:, :2]
    z[torch.tensor([2, 0]), torch.tensor([1, 3])] = v
    z[[0, 1]] *= 3
    z[torch.arange(30).reshape(6, 5).remainder(2).bool().expand(3, 6, 5)] *= 2
    return z


def by_split_indices(i, x, y):
    z = x * 1
    z[:, i[0]] = y[:, :3]
    z[1, :, i[1]] = 2.0
    z[i[0], i[1], 0] = y[0, :3, 0]
    z[y[:, 0, 0] > -9, torch.tensor([4, 0, 1])] = y[:, 0]
    return z


# A plain tensor becomes split if a split one is written to it.


def by_channels(x, y):
    found = torch.zeros(3, 8, 5, dtype=torch.float64)
    found[:, :6] = x
    found[:, 6] = y[:, 0]
    found[1:, 7:, 2:4] = y[1:, :1, :2]
    return found


def stacked(x, y):
    found = torch.ones(2, 3, 6, 5, dtype=torch.float64)
    for at, each in enumerate((x, y)):
        found[at] = each
    return found.mean(0)


def added(x, y):
    total, sums = torch.zeros(()), torch.zeros(6, 5, dtype=torch.float64)
    total += (x * y).sum()
    sums += x.sum(0)
    sums.mul_(y.mean(0))
    return total * 2, sums


def encoded(labels):
    found = torch.zeros(3, 4, 5)
    again = found.scatter_(1, labels, 1)
    assert again is found
    return found


def marked(x):
    found = torch.zeros(3, 6, 5)
    found[x > 0] = 1
    return found


# As the functions without the underscore.
IN_PLACE = [
    lambda z, y: z.cumsum_(1),
    lambda z, y: z.cumprod_(0),
    lambda z, y: z.tril_(),
    lambda z, y: z.triu_(diagonal=1),
    lambda z, y: z.addmm_(y, y.T @ y, beta=0.5, alpha=2),
    lambda z, y: z.addr_(y[:, 0], y[0]),
    lambda z, y: z.addcmul_(y, y).cumsum_(-1),
]


def in_place(change):
    def changed(x, y):
        z = x * 1
        assert change(z, y) is z
        return z

    return changed


FORMS = {
    "slices": (sliced, [SHAPE, SHAPE]),
    "masks": (masked, [SHAPE, SHAPE]),
    "plain masks": (masked, [SHAPE], [SHAPE]),
    "indices": (indexed, [SHAPE, SHAPE], [(5,)]),
    "split indices": (by_split_indices, [lambda: torch.tensor([[2, 0, 1], [3, 1, 4]]), SHAPE, SHAPE]),
    **{each.__name__: (each, [SHAPE, SHAPE]) for each in (by_channels, stacked, added)},
    "encoded": (encoded, [lambda: torch.randint(0, 4, (3, 1, 5))]),
    "marked": (lambda x: marked(x.detach()), [SHAPE]),
    **{f"in place {at}": (in_place(change), [MATRIX, MATRIX]) for at, change in enumerate(IN_PLACE)},
    **{f"plain beside, {at}": (in_place(change), [MATRIX], [MATRIX]) for at, change in enumerate(IN_PLACE)},
    "whole numbers in place": (lambda x: x.clone().cumsum_(0), [torch.arange(6).int().view(3, 2)]),
}
test_forms = forms(FORMS)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 4, 1)])
def test_elements_are_written_where_a_split_mask_says_so(P_world, shape):
    y = numbers(*shape)
    some, rows, columns = (mask.sum() for mask in (y > 0, y[:, :, 0] > 0, y[0] > 0))

    def written(x, y, *values):
        one, two = values
        found = []
        for index, value in (
            (y > 0, one),
            (y > 0, x[y > 0] * 2),
            (y < -9, one[:0]),
            (y[:, :, 0] > 0, two),
            (y[:, :, 0] > 0, two[:1]),
            ((slice(None), y[0] > 0), one[:columns].expand(shape[0], -1)),
            ((1, y[0] > 0), one[:columns]),
            ((slice(1), y[0] > 0, None), one[:columns, None]),
        ):
            found.append(x * 1)
            found[-1][index] = value
        return found

    check(P_world, written, [numbers(*shape), y], [numbers(max(some, columns)), numbers(rows, shape[2])])


@pytest.mark.parametrize("extent", [1, 4])
def test_what_torch_refuses_to_write_where_a_mask_says_so(P_world, extent):
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1))
    whole = torch.zeros(extent, 6)
    x, some = block(P_x, whole), torch.arange(extent * 6).view(extent, 6) % 2
    short, mask = some.to(torch.uint8), block(P_x, some.bool())
    for index, value in (
        (block(P_x, short), 1.0),
        (block(P_x, short), torch.tensor(1.0)),
        (mask, torch.ones(2)),
        (mask, torch.ones(extent * 3, dtype=torch.float64)),
        # Of a kind that torch takes, with another number of elements.
        ((slice(None), torch.arange(6) < 2), torch.ones(2)),
        ((slice(None), torch.arange(6) < 3), torch.ones(2)),
    ):
        try:
            whole[index.full_tensor() if isinstance(index, SplitTensor) else index] = value
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=re.escape(str(error))):
                x[index] = value
        else:
            x[index] = value
    with pytest.raises(RuntimeError, match="shape mismatch"):
        block(P_x, torch.zeros(11, 13))[:, torch.tensor([13])] = torch.ones(2, 11, 13)
    torch.testing.assert_close(x.full_tensor(), whole)


def _random_index(pick, extents):
    # What may stand in brackets, for a tensor of these extents.
    index, d = [], 0
    while d < len(extents) and pick.random() < 0.93:
        n, (yes, no) = extents[d], pick.sample([True, False], 2)
        at, last, dots = pick.randrange(n), pick.randrange(n + 1), pick.randrange(len(extents) - d + 1)
        wide = torch.tensor([pick.random() < 0.5 for _ in range(prod(extents[d : d + 2]))])
        # With the number of dimensions that each is for.
        one, count = pick.choice([
            (at, 1), (at - n, 1), (slice(at, last), 1), (slice(at, None, 2), 1), (slice(None), 1),
            ([at, last % n], 1), (torch.tensor([[at], [n - 1]]), 1), ([], 1), (wide[:n], 1),
            (wide.view(extents[d : d + 2]), 2), (None, 0), (yes, 0), (torch.tensor(no), 0), (..., dots),
        ])  # fmt: skip
        index.append(one)
        d += count
    return tuple(index)


@over_seeds(120, each=20)
def test_any_index_reads_and_writes_as_torch_has_it(P_world, comm, seeds):
    def check_one(P_world, _comm, seed):
        pick = random.Random(seed)
        index, x = _random_index(pick, (3, 6, 5)), numbers(3, 6, 5)
        try:
            shape = x[index].shape
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError)):
                cut_along(P_world, 1, x)[index]
            return

        def written(x, v):
            y, z = x * 1, x * 1
            y[index] = -5.0
            z[index] = v
            return y, z, x[index]

        wide = pick.choice([shape, (1, *shape), shape[1:]])
        check(P_world, written, [x], [torch.randn(wide, dtype=torch.float64)])

    check_each(check_one, P_world, comm, seeds)


def test_results_of_other_types_and_shapes_are_refused_in_place(P_world):
    x = cut_along(P_world, 0, torch.ones(5, 6).long())
    with pytest.raises(RuntimeError, match="Bad in-place call"):
        x.cumsum_(0, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match="shape of the tensor itself"):
        torch.tensor(1).addbmm_(x[None], x.T[None])
    with pytest.raises(RuntimeError, match="Bad in-place"):
        torch.ones(1).long().addmm_(x, x.T)


def test_every_function_that_has_a_rule_has_it_in_place():
    for function, entry in RULES.items():
        name = f"{getattr(function, '__name__', '')}_"
        if entry.kind not in ("refused", "value", "query", "registered") and not name.startswith("_"):
            assert getattr(torch.Tensor, name, None) in (None, *RULES), name


# Changes of a plain tensor of which others are views; they keep its elements where x is no split tensor, too.
STAYING_PLAIN = {
    "an average": lambda y, x, p: y.mul_(0.9).add_(0.1 * x),
    "rows": lambda y, x, p: y.__setitem__((slice(None), slice(1, 3)), x[:, :2]),
    "the mean over all rows": lambda y, x, p: y.__setitem__((0, 2), x.mean((0, 1))),
    "a number for a split mask": lambda y, x, p: y.__setitem__(x > 0, 0.5),
    "elements for split masks": lambda y, x, p: y.__setitem__(x > 0, x[x > 0]),
    "rows of indices": lambda y, x, p: y.__setitem__(torch.tensor([2, 0]), x[:2]),
    "a view": lambda y, x, p: y.view(-1)[4:9].__setitem__(slice(3), x[0, :3, 0]),
    "sums over indices": lambda y, x, p: y.index_add_(1, torch.tensor([4, 0]), x[:, :2]),
    "sums over split indices": lambda y, x, p: y.index_add_(1, (x[0, :, 0] > 0).long(), x, alpha=2),
    "sums by split indices": lambda y, x, p: y.scatter_add_(1, (x > 0).long(), x),
    "a parameter": lambda y, x, p: p.__setitem__(slice(2), x[:2]),
    "data of a parameter": lambda y, x, p: p.data.__setitem__(1, x.amax((0, 1))),
}


@pytest.mark.parametrize("what", STAYING_PLAIN)
def test_a_plain_tensor_that_is_changed_without_gradients_stays_plain_and_alike(P_world, what):
    whole = numbers(3, 6, 5).detach()

    def changed(x):
        y, p = torch.ones(3, 6, 5, dtype=torch.float64), nn.Parameter(torch.ones(3, 6, 5).double())
        view = y.detach()
        with torch.no_grad():
            STAYING_PLAIN[what](view, x, p)
        assert not isinstance(y, SplitTensor) and type(p) is nn.Parameter
        return y, p

    torch.testing.assert_close(changed(cut_along(P_world, 1, whole)), changed(whole))


@pytest.mark.mpi(min_size=2)
def test_refused(P_world):
    x, y = cut_along(P_world, 1, numbers(3, 6, 5).detach()), cut_along(P_world, 1, numbers(3, 6, 5))
    plain = torch.zeros(3, 6, 5, dtype=torch.float64)
    moved = x[:, 2]
    for function, words in (
        (lambda: plain[0].__setitem__(slice(None), y[0]), "same memory; write to its clone"),
        (lambda: plain[1].add_(y[0]), "same memory"),
        (lambda: nn.Parameter(plain.clone()).__setitem__(slice(None), x), "a Parameter"),
        (lambda: torch.ones(3, 6, 5, requires_grad=True).mul(2).add_(y), "has a gradient"),
        (lambda: x[:, 2].mul_(2), "a new tensor, without"),
        (lambda: moved.__setitem__(0, 1.0), "moved from another rank"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            function()
    with pytest.raises(IndexError):
        x[:, 6] = 1.0
    with pytest.raises(IndexError):
        x[x[:, :1] > 0] = 1.0
