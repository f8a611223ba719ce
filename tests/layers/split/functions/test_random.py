"""Random numbers of split tensors."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import Partition, distribute
from distdl_rma.geometry.intervals import Listed
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.functions.draws import fill
from tests.layers.split.against_whole import called, cut_along, forms, numbers, on_grids

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]
SHAPE = 4, 6, 12, 10
# A draw; and where it is one fill of a tensor, torch's method with its parameters.
DRAWS = {
    "dropout": (called(F.dropout, 0.3),),
    "alpha": (called(F.alpha_dropout, 0.3, True),),
    "dropout in place": (lambda x: F.dropout(x.clone(), 0.3, inplace=True),),
    "rand_like": (torch.rand_like, "uniform_", 0.0, 1.0),
    "randn_like": (called(torch.randn_like, dtype=torch.float32), "normal_", 0.0, 1.0),
    "randint_like": (called(torch.randint_like, 2, 9), "random_", 2, 9),
    "bernoulli": (lambda x: torch.bernoulli(torch.zeros_like(x) + 0.4),),
    "bernoulli_": (lambda x: torch.empty_like(x).bernoulli_(0.3), "bernoulli_", 0.3),
    "normal_": (lambda x: torch.empty_like(x).normal_(1, 2), "normal_", 1.0, 2.0),
    "uniform_": (lambda x: torch.empty_like(x).uniform_(-1, 1), "uniform_", -1.0, 1.0),
    "exponential_": (lambda x: torch.empty_like(x).exponential_(), "exponential_", 1.0),
    "random_": (lambda x: torch.empty_like(x).random_(5), "random_", 0, 5),
    "random_ between": (lambda x: torch.empty_like(x).random_(-2, to=5), "random_", -2, 5),
    "random_ of a type": (lambda x: torch.empty_like(x).random_(), "random_", None, None),
    "normal": (lambda x: torch.normal(x.detach(), 1.0),),
    "poisson": (lambda x: torch.poisson(torch.zeros_like(x) + 3),),
    "rrelu": (called(F.rrelu, training=True),),
}


def path(x):
    mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(0.6)
    return x * mask.div_(0.6)


# What is drawn for the whole, as by torch, or not at all.
FORMS = {
    "channels": (called(F.dropout2d, 0.4), [SHAPE]),
    "channels in place": (lambda x: F.dropout2d(x.clone(), 0.4, inplace=True), [SHAPE]),
    "alpha of channels": (called(F.feature_alpha_dropout, 0.4, True), [SHAPE]),
    "features": (called(torch.feature_dropout, 0.4, True), [SHAPE]),
    "channels of rows": (called(F.dropout1d, 0.4), [(5, 7)]),
    "channels of volumes": (called(F.dropout3d, 0.4), [(2, 3, 4, 3, 5)]),
    "stochastic depth": (path, [SHAPE]),
    "another path": (lambda x: x * torch.empty([4, 1, 1, 1], dtype=x.dtype).bernoulli_(0.6), [SHAPE]),
    "slopes in evaluation": (called(F.rrelu, 0.1, 0.2), [(3, 4)]),
    **{
        f"{function.__name__} in evaluation": (called(function, 0.5, False), [shape])
        for function, shape in {
            **dict.fromkeys((F.dropout, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout), SHAPE),
            F.dropout1d: (3, 4, 5),
            F.dropout2d: SHAPE,
            F.dropout3d: (2, 3, 3, 4, 5),
        }.items()
    },
}
test_forms = forms(FORMS)


def uneven_ones(P_world, whole):
    """Cut along the rows with an empty block, and with one of all rows but one."""
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    n, others = whole.shape[2], P_world.size - 2
    lengths = [(n,)] if others < 0 else [(0, n, *(0,) * others), (1, n - 1 - others, *(1,) * others)]
    for rows in lengths:
        layout = lay.balanced(P_x, whole.shape)
        layout = lay.with_splits(layout, {2: Listed(rows)}) if others >= 0 else layout
        yield SplitTensor(whole[layout.slices()].clone(), layout)


def channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


def test_dropout_keeps_its_part_of_elements(P_world):
    for x in on_grids(P_world, torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)):
        y = F.dropout(x, 0.25)
        y.backward(torch.ones(SHAPE, dtype=torch.float64))
        whole = y.full_tensor().detach()
        assert torch.equal(x.grad.full_tensor(), whole)
        assert set(whole.unique().tolist()) == {0.0, 1 / 0.75}
        assert 0.7 < (whole > 0).double().mean() < 0.8
        assert torch.equal(F.dropout(x, 0.25, training=False).to_local(), x.to_local())
        assert not F.dropout(x, 1.0).full_tensor().any()


@pytest.mark.in_turn(3, 4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", [case for case in DRAWS if case != "poisson"])
def test_every_grid_draws_as_one_process(P_world, case, dtype):
    if case == "rrelu" and dtype == torch.float16:
        pytest.skip("torch has no rrelu of float16")
    draw, *plain = DRAWS[case]
    torch.manual_seed(7)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    torch.manual_seed(2)
    x = numbers(*SHAPE).detach().to(dtype)
    expected = torch.empty(SHAPE, dtype=torch.float32 if case == "randn_like" else dtype) if plain else None
    if plain:
        fill(expected, plain[0], lay.replicated(Partition((0,), (1,), 0), SHAPE), seed, plain[1:])
    state = None
    for split in [*on_grids(P_world, x), *uneven_ones(P_world, x)]:
        for given in (split, split.redistribute(), SplitTensor(channels_last(split._local), split._layout)):
            torch.manual_seed(7)
            found = draw(given)
            # The generators of the ranks go on alike, whatever the blocks are.
            state = torch.get_rng_state() if state is None else state
            assert torch.equal(torch.get_rng_state(), state)
            assert torch.equal(found.to_local(), found.full_tensor()[found.decomposition.slices()])
            expected = found.full_tensor() if expected is None else expected
            assert torch.equal(found.full_tensor(), expected)
        assert not torch.equal(draw(split).full_tensor(), expected)
    assert not any(torch.equal(*expected.tensor_split(2, dim)) for dim in range(4))


def test_a_generator_gives_the_seed(P_world):
    def seeded():
        return torch.Generator().manual_seed(4)

    for x in on_grids(P_world, numbers(*SHAPE).detach()):
        state = torch.get_rng_state()
        first = torch.rand_like(x, generator=seeded()).full_tensor()
        for y in (
            torch.empty_like(x).uniform_(generator=seeded()),
            torch.empty_like(x).uniform_(0, to=1, generator=seeded()),
        ):
            assert torch.equal(y.full_tensor(), first)
        assert torch.equal(torch.get_rng_state(), state)
        chance = x.sigmoid()
        p = chance.full_tensor()
        coins = torch.bernoulli(chance, generator=seeded()).full_tensor()
        assert torch.equal(coins, (first < p).double())
        assert torch.equal(torch.empty_like(x).bernoulli_(p, generator=seeded()).full_tensor(), coins)
        y, z = torch.normal(x, p, generator=seeded()), torch.randn_like(x, generator=seeded())
        torch.testing.assert_close(y.full_tensor(), (x + z * p).full_tensor())


def test_gradients_are_those_of_a_constant_mask(P_world):
    for x in on_grids(P_world, numbers(*SHAPE)):
        for case in ("dropout", "alpha", "rrelu"):
            (function,) = DRAWS[case]
            given = x.detach().requires_grad_()
            torch.manual_seed(7)
            y = function(given)
            y.sum().backward()
            torch.manual_seed(7)
            one = x.detach().full_tensor()
            step = torch.full_like(one, 1e-3)
            moved = SplitTensor((x.detach()._local + step[x.decomposition.slices()]), x.decomposition)
            other = function(moved)
            # Linear but at zero, where no element is.
            found = (other.full_tensor() - y.full_tensor().detach()) / 1e-3
            apart = (one + 1e-3).sign() == one.sign()
            torch.testing.assert_close(given.grad.full_tensor()[apart], found[apart], atol=1e-8, rtol=1e-8)
        # Torch's parameters of a distribution have the gradient zero.
        mean = x.detach().requires_grad_()
        torch.normal(mean, 1.0).sum().backward()
        assert not mean.grad.full_tensor().any()


def test_autocast_draws_alike_on_every_grid(P_world):
    weight = torch.linspace(-1, 1, 5 * 6).reshape(5, 6, 1, 1)
    torch.manual_seed(2)
    whole, kept = torch.randn(SHAPE), None
    for x in on_grids(P_world, whole):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16):
            y = F.dropout(F.conv2d(x, weight), 0.5)
        assert y.dtype == torch.bfloat16
        kept = y.full_tensor() != 0 if kept is None else kept
        assert torch.equal(y.full_tensor() != 0, kept)


class Checkpointed(nn.Module):
    """Drops elements in a part that is recomputed: a module, or a function of its own."""

    def __init__(self, in_module):
        super().__init__()
        functions = called(F.dropout, 0.5), called(F.dropout2d, 0.5)
        self.elements, self.channels = (nn.Dropout(0.5), nn.Dropout2d(0.5)) if in_module else functions

    def forward(self, x):
        return checkpoint(lambda y: self.elements(y) * self.channels(y), x, use_reentrant=False)


@pytest.mark.sizes(1, 2, 3)
@pytest.mark.parametrize("distributes", [True, False])
@pytest.mark.parametrize("in_module", [True, False])
def test_checkpoints_draw_the_same_again_in_a_model_and_outside(P_world, distributes, in_module):
    for x in on_grids(P_world, numbers(*SHAPE)):
        model, ones = Checkpointed(in_module), torch.ones(SHAPE, dtype=torch.float64)
        model = distribute(model, x.partition) if distributes else model
        y = model(x)
        y.backward(ones)
        # The gradient is by the masks of the recomputation: these multiply the square of the input.
        torch.testing.assert_close(x.grad.to_local() * x.to_local() / 2, y.to_local())
        if distributes:
            model.distributed.close()


def test_gumbel_softmax(P_world):
    for x in on_grids(P_world, numbers(*SHAPE)):
        y = F.gumbel_softmax(x, 0.5, dim=1)
        torch.testing.assert_close(y.full_tensor().sum(1), torch.ones(4, 12, 10, dtype=torch.float64))
        y.backward(torch.ones(SHAPE, dtype=torch.float64))
        torch.testing.assert_close(x.grad.full_tensor(), torch.zeros(SHAPE, dtype=torch.float64))
    hard = F.gumbel_softmax(cut_along(P_world, 2, numbers(*SHAPE)), hard=True, dim=1).full_tensor()
    torch.testing.assert_close(hard.max(1).values, torch.ones(4, 12, 10, dtype=torch.float64))
