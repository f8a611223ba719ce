"""Numbers by the index of an element: parts of the whole, and distributed as torch's."""

from collections.abc import Callable
from itertools import combinations
from math import erf, sqrt
from typing import Any

import pytest
import torch

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.functions.draws import fill

FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Name of torch's method, parameters, and types.
CASES: list[tuple[str, tuple[Any, ...], tuple[torch.dtype, ...]]] = [
    ("uniform_", (-1.0, 3.0), (*FLOATS, torch.complex64)),
    ("normal_", (1.0, 2.0), (*FLOATS, torch.complex128)),
    ("exponential_", (2.0,), FLOATS),
    ("bernoulli_", (0.4,), (*FLOATS, torch.bool, torch.int32)),
    ("random_", (-3, 9), (*FLOATS, torch.int8, torch.int64)),
    ("random_", (None, None), (*FLOATS, torch.uint8, torch.bool, torch.int64)),
]
N = 1 << 18


def whole(shape, name, parameters, dtype=torch.float64, seed=5) -> torch.Tensor:
    out = torch.empty(shape, dtype=dtype)
    assert fill(out, name, lay.replicated(Partition((0,), (1,), 0), shape), seed, parameters)
    return out


def splitmix(seed: int, index: int) -> int:
    """The generator's number in Python's integers."""
    word = (seed + 0x9E3779B97F4A7C15 * (index + 1)) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    return word ^ word >> 31


def test_words_are_those_of_the_published_generator():
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix(1234567, at) for at in range(4)] == published
    found = whole((2, 3, 5), "random_", (-(2**63), 2**63), torch.int64, 1234567).flatten().tolist()
    assert [each + 2**63 for each in found] == [splitmix(1234567, at) for at in range(30)]


def halves(n):
    return n - n // 2, n // 2


def layouts(shape, me, cuts):
    """Grids over neighbouring dimensions, each cut in two parts of these lengths."""
    for first, last in combinations(range(len(shape) + 1), 2):
        axes = range(first, last)
        grid = Partition(tuple(range(2 ** len(axes))), (2,) * len(axes), me % 2 ** len(axes))
        for lengths in cuts:
            splits = [
                lay.simplest(Listed(lengths(n))) if d in axes else Balanced(n, 1) for d, n in enumerate(shape)
            ]
            yield Decomposition(grid, tuple(splits), tuple(axes))


SMALL = (7,), (3, 5), (4, 3, 5), (2, 3, 4, 5)
LARGE = (50_000,), (3, 40_001), (20_000, 3), (2, 70, 300), (5, 1, 9_000)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}{case[1]}")
@pytest.mark.parametrize("shape", [*SMALL, *LARGE], ids=str)
def test_blocks_are_parts_of_the_whole(case, shape):
    (name, parameters, dtypes), last = case, 2 ** len(shape) - 1
    if shape in LARGE:
        dtypes, ranks, cuts = dtypes[:2], {last}, [lambda n: (n // 3, n - n // 3)]
    else:
        ranks, cuts = {0, 1, last}, [halves, lambda n: (1, n - 1), lambda n: (0, n)]
    for dtype in dtypes:
        expected = whole(shape, name, parameters, dtype)
        for me in ranks:
            for layout in layouts(shape, me, cuts):
                part = expected[layout.slices()]
                out = torch.ones(part.shape, dtype=dtype)
                fill(out, name, layout, 5, parameters)
                assert torch.equal(out, part)


def test_the_memory_format_does_not_matter():
    expected = whole((2, 3, 4, 5), "normal_", (0.0, 1.0))
    layout = lay.replicated(Partition((0,), (1,), 0), (2, 3, 4, 5))
    last = torch.empty(2, 3, 4, 5, dtype=torch.float64).to(memory_format=torch.channels_last)
    for out in (last, torch.empty(5, 4, 3, 2, dtype=torch.float64).permute(3, 2, 1, 0)):
        fill(out, "normal_", layout, 5, (0.0, 1.0))
        assert torch.equal(out, expected)
    strided = torch.zeros(2, 3, 4, 10, dtype=torch.float64)
    fill(strided[..., ::2], "normal_", layout, 5, (0.0, 1.0))
    assert torch.equal(strided[..., ::2], expected)
    assert not strided[..., 1::2].any()


def test_a_tensor_without_dimensions_has_the_first_number_and_one_without_elements_none():
    assert whole((), "uniform_", (0.0, 1.0)) == whole((3,), "uniform_", (0.0, 1.0))[0]
    assert whole((3, 0), "normal_", (0.0, 1.0)).shape == (3, 0)


def test_changes_in_a_graph_are_torchs():
    layout = lay.replicated(Partition((0,), (1,), 0), (3,))
    leaf = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        fill(leaf, "uniform_", layout, 5, (0.0, 1.0))
    x = leaf * 2
    version = x._version
    fill(x, "uniform_", layout, 5, (0.0, 1.0))
    assert x._version > version
    assert torch.equal(x, whole((3,), "uniform_", (0.0, 1.0)))
    x.sum().backward()
    assert torch.equal(leaf.grad, torch.zeros(3, dtype=torch.float64))


def test_types_that_torch_does_not_draw_are_left_to_torch():
    layout = lay.replicated(Partition((0,), (1,), 0), (3,))
    wrong = ("normal_", torch.int64), ("bernoulli_", torch.complex64), ("random_", torch.complex64)
    for name, dtype in wrong:
        assert not fill(torch.zeros(3, dtype=dtype), name, layout, 5, (0.0, 1.0))


# Distributions: means and variances within 5 standard errors, distances of distribution functions as of
# Kolmogorov and Smirnov, whose limit 2.0 only one of 1,500 seeds exceeds.


def distance(x: torch.Tensor, below: Callable[[torch.Tensor], torch.Tensor]) -> float:
    ordered = below(x.double().flatten().sort().values)
    at = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    return float(torch.maximum(ordered - at, at + 1 / len(ordered) - ordered).max()) * sqrt(len(ordered))


def normal_below(x):
    return (1 + torch.erf(x / sqrt(2))) / 2


CONTINUOUS: dict[str, tuple[tuple[float, ...], Callable[[torch.Tensor], torch.Tensor]]] = {
    "uniform_": ((-1.0, 3.0), lambda x: (x + 1) / 4),
    "normal_": ((1.0, 2.0), lambda x: normal_below((x - 1) / 2)),
    "exponential_": ((2.0,), lambda x: 1 - torch.exp(-2 * x)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", CONTINUOUS)
def test_distribution_functions(name, dtype):
    parameters, below = CONTINUOUS[name]
    for seed in range(4):
        assert distance(whole((N,), name, parameters, dtype, seed), below) < 2.0


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_moments_of_normal_numbers(dtype):
    x = whole((N,), "normal_", (0.0, 1.0), dtype).double()
    moments = [float(x.pow(k).mean()) * sqrt(N) for k in range(1, 5)]
    # Standard deviations of powers of a normal number.
    wanted, spread = (0, 1, 0, 3), (1, sqrt(2), sqrt(15), sqrt(96))
    rounding = 2 * torch.finfo(dtype).eps * sqrt(N)
    for found, mean, deviation in zip(moments, wanted, spread, strict=True):
        assert abs(found - mean * sqrt(N)) < 5 * deviation + 4 * rounding
    # The tails: about 2.7e-3 of the numbers are beyond 3, 6.3e-5 beyond 4.
    for far in 3, 4:
        expected = N * (1 - erf(far / sqrt(2)))
        assert abs(int((x.abs() > far).sum()) - expected) < 5 * sqrt(expected) + 0.05 * expected


def test_far_tails_have_their_numbers():
    x = whole((1 << 23,), "normal_", (0.0, 1.0), torch.float32)
    expected = (1 << 23) * (1 - erf(5 / sqrt(2)))
    beyond = x[x.abs() > 5]
    assert abs(len(beyond) - expected) < 5 * sqrt(expected)
    assert len(beyond.unique()) == len(beyond)
    assert whole((1 << 22,), "exponential_", (1.0,), torch.float32).min() > 0


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_uniform_numbers_stay_below_the_upper_bound(dtype):
    x = whole((N,), "uniform_", (0.0, 1.0), dtype)
    x = torch.view_as_real(x) if dtype.is_complex else x
    assert 0 <= x.min() < x.max() < 1
    assert abs(float(x.double().mean()) - (1 - float(torch.finfo(x.dtype).eps) / 2) / 2) < 5 / sqrt(12 * N)


@pytest.mark.parametrize("p", [0.5, 0.1, 1e-3, 1.0, 0.0])
def test_probabilities(p):
    for seed in range(3):
        kept = int(whole((N,), "bernoulli_", (p,), torch.bool, seed).sum())
        assert abs(kept - p * N) <= 5 * sqrt(N * p * (1 - p))


@pytest.mark.parametrize("bounds", [(0, 10), (-7, 250), (5, 6)])
def test_integers_are_equally_likely(bounds):
    low, high = bounds
    counts = torch.bincount(whole((N,), "random_", bounds, torch.int64) - low, minlength=high - low)
    assert len(counts) == high - low
    expected = N / (high - low)
    chi, freedom = float(((counts - expected) ** 2 / expected).sum()), high - low - 1
    assert abs(chi - freedom) <= 5 * sqrt(2 * freedom)
