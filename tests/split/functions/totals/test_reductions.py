"""Sums and extremes of split tensors, and what is made of them."""

import copy

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, shard
from tests.split.against_whole import block, check, grids
from tests.split.samples import check_functions

SHAPE = 2, 3, 5, 4


def numbers(shape=SHAPE):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def ties(shape=SHAPE):
    return torch.randint(0, 3, shape).double().requires_grad_()


def one_zero():
    x = numbers().detach()
    x[0, 1, 2, 3] = 0
    return x.requires_grad_()


def matrices(*shape):
    return torch.rand(shape, dtype=torch.float64, requires_grad=True)


def masked():
    x = 3 * numbers((3, 7, 6)).detach()
    x[:, :, 3:] = -torch.inf
    x[0, 2] = -torch.inf
    return x


FEW = 2, 1, 2, 2


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "numpys names": lambda: (lambda x: x.mean(axis=(2, 3), keepdims=True), [numbers()]),
    "a longer type": lambda: (lambda x: x.float().sum(dim=[1, 2], dtype=torch.float64), [numbers()]),
    "biased": lambda: (lambda x: x.var(False), [numbers()]),
    "unbiased, kept": lambda: (lambda x: x.std((2, 3), True, True), [numbers()]),
    "both moments": lambda: (lambda x: torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True), [numbers()]),
    "equal elements": lambda: (lambda x: x.std((1, 2)), [torch.ones(2, 4, 3).double().requires_grad_()]),
    **{
        f"{name} of {count} without {correction}": lambda f=f, d=d, c=correction: (
            lambda x: f(x, d, correction=c),
            [numbers((2, 3, 4))],
        )
        for name, f in {"variance": torch.var, "deviation and mean": torch.std_mean}.items()
        for count, d in {24: None, 2: 0, 12: (1, 2)}.items()
        for correction in (2, 24)
    },
    "a product with a zero": lambda: (torch.prod, [one_zero()]),
    **{
        f"{name} along {d}": lambda f=f, d=d, make=make: (lambda x: f(x, d), [make()])
        for name, f, make in (
            ("products", torch.prod, one_zero),
            ("logarithms of sums", torch.logsumexp, one_zero),
            ("largest", lambda x, d: tuple(x.max(d)), ties),
            ("smallest", lambda x, d: x.min(dim=d, keepdim=True).values, ties),
            ("places of the largest", torch.argmax, ties),
            ("largest of few", lambda x, d: tuple(x.max(d)), lambda: ties(FEW)),
            ("places of the smallest of few", torch.argmin, lambda: ties(FEW)),
        )
        for d in range(4)
    },
    **{
        f"{name} of {shape}": lambda f=f, shape=shape: (f, [ties(shape)])
        for name, f in {
            "largest": torch.max,
            "all largest": torch.amax,
            "smallest of planes": lambda x: x.amin((-2, -1)),
            "both ends": torch.aminmax,
            "both ends of rows": lambda x: x.aminmax(dim=0, keepdim=True),
            "distances": lambda x: x.amax((-2, -1), True) - x,
            "place of the largest": torch.argmax,
            "place of the smallest": lambda x: x.argmin(keepdim=True),
        }.items()
        for shape in (SHAPE, FEW, (3, 2))
    },
    "one place": lambda: (torch.argmax, [ties((5,))]),
    "the larger": lambda: (torch.max, [ties(), numbers()]),
    "the smaller": lambda: (lambda x, y: x.min(other=y), [ties()], [numbers((5, 4))]),
    "complex logarithms": lambda: (lambda x: torch.logsumexp(torch.complex(x, 2 * x), (0, 1)), [numbers()]),
    "a norm of zeros": lambda: (lambda x: x.norm(), [torch.zeros(3, 4).double().requires_grad_()]),
    "a nuclear norm": lambda: (lambda x: x.norm("nuc"), [matrices(4, 3)]),
    "a norm of one matrix": lambda: (lambda x: torch.linalg.norm(x[0], 2), [matrices(5, 4, 3)]),
    "norms of turned matrices": lambda: (
        lambda x: torch.linalg.matrix_norm(x, -2, (2, 0), True),
        [matrices(5, 4, 3)],
    ),
    "norms of few matrices": lambda: (lambda x: torch.linalg.matrix_norm(x, "nuc"), [matrices(2, 3, 3)]),
    "no elements": lambda: (lambda x: x.sum((0, 1)), [numbers((5, 0, 3))]),
    "products of none": lambda: (lambda x: torch.prod(x, 1), [numbers((5, 0, 3))]),
    "norms of none": lambda: (
        lambda x: torch.linalg.vector_norm(x, 2, dim=1, keepdim=True),
        [numbers((5, 0, 3))],
    ),
    "softmax of none": lambda: (lambda x: torch.softmax(x, -1), [numbers((0,))]),
    "softmax of large ones": lambda: (lambda x: (x * 1000).softmax(1), [numbers((2, 2, 3))]),
    "softmax of one column": lambda: (lambda x: (x * 1000).log_softmax(2), [numbers((2, 2, 1))]),
    "softmax of a vector": lambda: (lambda x: F.softmin(x, 0), [numbers((5,))]),
    "softmax of masked rows": lambda: (lambda x: x.softmax(2), [masked()]),
    "softmax of masked columns": lambda: (lambda x: x.softmax(1), [masked()]),
    "a softmax by torch.where": lambda: (
        lambda x, m: torch.where(m, x, -torch.inf).softmax(2),
        [numbers((3, 7, 6))],
        [(torch.arange(126) % 3 < 2).view(3, 7, 6)],
    ),
    "a module without a dimension": lambda: (torch.nn.Softmax2d(), [numbers()]),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(5))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "totals.reductions", part, 5)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_the_warning_of_no_degree_of_freedom_names_the_users_line(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size)), numbers((2, 3, 4)))
    with pytest.warns(UserWarning, match="degrees of freedom") as warned:
        x.var(correction=24)
    assert warned[0].filename == __file__


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_the_gradient_of_a_logarithm_of_sums_is_rounded_once(P_world):
    whole = (numbers((8, 4)).detach() * 4).to(torch.bfloat16)
    for grid in grids(2, P_world.size):
        x = block(P_world.create_cartesian_topology_partition(grid), whole.requires_grad_())
        y = x.logsumexp((0, 1))
        assert y.dtype is torch.bfloat16
        y.backward()
        wide = whole.detach().double().requires_grad_()
        wide.logsumexp((0, 1)).backward()
        torch.testing.assert_close(x.grad.full_tensor(), wide.grad.to(torch.bfloat16), rtol=1e-2, atol=0)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("shape", [(2, 3, 2, 1), (1, 1, 2, 2), (4,)])
def test_empty_blocks(P_world, shape):
    for function in (
        torch.sum,
        torch.mean,
        torch.prod,
        torch.std,
        lambda x: x.logsumexp(0),
        lambda x: x.norm(3),
        lambda x: (x > 0).any(),
        lambda x: (x > 0).all(-1),
    ):
        check(P_world, function, [numbers(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_are_summed_in_longer_ones(P_world, dtype):
    x = (torch.rand(SHAPE) + 0.5).to(dtype)
    for function in (lambda x: x.sum((2, 3)), torch.mean, lambda x: x.std(2), lambda x: x.norm()):
        check(
            P_world,
            function,
            [x],
            gradients=False,
            atol=2 * torch.finfo(dtype).eps * float(function(x).abs().max()),
        )


@pytest.mark.mpi
def test_means_of_whole_numbers_are_an_error_as_in_torch(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size))
    x = block(P_x, torch.ones(2, 5, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="mean"):
        x.mean()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_comparisons(P_world):
    x = numbers().detach()
    y = x.clone()
    y[1, 2, 4, 3] += 1e-3
    for shape in grids(4, P_world.size):
        P_x = P_world.create_cartesian_topology_partition(shape)
        one, other = block(P_x, x), block(P_x, y)
        assert torch.equal(one, x)
        assert not one.equal(other)
        assert not torch.allclose(one, other)
        assert torch.allclose(one, y, atol=1e-2)
        assert not torch.equal(one, x[0])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_types(P_world):
    x = torch.randn(SHAPE)
    for dtype in (torch.float32, torch.float64):
        check(P_world, lambda x, dtype=dtype: F.softmax(x, 2, dtype=dtype), [x], atol=1e-6)
    for dim in (2, 3):
        check(P_world, lambda x, dim=dim: x.half().log_softmax(dim), [x], gradients=False, atol=1e-2)
        check(P_world, lambda x, dim=dim: torch.softmax(x.bfloat16(), dim), [x], gradients=False, atol=1e-2)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("where", [(0, 0, 1, 1), (1, 2, 4, 3)])
def test_not_a_number(P_world, where):
    x = torch.randn(SHAPE, dtype=torch.float64)
    x[where] = torch.nan
    for function in (
        torch.max,
        torch.min,
        torch.argmax,
        lambda x: tuple(x.max(2)),
        lambda x: tuple(x.min(3)),
    ):
        check(P_world, function, [x.clone().requires_grad_()])
    check(P_world, lambda x: x.amax((2, 3)), [x.requires_grad_()])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_where_all_or_some_blocks_have_only_what_is_no_more_than_nothing(P_world):
    x = torch.full((2, 3, 4), -torch.inf, dtype=torch.float64)
    for given in (x, -x, x.clone().index_fill_(1, torch.tensor(1), -0.0)):
        for function in (torch.amax, torch.amin, torch.argmax, lambda x: tuple(x.min(1))):
            check(P_world, function, [given.clone().requires_grad_()])
    least = torch.full((2, 3, 4), torch.iinfo(torch.int32).min, dtype=torch.int32)
    for given in (least, least - 1):
        for function in (torch.amax, torch.amin, torch.argmin, lambda x: tuple(x.max(2))):
            check(P_world, function, [given], gradients=False)


@pytest.mark.mpi(min_size=3)
@pytest.mark.sizes(3, 4)
def test_what_moves_does_not_grow_with_the_ranks(P_world, comm):
    x = shard(P_world.create_cartesian_topology_partition((comm.size, 1)), torch.randn(8, 1 << 16))
    counters = Machine.of(P_world).segments.counters
    before = copy.copy(counters)
    x.amax(0)
    moved = counters.bytes_put - before.bytes_put + counters.bytes_got - before.bytes_got
    assert 0 < moved < 2 * 4 * x.shape[1]
