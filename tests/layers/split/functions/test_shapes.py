"""Functions that reorder dimensions and change shapes."""

import pytest
import torch

from distdl_rma.errors import UnsupportedError
from tests.layers.split.against_whole import called, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE = 2, 6, 5, 4


def windows(x):
    # Of Swin, and back.
    b, h, w, c = x.shape
    x = torch.roll(x, shifts=(-3, -3), dims=(1, 2))
    x = x.view(b, h // 7, 7, w // 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 49, c)
    x = torch.tanh(x)
    x = x.view(b, h // 7, w // 7, 7, 7, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return torch.roll(x, shifts=(3, 3), dims=(1, 2))


# Forms beyond torch's samples, by the shape of the tensor.
BY_SHAPE = {
    SHAPE: [
        called(torch.permute, dims=(1, 0, 2, 3)),
        called(torch.movedim, (0, 1), (-1, 0)),
        lambda x: x.mH,
        lambda x: x.unsqueeze(2).expand(2, 6, 7, 5, 4),
        lambda x: x.repeat(2, 1, 1, 3, 2),
        called(torch.repeat_interleave, torch.tensor([1, 0, 2, 3, 1]), dim=2),
        called(torch.rot90, 1, (2, 3)),
        called(torch.roll, shifts=(-2, 3, 1), dims=(2, 3, 1)),
        called(torch.roll, 7),
        lambda x: torch.linalg.diagonal(A=x, offset=-1, dim2=0),
        called(torch.flatten, 1),
        called(torch.flatten, 2),
        lambda x: x.flatten(2).transpose(1, 2),
        lambda x: x.view(x.size(0), -1),
        called(torch.reshape, (-1,)),
        torch.ravel,
        lambda x: x.view(2, 2, 3, 20),
        lambda x: x.view(2, 3, 2, 5, 2, 2),
        lambda x: x.reshape(12, 5, 4),
        called(torch.unflatten, 1, (3, -1)),
        called(torch.reshape, (4, 3, 20)),
        lambda x: x.view_as(torch.empty(6, 2, 20)),
        lambda x: x.flatten(0, 1).unflatten(0, (2, 6)),
        lambda x: x.view(2, 3, 2, 5, 4).transpose(1, 2).contiguous().view(2, 6, 5, 4),
    ],
    (6, 5): [torch.t, lambda x: x.T, torch.atleast_3d, lambda x: x.view(-1, 3)],
    (1, 5): [lambda x: x.expand(3, 5), lambda x: x.squeeze() * 2],
    # Shorter than the ranks are many.
    (2, 2, 2, 2): [called(torch.flatten, 1), called(torch.roll, 1, 2), called(torch.flip, (2,)), torch.triu],
    (0, 2, 3): [lambda x: x.view(0, 6)],
    (5, 2): [lambda x: x.mean().flip([0]), lambda x: x.mean().unfold(0, 1, 2)],
    **{(n, *extents, 3): [windows] for n in (1, 2) for extents in ((14, 21), (7, 14), (28, 7))},
}
FORMS = {f"{at} of {shape}": (f, [shape]) for shape, each in BY_SHAPE.items() for at, f in enumerate(each)}
FORMS["several"] = torch.atleast_3d, [(5, 3), (4, 2)]
for at in ("ij", "xy"):
    FORMS[f"coordinates {at}"] = lambda x, y, at=at: torch.meshgrid(x, y, 2 * x, indexing=at), [(4,), (4,)]
    FORMS[f"a list {at}"] = lambda x, y, at=at: torch.meshgrid([x, y], indexing=at)[1] * 2, [(4,), (4,)]
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("shapes", 3)


@pytest.mark.mpi(min_size=2)
def test_a_leading_cut_stays_without_movement(P_world):
    x = cut_along(P_world, 2, numbers(1, 3, 7 * P_world.size, 7))
    tokens = x.flatten(2).transpose(1, 2)
    assert tokens.decomposition.splits[1].lengths == (49,) * P_world.size
    assert tokens.decomposition.cut_dims == (1,)
    cut = x.permute(0, 2, 3, 1).view(1, P_world.size, 7, 1, 7, 3)
    assert cut.to_local().data_ptr() == x.to_local().data_ptr()


@pytest.mark.mpi(min_size=2)
def test_views_that_moved_are_not_changed_in_place(P_world):
    x = cut_along(P_world, 2, numbers(1, 4, 6, 2).detach())
    with pytest.raises(UnsupportedError, match="view"):
        x.flatten(1).unsqueeze(0).add_(1)
    x.flatten(2).add_(1)  # what did not move is a view
    moved = x.flatten(1)
    x.add_(1)
    with pytest.raises(UnsupportedError, match="changed"):
        moved + 1
    for change in (lambda: x.squeeze_(0), lambda: x.redistribute().as_strided_((2, 2), (1, 2))):
        with pytest.raises(UnsupportedError, match="without the underscore"):
            change()


def test_errors_are_those_of_torch(P_world):
    x = cut_along(P_world, 2, numbers(1, 4, 6, 2))
    with pytest.raises(RuntimeError, match="invalid"):
        x.view(5, -1)
    with pytest.raises(IndexError):
        x.transpose(0, 4)
    for function in (x.view_as, x.reshape_as):
        with pytest.raises(RuntimeError, match=r"shape '\[\]' is invalid"):
            function(torch.tensor(48))
    with pytest.raises(RuntimeError, match="same dtype"):
        torch.meshgrid(cut_along(P_world, 0, numbers(4)), torch.tensor(3), indexing="ij")
    assert x.sum().view_as(torch.tensor(1.0)).shape == ()
    times = cut_along(P_world, 0, torch.tensor([1, 1, 2, 2]))
    repeated = torch.repeat_interleave(torch.ones(4, 1), times, dim=0, output_size=6)
    assert repeated.shape == (6, 1)


@pytest.mark.mpi(min_size=2)
def test_whether_a_reshaped_copy_may_change_is_alike_on_all_ranks(P_world):
    x = cut_along(P_world, 2, numbers(3, 4, 2, 1).detach()) * 1.0
    with pytest.raises(UnsupportedError, match="view of another"):
        x.view(-1).sub_(1.0)


def test_numbers_that_every_rank_has_are_extents(P_world):
    x = cut_along(P_world, 1, numbers(6, 4))
    for extent in (3, 2, 6):
        n = cut_along(P_world, 0, torch.tensor([extent])).sum()
        assert x.reshape(n, -1).shape == x.view((n, 24 // n)).shape == (extent, 24 // extent)
        assert x[None].expand(n, -1, -1).shape == (extent, 6, 4)
    zero = n * 0
    assert x.flatten(start_dim=zero).shape == (24,)
    assert x.flatten(start_dim=zero + 1).shape == (6, 4)
