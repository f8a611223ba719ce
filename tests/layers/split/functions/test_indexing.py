"""Parts of tensors by numbers, slices, masks and tensors of indices."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.errors import UnsupportedError
from tests.layers.split.against_whole import called, check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE, ROWS = (3, 6, 5), partial(torch.randint, 0, 6, (4, 5))
AT, SOME = torch.tensor([3, 0, 3]), torch.tensor([0, 2])
MASK = torch.tensor([True, False, True, True, False, True])
ONE, NOTHING = torch.zeros(1, dtype=torch.int64), torch.zeros(2, 0, dtype=torch.int64)
# Of one tensor.
PARTS = [
    lambda x: x[..., ...],
    lambda x: x[..., 0, ..., None, :2],
    lambda x: x[..., AT, ...],
    lambda x: x[1:, MASK, None, :2],
    lambda x: x[torch.tensor(False)],
    lambda x: x[0:0, None, MASK],
    lambda x: x[5:, MASK],
    called(torch.narrow, dim=1, start=-3, length=2),
    called(torch.index_select, dim=-1, index=AT),
    called(torch.gather, 0, torch.arange(8).view(1, 4, 2) % 3),
    lambda x: x.scatter_add(1, torch.arange(45).view(3, 3, 5) % 2 + 1, x[:, :3]),
    lambda x: x.index_add(1, (x[0, :, 0] > 0).int(), x),
    lambda x: x.index_add(-1, (x[0, 0] > 0).long(), x.square(), alpha=3),
    lambda x: x.clone().index_add_(1, AT, x[:, :3]).scatter_(1, torch.zeros(3, 1, 5, dtype=int), 7.0),
    called(torch.take, torch.tensor([[5, -1], [89, 5]])),
    lambda x: [row.sin() for row in x],
    lambda x: x[[slice(0, 2), slice(None), slice(1, None)]],
]
MASKED = [
    lambda x, y: x[y > 0] - y[y > 0],
    lambda x, y: x.masked_select(y > 0).square().mean(),
    lambda x, y: torch.masked_select(x, y[:, :1] > 0),
    lambda x, y: x[y[:, :, 0] > 0],
    lambda x, y: x[:, y[0] > 0],
    lambda x, y: x[y > 100].sum() + x[y < 100].sum(),
    lambda x, y: x.reshape(-1)[(y.reshape(-1) > 0).argwhere()[:, 0]],
]
PLACES = {
    "nonzero": torch.nonzero,
    "as a tuple": called(torch.nonzero, as_tuple=True),
    "argwhere": torch.argwhere,
    "argwhere of a sum": lambda x: torch.argwhere(input=x.sum()),
    "where": lambda x: torch.where(x > 0),
    "their number": lambda x: len(torch.argwhere(x)),
}
# Forms beyond torch's samples.
FORMS = {
    **{f"part {at}": (function, [SHAPE]) for at, function in enumerate(PARTS)},
    **{f"mask {at}": (function, [SHAPE, SHAPE]) for at, function in enumerate(MASKED)},
    "a mask of both": (lambda x, y: ((x - y)[y > 0] ** 2).mean(), [SHAPE], [SHAPE]),
    "a plain tensor by a mask": (lambda x, y: y[x > 0].sum() * x.sum(), [SHAPE], [SHAPE]),
    "rows by split indices": (lambda i, table: table[i], [ROWS], [(6, 3)]),
    "elements by split indices": (lambda i, table: torch.take(table, i - 3), [ROWS], [(6, 3)]),
    "both split, by name": (lambda i, x: torch.take(input=x, index=i), [ROWS, (4, 5)]),
    "selected rows": (lambda i, table: table.index_select(0, i.flatten()), [ROWS], [(6, 3)]),
    "selected of a number": (lambda i, table: table.index_select(0, i), [ONE], [()]),
    "columns by split indices": (lambda i, table: table[:, i], [ROWS], [(3, 6)]),
    "columns of a split table": (lambda i, x: x[:, i] + x[:, i.T].mT, [ROWS, (3, 6)]),
    "planes by split indices": (lambda i, x: x.index_select(1, i[0]) * 2, [ROWS, SHAPE]),
    "filled by split indices": (lambda i, x: x.index_fill(1, i[0], 2.0), [ROWS, SHAPE]),
    "sums by split indices": (lambda i, x: torch.zeros(6, 5).double().index_add(0, i[0], x), [ROWS, (5, 5)]),
    "sums of copies": (lambda i, x: x.index_add(1, i[0], x[:, :5], alpha=2), [ROWS, SHAPE]),
    "a mask beside split indices": (lambda i, x: x[x[:, 0, 0] > -9, i[:3, 0]], [ROWS, SHAPE]),
    "classes": (F.one_hot, [ROWS]),
    "so many classes": (called(F.one_hot, num_classes=8), [ROWS]),
    "gathered by split indices": (lambda x, y: x.gather(1, (y > 0).long()), [(4, 5), (4, 5)]),
    "found rows": (lambda x, table: table[(x > 0).nonzero()[:, 1]], [(4, 5)], [(5, 3)]),
    "a number by a vector": (lambda index, x: x.gather(0, index), [ONE], [()]),
    "a vector by a number": (called(torch.gather, 0, ONE.view(())), [(5,)]),
    "a vector by nothing": (called(torch.gather, 0, NOTHING), [(5,)]),
    "a sum by a vector": (lambda x: x.sum().gather(0, torch.zeros(3, dtype=torch.int64)), [(5,)]),
    "a sum by a number": (lambda x: x.sum().gather(0, ONE.view(())), [(5,)]),
    "a number is added to a sum": (lambda x, y: x.sum().scatter_add(0, ONE.view(()), y), [(5,)], [()]),
    "a number is scattered": (lambda x: x.scatter_add(0, ONE.view(()), x.sum()), [(5,)]),
    **{
        f"a value fills dimension {d}": (lambda x, value, d=d: x.index_fill(d, SOME, value), [(4, 3)], [()])
        for d in (0, 1)
    },
}
test_forms = pytest.mark.filterwarnings("ignore:Using a non-tuple")(forms(FORMS))
test_samples_of_torch = samples_of("indexing", 3)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [(3, 6, 5), (2, 1, 4), (7,), (3, 0)])
@pytest.mark.parametrize("name", PLACES)
def test_places_of_elements(P_world, shape, name):
    some = torch.randint(0, 2, shape)
    for x in (some.bool(), some.double(), torch.zeros(shape), torch.ones(shape)):
        check(P_world, PLACES[name], [x], gradients=False)


@pytest.mark.mpi(min_size=2)
def test_refused(P_world):
    x = cut_along(P_world, 1, numbers(*SHAPE).detach())
    with pytest.raises(UnsupportedError, match=r"write x\[mask\] = value, or .*torch.cat"):
        x.index_put_((AT,), torch.tensor(1.0))
    for index, error, words in (
        (x[:, :, :4] > 0, IndexError, "global shape"),
        ((slice(None), 6), IndexError, None),
        (torch.tensor(1.0), IndexError, "must be long, int, byte or bool"),
        (torch.tensor(1j), IndexError, "must be long, int, byte or bool"),
    ):
        with pytest.raises(error, match=words):
            x[index]
    for index in ((0, 0, 0, 0), (..., ..., 0), (0, ..., ..., 0), (..., ..., None), (..., ..., AT)):
        with pytest.raises(IndexError):
            torch.zeros(SHAPE)[index]
        with pytest.raises(IndexError, match="too many"):
            x[index]


@pytest.mark.parametrize("start", [torch.tensor(True), 1.5])
def test_an_interval_begins_at_a_whole_number(P_world, start):
    x = torch.randn(4, 3)
    for y in (x, cut_along(P_world, 0, x)):
        with pytest.raises((RuntimeError, TypeError)):
            y.narrow(0, start, 2)
