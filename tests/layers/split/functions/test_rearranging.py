"""Elements of split tensors in other places: put together, taken apart, shuffled."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.layers.split.against_whole import called, check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHORT, TOKENS = partial(torch.randn, 3, 4), (2, 17, 3)
# Forms beyond torch's samples.
FORMS = {
    "an empty split vector": (lambda x, p: torch.cat([p, x[:0]]), [(7,)], [(4,)]),
    "an empty vector of another type": (lambda x, e: torch.cat([e, x], -1), [SHORT], [(0,)]),
    "an empty vector behind": (lambda x, e: torch.hstack([x, e]), [partial(torch.randn, 4), (0,)]),
    "an empty vector ahead": (lambda x: torch.cat([torch.empty(0), x], 1).float(), [TOKENS]),
    "blocks on a diagonal": (torch.block_diag, [(5, 3), (2, 4)], [(3,), (2, 2)]),
    "vectors on a diagonal": (lambda x: torch.block_diag(x, x.sum(), x[:, None]), [(5,)]),
    "products of sets": (torch.cartesian_prod, [(5,), (2,)], [(3,)]),
    "one set": (torch.cartesian_prod, [(5,)]),
    "gates": (called(F.glu, dim=2), [(2, 4, 6, 8)]),
    "gates of channels": (called(F.glu, 1), [(2, 4, 6, 8)]),
    "a class token": (lambda x, t: torch.cat([t.expand(2, -1, -1), x], 1), [TOKENS], [(1, 1, 3)]),
}
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("rearranging", 4)


def test_cut_otherwise(P_world):
    def function(x, y):
        y = y.redistribute(0, None, None) if hasattr(y, "redistribute") else y
        return torch.cat([x, y, y.sigmoid()], 1)

    only = [(1, P_world.size, 1), (P_world.size, 1, 1)]
    check(P_world, function, [numbers(4, 5, 4), numbers(4, 3, 4)], only=only)


def test_a_class_token_moves_nothing(P_world):
    x = cut_along(P_world, 1, numbers(2, 8 * P_world.size, 3))
    y = torch.cat([torch.zeros(2, 1, 3, dtype=torch.float64), x], 1)
    assert y.decomposition.splits[1].lengths == (9, *(8,) * (P_world.size - 1))
    assert y[:, 1:].decomposition is x.decomposition


@pytest.mark.mpi(min_size=2)
def test_bad_input(P_world):
    x = cut_along(P_world, 1, numbers(2, 5, 3))
    with pytest.raises(RuntimeError, match="must match except in dimension 1"):
        torch.cat([x, torch.zeros(2, 5, 4)], 1)
    with pytest.raises(IndexError):
        torch.cat([x, x], 3)
    with pytest.raises(RuntimeError, match="must be even"):
        F.glu(x, 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_of_a_number_among_matrices_the_kind_counts(P_world, dtype):
    check(P_world, torch.block_diag, [torch.randn(5, 3)], [torch.tensor(2, dtype=dtype)])


def test_pixels_of_nothing_stay(P_world):
    # Torch itself cannot differentiate it.
    check(P_world, lambda x: F.pixel_unshuffle(x[:, :, :0], 2), [numbers(3, 2, 1, 2)], gradients=False)
