"""Normalisation of split tensors."""

import warnings
from functools import partial

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import SplitTensor, shard
from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.split import layout as lay
from tests.layers.split.against_whole import called, check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
SHAPE, EVEN = (3, 4, 5, 7), (2, 4, 6, 5)


def spectra(*shape):
    return partial(numbers, *shape, dtype=torch.complex128)


def fixed(*shape):
    return partial(torch.rand, shape, dtype=torch.float64)


def running():
    return torch.zeros(4).double(), torch.ones(4).double()


def in_batches(x, w, b):
    mean, variance = torch.zeros(x.shape[1]).double(), torch.ones(x.shape[1]).double()
    y = F.batch_norm(x, mean, variance, w, b, training=True, momentum=0.3)
    z = F.batch_norm(y * y, mean, variance, w, b, True, 0.2, 1e-3)
    return z, F.batch_norm(x, mean, variance, w, b), mean.clone(), variance.clone()


def by_module(x):
    layer = torch.nn.BatchNorm2d(4, momentum=None, dtype=torch.float64)
    layer(x), layer(x + 1)
    y = layer.eval()(x)
    return y, layer.running_mean.detach(), layer.running_var.detach()


def of_instances(x, w, b):
    mean, variance = running()
    y = F.instance_norm(x, mean, variance, w, b, True, 0.3)
    return y, F.instance_norm(x, mean, variance, w, b, use_input_stats=False), mean, variance


def of_copies_too(x, w, b):
    y = x.redistribute() if hasattr(x, "redistribute") else x
    return F.group_norm(x, 2, w, b), F.group_norm(y, 2, w, b), F.batch_norm(y, None, None, w, b, True)


def by_constants(x, w, b):
    mean, variance = torch.linspace(-1, 1, 4).double(), torch.linspace(0.5, 2, 4).double()
    # Its gradient comes transposed.
    return F.batch_norm(x, mean, variance, w, b).flatten(2).transpose(1, 2)


def by_float32(x, w):
    # Torch warns that it takes a slower way.
    with warnings.catch_warnings(action="ignore"):
        return F.rms_norm(x, (5, 4), w.float())


# Forms beyond torch's samples.
FORMS = {
    "a weight alone": (lambda x, w: F.instance_norm(x, weight=w), [EVEN], [(4,)]),
    "a bias alone": (lambda x, b: F.instance_norm(x, bias=b), [EVEN], [(4,)]),
    "a weight alone of groups": (lambda x, w: F.group_norm(x, 2, weight=w), [EVEN], [(4,)]),
    "a weight alone of channels": (lambda x, w: F.group_norm(x, 4, weight=w), [EVEN], [(4,)]),
    # Torch has no gradient of a bias without a weight here.
    "a bias alone of groups": (lambda x, b: F.group_norm(x, 2, bias=b), [EVEN], [fixed(4)]),
    "a bias alone of one group": (lambda x, b: F.group_norm(x, 1, bias=b), [EVEN], [fixed(4)]),
    "a weight of another type": (by_float32, [(3, 5, 4)], [fixed(5, 4)]),
    "complex numbers": (called(F.rms_norm, (4,)), [spectra(3, 5, 4)]),
    "weighted complex numbers": (
        lambda x, w: F.rms_norm(x, (5, 4), w), [spectra(3, 5, 4)], [spectra(5, 4)]
    ),
    "zeros": (lambda x: F.normalize(x * 0), [SHAPE]),
    "an infinite order": (called(F.normalize, float("inf"), dim=-1), [(2, 2, 2, 2)]),
    "planes": (called(F.normalize, dim=(1, 2)), [SHAPE]),
    "all elements": (called(F.normalize, dim=()), [SHAPE]),
    "neighbours": (called(F.local_response_norm, 3, alpha=0.1), [SHAPE]),
    **{
        f"batches of {shape}": (in_batches, [shape], [shape[1:2], shape[1:2]])
        for shape in (SHAPE, (5, 4), (3, 4, 7), (2, 3, 4, 3, 5), (2, 2, 2, 2))
    },
    "batches without weights": (called(F.batch_norm, None, None, training=True), [SHAPE]),
    "a module": (by_module, [SHAPE]),
    "instances": (of_instances, [SHAPE], [(4,), (4,)]),
    "instances of rows": (F.instance_norm, [(2, 4, 9)]),
    "copies": (of_copies_too, [SHAPE], [(4,), (4,)]),
    "constants": (by_constants, [(2, 4, 3, 3)], [(4,), (4,)]),
}  # fmt: skip
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("norms")


@pytest.mark.sizes(4)
def test_of_what_is_cut_in_one_dimension_of_a_grid_alone(P_world):
    def beside_copies(x, w, b):
        y = x.redistribute(None, None, 2, None) if hasattr(x, "redistribute") else x
        mean, variance = running()
        return F.batch_norm(y, mean, variance, w, b, True), mean, variance, F.layer_norm(y, SHAPE[-2:])

    if P_world.size == 4:
        check(P_world, beside_copies, [numbers(*SHAPE)], [numbers(4), numbers(4)], only=[(1, 2, 2, 1)])


def test_what_does_not_fit_is_refused_on_all_ranks(P_world):
    x = cut_along(P_world, 2, numbers(*SHAPE))
    for wrong in (
        called(F.layer_norm, (5, 8)),
        called(F.group_norm, 3),
        called(F.batch_norm, None, None, torch.ones(5, dtype=torch.float64), training=True),
        called(F.batch_norm, None, None),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            wrong(x)


def test_groups_of_no_elements(P_world):
    x, w = numbers(1, 1, 0, 3), numbers(1)
    try:
        F.group_norm(x, 1, weight=w)
    except RuntimeError as refusal:
        pytest.skip(f"torch {torch.__version__}: {refusal}")
    check(P_world, lambda x, w: F.group_norm(x, 1, weight=w), [x], [w])


def test_what_is_infinite_is_a_result_as_any_other(P_world):
    x = torch.randn(1, 2, 8, 4)
    x[0, 0, 0, 0] = float("inf")
    y = F.instance_norm(cut_along(P_world, 2, x.requires_grad_()), weight=torch.ones(2, requires_grad=True))
    y.to_local().sum().backward()
    assert y.to_local()[0, 0].isnan().any() and y.to_local()[0, 1].isfinite().all()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_that_are_cut_are_refused_beside_copies_too(P_world, name):
    for cut in (0, 1):
        statistics = [torch.zeros(4), torch.ones(4)]
        statistics[cut] = shard(P_world, statistics[cut])
        for x in (
            torch.randn(3, 4, 5),
            SplitTensor(torch.randn(3, 4, 5), lay.replicated(P_world, (3, 4, 5))),
        ):
            with pytest.raises(UnsupportedError, match="running statistics are plain tensors"):
                getattr(F, name)(x, *statistics, **({"training": True} if name == "batch_norm" else {}))


@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_with_a_gradient_are_refused_as_by_torch(P_world, training):
    x, mean, variance = torch.randn(1, 2, 3, 3).double(), numbers(2), torch.ones(2).double()
    for whole in (x, cut_along(P_world, 0, x)):
        with pytest.raises(RuntimeError, match="not differentiable"):
            F.batch_norm(whole, mean, variance, training=training)
