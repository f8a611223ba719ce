"""Infinite elements, NaN and squares that are too large: in results and gradients the same as in torch."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tests.layers.split.against_whole import called, check

pytestmark = pytest.mark.mpi
INF, NAN = torch.inf, torch.nan
LABELS, WEIGHT = torch.tensor([0, 1, 2, 3, 0, 1]), torch.tensor([0, 1, 0, 1.0]).double()
# The elements in the first and the last row, or the last rows, of a dimension.
VALUES = {
    "one infinite": (INF, None),
    "the last infinite": (None, -INF),
    "two infinite": (INF, -INF),
    "a zero and an infinite": (0, INF),
    "a number that is none": (NAN, None),
    "the last is none": (None, NAN),
    "two zeros": (0, 0),
}
MATRICES = {
    "norm": lambda x, d: x.norm(2, d),
    "norm 1": lambda x, d: x.norm(1, d),
    "norm 3": lambda x, d: x.norm(3, d),
    "norm below 1": lambda x, d: torch.linalg.vector_norm(x, 0.5, d),
    "norm below 0": lambda x, d: torch.linalg.vector_norm(x, -1, d),
    "largest norm": lambda x, d: x.norm(INF, d),
    "smallest norm": lambda x, d: torch.linalg.vector_norm(x, -INF, d),
    "product": torch.prod,
    "product of all": lambda x, d: x.prod() + x.sum(d),
    "logarithm of a sum": torch.logsumexp,
    "variance": torch.var,
    "deviation": torch.std,
    "normalize": lambda x, d: F.normalize(x, dim=d),
    "renorm": lambda x, d: x.renorm(2, d, 1.0),
    "similarity": lambda x, d: F.cosine_similarity(x, x.flip(0), d),
    "softmax": torch.softmax,
    "log_softmax": torch.log_softmax,
    "largest": lambda x, d: (*x.max(d), *x.aminmax(dim=d), x.max(), x.amax((0, 1)), x.argmax()),
    "smallest": lambda x, d: (*x.min(d), torch.amin(x, d), x.min(), x.argmin(d)),
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cross entropy": lambda x, d: F.cross_entropy(x, LABELS, reduction="none"),
    "weighted": lambda x, d: F.cross_entropy(x, LABELS, WEIGHT, reduction="none"),
    "smooth": lambda x, d: F.cross_entropy(x, LABELS, ignore_index=0, label_smoothing=0.2),
    "weighted logarithms": lambda x, d: F.nll_loss(x, LABELS, WEIGHT),
    "probabilities": lambda x, d: F.cross_entropy(x, torch.eye(4).double()[LABELS]),
    "root mean square": lambda x, d: F.rms_norm(x, (4,)),
}
RESIZED = {"bicubic": ((4, 5), (4, 7), (6, 5), (7, 8)), "bilinear": ((4, 7), (7, 5), (7, 8), (8, 10), (1, 1))}


def drawn(*shape):
    torch.default_generator.manual_seed(0)
    return torch.randn(shape, dtype=torch.float64)


def with_values(x, d, first, last):
    for at, value in ((0, first), (x.shape[d] - 1, last)):
        if value is not None:
            x[tuple(at if each == d else 0 for each in range(x.dim()))] = value
    return x.requires_grad_()


@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("name", MATRICES)
def test_of_single_elements(P_world, name):
    for values in VALUES.values():
        for d in range(2):
            check(P_world, called(MATRICES[name], d), [with_values(drawn(6, 4), d, *values)])


@pytest.mark.parametrize("name", ["logarithm of a sum", "norm below 0", "softmax", "log_softmax", "cumsum"])
def test_of_blocks_that_a_mask_hides(P_world, name):
    for first in (0, 3):
        x = drawn(6, 4)
        x[first : first + 3] = -INF
        check(P_world, called(MATRICES[name], 0), [x.requires_grad_()])


@pytest.mark.parametrize("factor", [1e200, 1e-200])
@pytest.mark.parametrize("name", ["norm", "norm 3", "variance", "deviation", "normalize", "similarity"])
def test_of_numbers_whose_squares_are_none(P_world, name, factor):
    check(P_world, called(MATRICES[name], 1), [(drawn(6, 4) * factor).requires_grad_()])


@pytest.mark.parametrize("function", [F.instance_norm, called(F.layer_norm, (6, 5))])
def test_of_images_whose_squares_are_none(P_world, function):
    check(P_world, function, [(drawn(2, 4, 6, 5) * 1e200).requires_grad_()], atol=1e-8)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("mode", RESIZED)
def test_of_neighbours_with_weight_zero(P_world, mode, value):
    x = drawn(1, 1, 4, 5)
    x[0, 0, 1, 2] = value
    for size in RESIZED[mode]:
        for corners in (False, True):
            check(P_world, called(F.interpolate, size, None, mode, corners), [x.clone().requires_grad_()])
