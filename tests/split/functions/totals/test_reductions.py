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


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(5))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "totals.reductions", part, 5)


@pytest.mark.mpi
def test_forms_of_arguments(P_world):
    x = numbers()
    for function in (
        lambda x: x.sum(),
        lambda x: x.sum(-1, True),
        lambda x: x.mean(axis=(2, 3), keepdims=True),
        lambda x: x.float().sum(dim=[1, 2], dtype=torch.float64),
        lambda x: torch.sum(input=x, dim=2),
        lambda x: x.mean((-1, -2)),
        lambda x: x.var(unbiased=False),
        lambda x: x.var(False),
        lambda x: x.std((2, 3), True, True),
        lambda x: torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True),
    ):
        check(P_world, function, [x])


@pytest.mark.mpi
@pytest.mark.parametrize("correction", [2, 3, 24, 1000])
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_variances_without_a_degree_of_freedom(P_world, correction):
    for function in (torch.var, torch.std, torch.var_mean, torch.std_mean):
        for x in (numbers((2, 3, 4)), torch.ones(2, 3, 4, dtype=torch.float64, requires_grad=True)):
            for dim in (None, 0, (1, 2)):
                check(P_world, lambda x, f=function, d=dim: f(x, d, correction=correction), [x])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_the_warning_of_no_degree_of_freedom_names_the_users_line(P_world):
    x = block(P_world.create_cartesian_topology_partition((1, 1, P_world.size)), numbers((2, 3, 4)))
    with pytest.warns(UserWarning, match="degrees of freedom") as warned:
        x.var(correction=24)
    assert warned[0].filename == __file__


@pytest.mark.mpi
def test_a_standard_deviation_of_equal_elements(P_world):
    check(P_world, lambda x: x.std((1, 2)), [torch.ones(2, 4, 3, dtype=torch.float64, requires_grad=True)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_products_and_logarithms_of_sums(P_world):
    x = numbers().detach()
    x[0, 1, 2, 3] = 0
    x.requires_grad_()
    check(P_world, torch.prod, [x])
    for dim in range(4):
        check(P_world, lambda x, dim=dim: x.prod(dim, keepdim=True), [x])
        check(P_world, lambda x, dim=dim: x.logsumexp(dim), [x])
    check(P_world, lambda x: torch.logsumexp(x, (0, -1), keepdim=True), [x])
    check(P_world, lambda x: torch.logsumexp(torch.complex(x, 2 * x), (0, 1)), [numbers()])
    check(P_world, lambda x: torch.logsumexp((4 * x).int(), (0, 1)), [numbers().detach()], atol=1e-5)


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
@pytest.mark.parametrize("order", ["nuc", 2, -2])
def test_norms_of_singular_values(P_world, order):
    for shape in ((5, 4, 3), (2, 3, 3), (3, 2, 2)):
        for function in (
            lambda x: torch.linalg.matrix_norm(x, order),
            lambda x: torch.linalg.matrix_norm(x, order, (2, 0), True),
            lambda x: torch.linalg.norm(x, order, (0, 1)),
            lambda x: torch.linalg.norm(x[0], order),
            lambda x: torch.linalg.matrix_norm(x, order, dtype=torch.float64),
        ):
            check(P_world, function, [torch.rand(shape, dtype=torch.float64, requires_grad=True)], atol=1e-8)
    for function in (lambda x: torch.norm(x, "nuc", (0, 1)), lambda x: x.norm("nuc")):
        check(P_world, function, [torch.rand(4, 3, dtype=torch.float64, requires_grad=True)], atol=1e-8)


@pytest.mark.mpi
def test_a_norm_of_zeros_has_the_gradient_0(P_world):
    check(P_world, lambda x: x.norm(), [torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)])


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
@pytest.mark.parametrize("dim", [None, 1, (0, 1)])
def test_of_no_elements(P_world, dim):
    x = numbers((5, 0, 3))
    check(P_world, lambda x: torch.linalg.vector_norm(x, 2, dim=dim, keepdim=True), [x])
    check(P_world, lambda x: x.sum(dim), [x])
    if dim == 1:
        check(P_world, lambda x: torch.prod(x, dim), [x])


def scores(shape=SHAPE):
    return (3 * torch.randn(shape, dtype=torch.float64)).requires_grad_()


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_empty_blocks_and_large_numbers(P_world):
    check(P_world, lambda x: (x * 1000).softmax(1), [scores((2, 2, 3))])
    check(P_world, lambda x: (x * 1000).log_softmax(2), [scores((2, 2, 1))])
    check(P_world, lambda x: x.softmax(0), [scores((5,))])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_masked_scores(P_world):
    masked = scores((3, 7, 6)).detach()
    masked[:, :, 3:] = -torch.inf
    masked[0, 2] = -torch.inf
    for dim in (1, 2):
        check(P_world, lambda x, dim=dim: x.softmax(dim), [masked], gradients=False)
    usable = scores((3, 7, 6))
    mask = torch.rand(3, 7, 6) > 0.5
    mask[:, 0], mask[:, :, 0] = True, True
    for dim in (1, 2):
        check(P_world, lambda x, m, dim=dim: torch.where(m, x, -torch.inf).softmax(dim), [usable], [mask])


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
def test_softmax_of_no_elements(P_world):
    check(P_world, lambda x: torch.softmax(x, -1), [torch.randn(0, dtype=torch.float64, requires_grad=True)])


def ties(shape=SHAPE):
    return torch.randint(0, 3, shape).double().requires_grad_()


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2)])
def test_values_and_gradients_with_ties(P_world, shape):
    for function in (
        torch.max,
        torch.min,
        torch.amax,
        lambda x: x.amin((2, 3)),
        lambda x: torch.amax(x, dim=-1, keepdim=True),
        lambda x: torch.amax(x, (0, 2, 3)),
        torch.aminmax,
        lambda x: x.aminmax(dim=2, keepdim=True),
        lambda x: x.amax((2, 3), True) - x,
    ):
        check(P_world, function, [ties(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2)])
def test_along_a_dimension_with_indices(P_world, dim, shape):
    check(P_world, lambda x: tuple(x.max(dim)), [ties(shape)])
    check(P_world, lambda x: x.min(dim=dim, keepdim=True).values, [ties(shape)])
    check(P_world, lambda x: torch.max(x, dim).indices, [ties(shape)])
    check(P_world, lambda x: x.argmax(dim), [ties(shape)])
    check(P_world, lambda x: x.argmin(dim, keepdim=True), [ties(shape)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [SHAPE, (2, 1, 2, 2), (3, 2), (5,)])
def test_an_index_among_all_elements(P_world, shape):
    for _ in range(4):
        check(P_world, torch.argmax, [ties(shape)])
        check(P_world, lambda x: x.argmin(keepdim=True), [ties(shape)])


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


@pytest.mark.mpi
def test_of_two_tensors(P_world):
    check(P_world, torch.max, [ties(), torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)])
    check(P_world, lambda x, y: x.min(other=y), [ties()], [torch.randn(5, 4, dtype=torch.float64)])
