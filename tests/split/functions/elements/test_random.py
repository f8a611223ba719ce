"""Random numbers of split tensors."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma.errors import UnsupportedError
from tests.split.against_whole import block, check, grids

SHAPE = 4, 6, 12, 10
DROPOUTS = [
    F.dropout,
    torch.dropout,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
]
DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "dropout in place": lambda x: F.dropout(x.clone(), 0.3, inplace=True),
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "bernoulli": lambda x: torch.bernoulli(torch.zeros_like(x) + 0.4),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 1),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "random_": lambda x: torch.empty_like(x).random_(5),
    "normal": lambda x: torch.normal(x.detach(), 1.0),
    "poisson": lambda x: torch.poisson(torch.zeros_like(x) + 3),
    "rrelu": lambda x: F.rrelu(x, training=True),
}


def numbers(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def split_ones(P_world, whole):
    for shape in grids(whole.dim(), P_world.size):
        yield block(P_world.create_cartesian_topology_partition(shape), whole)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("case", DRAWS)
def test_blocks_differ_and_a_seed_gives_the_same_again(P_world, case):
    for x in split_ones(P_world, numbers()):
        torch.manual_seed(7)
        first = DRAWS[case](x).full_tensor()
        state = torch.get_rng_state()
        second = DRAWS[case](x).full_tensor()
        torch.manual_seed(7)
        assert torch.equal(DRAWS[case](x).full_tensor(), first)
        # The generators of the ranks go on alike, whatever the blocks are.
        assert torch.equal(torch.get_rng_state(), state)
        assert not torch.equal(first, second)
        for dim in range(4):
            parts = first.tensor_split(2, dim)
            assert not torch.equal(*parts)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_dropout_keeps_its_part_of_elements(P_world):
    for x in split_ones(P_world, torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)):
        y = F.dropout(x, 0.25)
        y.backward(torch.ones(SHAPE, dtype=torch.float64))
        whole = y.full_tensor().detach()
        assert torch.equal(x.grad.full_tensor(), whole)
        assert set(whole.unique().tolist()) == {0.0, 1 / 0.75}
        assert 0.7 < (whole > 0).double().mean() < 0.8
        assert torch.equal(F.dropout(x, 0.25, training=False).to_local(), x.to_local())
        assert not F.dropout(x, 1.0).full_tensor().any()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_channels_are_dropped_as_of_the_whole(P_world):
    check(P_world, lambda x: F.dropout2d(x, 0.4), [numbers()])
    check(P_world, lambda x: F.feature_alpha_dropout(x, 0.4, True), [numbers()])
    check(P_world, lambda x: torch.feature_dropout(x, 0.4, True), [numbers()])
    check(P_world, lambda x: F.dropout1d(x, 0.4), [numbers((5, 7))])
    check(P_world, lambda x: F.dropout3d(x, 0.4), [numbers((2, 3, 4, 3, 5))])
    check(P_world, lambda x: F.dropout2d(x.clone(), 0.4, inplace=True), [numbers()])


@pytest.mark.mpi
@pytest.mark.parametrize("function", DROPOUTS)
def test_nothing_is_dropped_in_evaluation(P_world, function):
    shape = (3, 4, 5) if function is F.dropout1d else (2, 3, 3, 4, 5) if function is F.dropout3d else SHAPE
    check(P_world, lambda x: function(x, 0.5, False), [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_copies_are_alike(P_world):
    for x in split_ones(P_world, numbers()):
        torch.manual_seed(5)
        found = F.dropout(x.redistribute(), 0.5)
        torch.manual_seed(5)
        assert torch.equal(found.to_local(), F.dropout(x.full_tensor(), 0.5))
    if P_world.size == 4:
        P_x = P_world.create_cartesian_topology_partition((1, 2, 2, 1))
        x = block(P_x, numbers()).redistribute(None, None, 2, None)
        y = F.dropout(x, 0.5)
        assert torch.equal(y.full_tensor(), y.redistribute(None, 1, None, None).full_tensor())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_checkpoints_draw_the_same_again(P_world):
    def dropped(x):
        return F.dropout(x, 0.5) * F.dropout2d(x, 0.5)

    for x in split_ones(P_world, numbers()):
        y = checkpoint(dropped, x, use_reentrant=False)
        y.backward(torch.ones(SHAPE, dtype=torch.float64))
        # The gradient is by the masks of the recomputation: these multiply the square of the input.
        torch.testing.assert_close(x.grad.to_local() * x.to_local() / 2, y.to_local())


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_stochastic_depth(P_world):
    def path(x):
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
        return x * mask.div_(0.6)

    check(P_world, path, [numbers()])

    def other(x):
        return x * torch.empty([x.shape[0], 1, 1, 1], dtype=x.dtype).bernoulli_(0.6)

    check(P_world, other, [numbers()])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3)
def test_draws_of_the_whole_are_refused(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size))
    x = block(P_x, torch.rand(3, 8))
    if P_world.size == 1:
        assert torch.multinomial(x, 2).shape == (3, 2)
        return
    with pytest.raises(UnsupportedError, match="multinomial"):
        torch.multinomial(x, 2)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_gumbel_softmax(P_world):
    for x in split_ones(P_world, numbers()):
        y = F.gumbel_softmax(x, 0.5, dim=1)
        torch.testing.assert_close(y.full_tensor().sum(1), torch.ones(4, 12, 10, dtype=torch.float64))
        y.backward(torch.ones(SHAPE, dtype=torch.float64))
        torch.testing.assert_close(x.grad.full_tensor(), torch.zeros(SHAPE, dtype=torch.float64))
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    hard = F.gumbel_softmax(block(P_x, numbers()), hard=True, dim=1).full_tensor()
    torch.testing.assert_close(hard.max(1).values, torch.ones(4, 12, 10, dtype=torch.float64))


@pytest.mark.mpi
def test_rrelu_that_does_not_train_is_torchs(P_world):
    check(P_world, lambda x: F.rrelu(x, 0.1, 0.2), [torch.randn(3, 4, dtype=torch.float64).requires_grad_()])
