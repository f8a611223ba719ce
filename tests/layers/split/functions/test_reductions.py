"""Sums and extremes of split tensors, and what is made of them."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, shard
from distdl_rma.layers.split import layout
from tests.call_counts import Calls, most, profiles
from tests.layers.split.against_whole import called, check, cut_along, forms, numbers, on_grids
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
CLASSES = torch.arange(4)
SHAPE, FEW, NONE = (2, 3, 5, 4), (2, 1, 2, 2), (5, 0, 3)


def ties(*shape):
    return lambda: torch.randint(0, 3, shape).double().requires_grad_()


def one_zero():
    x = numbers(*SHAPE).detach()
    x[0, 1, 2, 3] = 0
    return x.requires_grad_()


def matrices(*shape):
    return partial(torch.rand, shape, dtype=torch.float64, requires_grad=True)


def masked():
    x = 3 * numbers(3, 7, 6).detach()
    x[:, :, 3:] = -torch.inf
    x[0, 2] = -torch.inf
    return x


# Functions along one dimension, each along all of them.
ALONG = {
    "products": (torch.prod, one_zero),
    "logarithms of sums": (torch.logsumexp, one_zero),
    "largest": (lambda x, d: tuple(x.max(d)), ties(*SHAPE)),
    "smallest": (lambda x, d: x.min(dim=d, keepdim=True).values, ties(*SHAPE)),
    "places of the largest": (torch.argmax, ties(*SHAPE)),
    "largest of few": (lambda x, d: tuple(x.max(d)), ties(*FEW)),
    "places of the smallest of few": (torch.argmin, ties(*FEW)),
}
EXTREMES = {
    "largest": torch.max,
    "all largest": torch.amax,
    "smallest of planes": called(torch.amin, (-2, -1)),
    "both ends": torch.aminmax,
    "both ends of rows": called(torch.aminmax, dim=0, keepdim=True),
    "distances": lambda x: x.amax((-2, -1), True) - x,
    "place of the largest": torch.argmax,
    "place of the smallest": called(torch.argmin, keepdim=True),
}
# Forms beyond torch's samples.
FORMS = {
    "numpys names": (lambda x: x.mean(axis=(2, 3), keepdims=True), [SHAPE]),
    "a longer type": (lambda x: x.float().sum(dim=[1, 2], dtype=torch.float64), [SHAPE]),
    "biased": (lambda x: x.var(False), [SHAPE]),
    "unbiased, kept": (lambda x: x.std((2, 3), True, True), [SHAPE]),
    "both moments": (called(torch.var_mean, (0, 2, 3), correction=0, keepdim=True), [SHAPE]),
    "equal elements": (called(torch.std, (1, 2)), [torch.ones(2, 4, 3).double().requires_grad_()]),
    **{
        f"{function.__name__} of {count} without {correction}": (
            called(function, dims, correction=correction), [(2, 3, 4)]
        )
        for function in (torch.var, torch.std_mean)
        for count, dims in {24: None, 2: 0, 12: (1, 2)}.items()
        for correction in (2, 24)
    },
    "a product with a zero": (torch.prod, [one_zero]),
    **{
        f"{name} along {d}": (called(function, d), [given])
        for name, (function, given) in ALONG.items() for d in range(4)
    },
    **{
        f"{name} of {shape}": (function, [ties(*shape)])
        for name, function in EXTREMES.items() for shape in (SHAPE, FEW, (3, 2))
    },
    "one place": (torch.argmax, [ties(5)]),
    "the larger": (torch.max, [ties(*SHAPE), SHAPE]),
    "the smaller": (lambda x, y: x.min(other=y), [ties(*SHAPE)], [(5, 4)]),
    "complex logarithms": (lambda x: torch.logsumexp(torch.complex(x, 2 * x), (0, 1)), [SHAPE]),
    "a norm of zeros": (lambda x: x.norm(), [torch.zeros(3, 4).double().requires_grad_()]),
    "a nuclear norm": (lambda x: x.norm("nuc"), [matrices(4, 3)]),
    "a norm of one matrix": (lambda x: torch.linalg.norm(x[0], 2), [matrices(5, 4, 3)]),
    "norms of turned matrices": (called(torch.linalg.matrix_norm, -2, (2, 0), True), [matrices(5, 4, 3)]),
    "norms of few matrices": (called(torch.linalg.matrix_norm, "nuc"), [matrices(2, 3, 3)]),
    "a sum of truth values": (called(torch.sum, (0, 2), dtype=torch.bool), [torch.eye(6).view(3, 3, 4)]),
    "no elements": (called(torch.sum, (0, 1)), [NONE]),
    "products of none": (called(torch.prod, 1), [NONE]),
    "norms of empty matrices": (lambda x: torch.linalg.matrix_norm(x[..., :0], 1), [(2, 3, 4)]),
    "norms of none": (called(torch.linalg.vector_norm, 2, dim=1, keepdim=True), [NONE]),
    "softmax of none": (called(torch.softmax, -1), [(0,)]),
    "softmax of large ones": (lambda x: (x * 1000).softmax(1), [(2, 2, 3)]),
    "softmax of one column": (lambda x: (x * 1000).log_softmax(2), [(2, 2, 1)]),
    "softmax of a vector": (called(F.softmin, 0), [(5,)]),
    "softmax of masked rows": (called(torch.softmax, 2), [masked]),
    "softmax of masked columns": (called(torch.softmax, 1), [masked]),
    "a softmax by torch.where": (
        lambda x, m: torch.where(m, x, -torch.inf).softmax(2),
        [(3, 7, 6)], [(torch.arange(126) % 3 < 2).view(3, 7, 6)],
    ),
    "a module without a dimension": (torch.nn.Softmax2d(), [SHAPE]),
    **{
        f"{at} of blocks without elements, {shape}": (function, [shape])
        for shape in ((2, 3, 2, 1), (1, 1, 2, 2), (4,))
        for at, function in enumerate((
            torch.sum, torch.mean, torch.prod, torch.std, called(torch.logsumexp, 0), lambda x: x.norm(3),
            lambda x: (x > 0).any(), lambda x: (x > 0).all(-1),
        ))
    },
}  # fmt: skip
# Of a matrix along its rows.
OF_ROWS = {
    "norms": lambda x: x.norm(dim=1),
    "norms of order 1": lambda x: x.norm(1, 1),
    "norms of order 3": lambda x: x.norm(3, 1),
    "norms of order -1": lambda x: torch.linalg.vector_norm(x, -1, 1),
    "largest norms": lambda x: x.norm(torch.inf, 1),
    "penalties": lambda x: (x.norm(dim=1) - 1) ** 2,
    "logarithms of sums": lambda x: x.logsumexp(1),
    "products": lambda x: x.prod(1),
    "deviations": lambda x: x.std(1),
    "variances": lambda x: x.var(1),
    "deviations and means": lambda x: torch.std_mean(x, 1)[0],
    "unit rows": lambda x: F.normalize(x, dim=1),
    "similarities": lambda x: F.cosine_similarity(x, x.flip(1), 1),
    "distances": lambda x: F.pairwise_distance(x, x.flip(1)),
    "cross entropies": lambda x: F.cross_entropy(x, CLASSES, reduction="none"),
    "resized": lambda x: F.interpolate(x.view(4, 1, 6), 6, mode="linear"),
}
# The most calls of Python and of C that a forward takes where ranks have no parts of a row.
MOST_OF_ROWS = {
    "norms": Calls(87, 121),
    "logarithms of sums": Calls(37, 41),
    "products": Calls(37, 41),
    "deviations": Calls(57, 62),
    "variances": Calls(59, 64),
    "unit rows": Calls(39, 48),
    "cross entropies": Calls(136, 163),
}
test_forms = pytest.mark.filterwarnings("ignore:.*degrees of freedom")(forms(FORMS))
test_samples_of_torch = samples_of("reductions", 5)


def test_the_warning_of_no_degree_of_freedom_names_the_users_line(P_world):
    x = cut_along(P_world, 2, numbers(2, 3, 4))
    for each in (x, x.redistribute()):
        with pytest.warns(UserWarning, match="degrees of freedom") as warned:
            each.var(correction=24)
        assert [one.filename for one in warned] == [__file__]


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 3, 4)
def test_the_gradient_of_a_logarithm_of_sums_is_rounded_once(P_world):
    whole = (numbers(8, 4).detach() * 4).to(torch.bfloat16)
    for x in on_grids(P_world, whole.requires_grad_()):
        y = x.logsumexp((0, 1))
        assert y.dtype is torch.bfloat16
        y.backward()
        wide = whole.detach().double().requires_grad_()
        wide.logsumexp((0, 1)).backward()
        torch.testing.assert_close(x.grad.full_tensor(), wide.grad.to(torch.bfloat16), rtol=1e-2, atol=0)


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_types_are_summed_in_longer_ones(P_world, dtype):
    x, eps = (torch.rand(SHAPE) + 0.5).to(dtype), torch.finfo(dtype).eps
    for function in (called(torch.sum, (2, 3)), torch.mean, called(torch.std, 2), lambda x: x.norm()):
        check(P_world, function, [x], gradients=False, atol=2 * eps * float(function(x).abs().max()))


@pytest.mark.sizes(1, 2, 3, 4)
def test_comparisons(P_world):
    x = torch.randn(SHAPE, dtype=torch.float64)
    y = x.clone()
    y[1, 2, 4, 3] += 1e-3
    for one, other in zip(on_grids(P_world, x), on_grids(P_world, y), strict=True):
        assert torch.equal(one, x) and torch.allclose(one, y, atol=1e-2)
        assert not (one.equal(other) or torch.allclose(one, other) or torch.equal(one, x[0]))


def test_types(P_world):
    x = torch.randn(SHAPE)
    for dtype in (torch.float32, torch.float64):
        check(P_world, called(F.softmax, 2, dtype=dtype), [x], atol=1e-6)
    for dim in (2, 3):
        check(P_world, lambda x, dim=dim: x.half().log_softmax(dim), [x], gradients=False, atol=1e-2)
        check(P_world, lambda x, dim=dim: torch.softmax(x.bfloat16(), dim), [x], gradients=False, atol=1e-2)


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


def slope_of_slopes(function, x):
    y = function(x)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
    # Some slopes are constants.
    z = slope * slope + x * x
    return torch.autograd.grad(z, x, torch.ones_like(z))[0]


@pytest.mark.parametrize("name", OF_ROWS)
def test_second_derivatives_along_what_is_not_cut_are_those_of_torch(P_world, name):
    x = matrices(4, 6)()
    found = slope_of_slopes(OF_ROWS[name], cut_along(P_world, 0, x))
    torch.testing.assert_close(found.full_tensor(), slope_of_slopes(OF_ROWS[name], x), atol=1e-12, rtol=1e-12)


@pytest.mark.sizes(2)
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", MOST_OF_ROWS)
def test_calls_along_what_is_not_cut(P_world, comm, name, monkeypatch):
    # Extents of no other test: layouts that those have left would be compared, with calls of their own.
    monkeypatch.setitem(globals(), "CLASSES", torch.arange(34) % 6)
    monkeypatch.setattr(layout, "LEAVING_OUT", [])
    x = cut_along(P_world, 0, torch.rand(34, 38, requires_grad=True))
    ahead, back = map(most, profiles(lambda: OF_ROWS[name](x)))
    assert ahead.within(MOST_OF_ROWS[name]) and back == Calls(0, 0), f"forward {ahead}, backward {back}"
