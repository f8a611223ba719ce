"""Elements of split tensors in other places: put together, taken apart, shuffled."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.split.against_whole import block, check
from tests.split.samples import check_functions


def numbers(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "an empty split vector": lambda: (lambda x, p: torch.cat([p, x[:0]]), [numbers(7)], [numbers(4)]),
    "an empty vector of another type": lambda: (
        lambda x, e: torch.cat([e, x], -1),
        [torch.randn(3, 4)],
        [numbers(0)],
    ),
    "an empty vector behind": lambda: (lambda x, e: torch.hstack([x, e]), [torch.randn(4), numbers(0)]),
    "gates": lambda: (lambda x: F.glu(x, dim=2), [numbers(2, 4, 6, 8)]),
    "gates of channels": lambda: (lambda x: F.glu(x, 1), [numbers(2, 4, 6, 8)]),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(4))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "places.rearranging", part, 4)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_cut_otherwise(P_world):
    def function(x, y):
        y = y.redistribute(0, None, None) if P_world.size > 1 and hasattr(y, "redistribute") else y
        return torch.cat([x, y, y.sigmoid()], 1)

    check(
        P_world,
        function,
        [numbers(4, 5, 4), numbers(4, 3, 4)],
        only=[(1, P_world.size, 1), (P_world.size, 1, 1)],
    )


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_a_class_token_moves_nothing(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size, 1))
    x = block(P_x, numbers(2, 8 * P_world.size, 3))
    y = torch.cat([torch.zeros(2, 1, 3, dtype=torch.float64), x], 1)
    assert y.decomposition.splits[1].lengths == (9, *(8,) * (P_world.size - 1))
    assert y[:, 1:].decomposition is x.decomposition
    check(
        P_world, lambda x, t: torch.cat([t.expand(2, -1, -1), x], 1), [numbers(2, 17, 3)], [numbers(1, 1, 3)]
    )
    check(P_world, lambda x: torch.cat([torch.empty(0), x], 1).float(), [numbers(2, 17, 3)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_bad_input(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, P_world.size, 1)), numbers(2, 5, 3))
    with pytest.raises(ValueError, match="must agree"):
        torch.cat([x, torch.zeros(2, 5, 4)], 1)
    with pytest.raises(IndexError):
        torch.cat([x, x], 3)
    with pytest.raises(RuntimeError, match="must be even"):
        F.glu(x, 1)


@pytest.mark.mpi
def test_pixels_of_nothing_stay(P_world):
    # Torch itself cannot differentiate it.
    check(P_world, lambda x: F.pixel_unshuffle(x[:, :, :0], 2), [numbers(3, 2, 1, 2)], gradients=False)
