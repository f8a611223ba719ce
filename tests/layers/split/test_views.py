"""Changes in place reach the tensors that share memory in torch, and no others."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError
from tests.layers.split.against_whole import cut_along, forms, numbers, on_grids, whole
from tests.layers.split.test_function_nodes import Sigmoid

pytestmark = pytest.mark.mpi
COMPLEX = torch.complex128
# Each makes a tensor of another one, with memory of its own or not.
MADE = {
    "itself": lambda x: x.contiguous(),
    "reordered": lambda x: x.t().contiguous(),
    "reordered there and back": lambda x: x.t().contiguous().t().contiguous(),
    "columns": lambda x: x[:, :2].contiguous(),
    "a column": lambda x: x[:, 1:2].contiguous(),
    "a row, turned": lambda x: x.t()[:1].contiguous(),
    "a row, turned and longer": lambda x: x.t()[1].unsqueeze(1).contiguous(),
    "a column as a vector": lambda x: x[:, :1].squeeze(1).contiguous(),
    "every second row as columns": lambda x: x[::2].unsqueeze(0).contiguous(),
    "a turned result": lambda x: x.t().relu().contiguous(),
    "turned and flat": lambda x: x.t().flatten(),
    "a column in a row": lambda x: x[:, 1].ravel(),
    "some rows": lambda x: x[:2].contiguous(),
    "every second row": lambda x: x[::2].contiguous(),
    "a turned vector": lambda x: x[:1].t().contiguous(),
    "channels last, longer": lambda x: (
        x[None, :, :, None].contiguous(memory_format=torch.channels_last)[None].contiguous()
    ),
    "channels last": lambda x: x[None, :, :, None].contiguous(memory_format=torch.channels_last),
    "the same type": lambda x: x.double(),
    "a real part": lambda x: x.real,
    "rolled by nothing": lambda x: x.roll((0, 0), (0, 1)),
    "rolled around": lambda x: x.roll(x.shape[0], 0),
    "as many averages": lambda x: F.adaptive_avg_pool1d(x[None], x.shape[1]),
    "of complex numbers": lambda x: torch.view_as_real(torch.complex(x, x)),
}


def changed(make):
    """What a change leaves of both tensors."""

    def function(x):
        x = x * 1
        y = make(x)
        y.mul_(3)
        return x * 2, y * 2

    return function


test_forms = forms(
    {f"{name}, {shape}": (changed(f), [shape]) for name, f in MADE.items() for shape in ((6, 4), (3, 2))}
)
# Each shows a row of a matrix: elements that are moved where rows are cut.
SHOWN = {
    "itself": lambda row: row,
    "outside of the graph": lambda row: row.detach(),
    "as data": lambda row: row.data,
    "imaginary parts": lambda row: row.imag,
    "conjugates": lambda row: row.conj(),
    "pairs": torch.view_as_real,
    "with the same layout": lambda row: row.redistribute() if hasattr(row, "redistribute") else row,
    "by a sum of products": lambda row: torch.einsum("i->i", row),
}


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("show", SHOWN.values(), ids=SHOWN)
def test_what_shows_moved_elements_is_a_copy_too(P_world, show):
    x = cut_along(P_world, 0, numbers(4, 3, dtype=COMPLEX).detach())
    with pytest.raises(UnsupportedError, match="elements of it were moved"):
        show(x[1]).mul_(2)
    shown = show(x[1])
    x.mul_(2)
    with pytest.raises(UnsupportedError, match="was changed after"):
        shown + 1


CHANGES = [
    *(kind(inplace=True) for kind in (nn.ReLU, nn.ReLU6, nn.SiLU, nn.ELU, nn.Hardtanh, nn.LeakyReLU)),
    lambda x: x.index_put_((torch.tensor([0]),), x.new_ones(())),
    lambda x: x.masked_scatter_(torch.tensor([True, False, True]), x.new_ones(2)),
    lambda x: x.put_(torch.tensor([0]), x.new_ones(1)),
]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", range(len(CHANGES)))
def test_every_change_of_moved_elements_is_refused(P_world, at):
    x = cut_along(P_world, 0, numbers(4, 3).detach())
    with pytest.raises(UnsupportedError, match="elements of it were moved"):
        CHANGES[at](x[1])


def test_what_was_moved_in_inference_mode_is_known_to_be_changed(P_world):
    data = numbers(4, 6).detach()
    for split in on_grids(P_world, data):
        with torch.inference_mode():
            x = split * 1
            parts = [x[1], x[:, 2], x.view(8, 3), x.unbind(1)[0]]
            (x * 1).mul_(2)
            expected = [data[1], data[:, 2], data.view(8, 3), data[:, 0]]
            for found, wanted in zip(map(whole, parts), expected, strict=True):
                torch.testing.assert_close(found, wanted)
            moved = [part for part in parts if part._copy_of is not None]
            assert moved or P_world.size == 1
            x[0].add_(1) if 0 not in x.decomposition.cut_dims else x[:1].add_(1)
            for part in moved:
                with pytest.raises(UnsupportedError, match="was changed after"):
                    part + 1


@pytest.mark.parametrize(
    "show", [torch.detach, lambda y: y[1].detach(), lambda y: y.t().detach().reshape(-1), lambda y: y[1].data]
)
def test_what_is_outside_of_a_graph_does_not_keep_it(P_world, show):
    x = cut_along(P_world, 0, numbers(4, 3))
    y = x * 2
    known = weakref.ref(y.to_local())
    shown = show(y)
    del y
    gc.collect()
    assert known() is None
    assert not shown.requires_grad


# Of an autograd function torch asks the tensor itself whether it needs a gradient.


def elements_written(y):
    x = y.detach() * 0
    x[:, 1] = y[:, 2]
    return Sigmoid.apply(x)


def masked_elements_written(y):
    x = y.detach() * 0
    x[y > 0] = y.sum()
    return Sigmoid.apply(x)


def view_written(y):
    x = y.detach() * 0
    x.t()[1:3].add_(y.t()[:2])
    return Sigmoid.apply(x)


def seen_before(y):
    x = y.detach() * 0
    seen = x.t()[1:3]
    x.add_(y)
    return Sigmoid.apply(seen)


def seen_beside(y):
    x = y.detach() * 0
    seen = x[:2].t()
    x.t()[1:3].add_(y.t()[:2])
    return Sigmoid.apply(seen)


def taken_out(y):
    x = y * 2
    x.detach_()
    assert not Sigmoid.apply(x).requires_grad
    return x * y


CHANGED = elements_written, masked_elements_written, view_written, seen_before, seen_beside, taken_out
test_gradients_that_are_needed_since_a_change = forms({f.__name__: (f, [(3, 4)]) for f in CHANGED})
