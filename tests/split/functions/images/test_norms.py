"""Normalisation of split tensors."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import SplitTensor, shard
from distdl_rma.errors import UnsupportedError
from distdl_rma.split import layout as lay
from tests.split.against_whole import block, check
from tests.split.samples import check_functions

SHAPE = 3, 4, 5, 7


def numbers(shape, requires_grad=True):
    return torch.randn(shape, dtype=torch.float64, requires_grad=requires_grad)


def with_alone(function, *args, needs=True, name="weight"):
    x, w = numbers((2, 4, 6, 5)), torch.rand(4, dtype=torch.float64, requires_grad=needs)
    return lambda x, w: function(x, *args, **{name: w}), [x], [w]


def spectra(*shape):
    return torch.randn(shape, dtype=torch.complex128, requires_grad=True)


# Forms beyond torch's samples: the function, what is split, and what is plain beside it.
FORMS = {
    "a weight alone": lambda: with_alone(F.instance_norm),
    "a bias alone": lambda: with_alone(F.instance_norm, name="bias"),
    "a weight alone of groups": lambda: with_alone(F.group_norm, 2),
    "a weight alone of channels": lambda: with_alone(F.group_norm, 4),
    # Torch has no gradient of a bias without a weight here.
    "a bias alone of groups": lambda: with_alone(F.group_norm, 2, needs=False, name="bias"),
    "a bias alone of one group": lambda: with_alone(F.group_norm, 1, needs=False, name="bias"),
    "complex numbers": lambda: (lambda x: F.rms_norm(x, (4,)), [spectra(3, 5, 4)]),
    "weighted complex numbers": lambda: (
        lambda x, w: F.rms_norm(x, (5, 4), w),
        [spectra(3, 5, 4)],
        [spectra(5, 4)],
    ),
    "zeros": lambda: (lambda x: F.normalize(x * 0), [numbers(SHAPE)]),
    "an infinite order": lambda: (lambda x: F.normalize(x, float("inf"), dim=-1), [numbers((2, 2, 2, 2))]),
    "planes": lambda: (lambda x: F.normalize(x, dim=(1, 2)), [numbers(SHAPE)]),
    "neighbours": lambda: (lambda x: F.local_response_norm(x, 3, alpha=0.1), [numbers(SHAPE)]),
}


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("name", FORMS)
def test_forms(P_world, name):
    check(P_world, *FORMS[name]())


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_samples_of_torch(P_world):
    check_functions(P_world, "images.norms")


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("shape", [SHAPE, (5, 4), (3, 4, 7), (2, 3, 4, 3, 5), (2, 2, 2, 2)])
def test_batch_norm_in_training_and_evaluation(P_world, shape):
    channels = (shape[1],)

    def trained(x, w, b):
        mean, variance = torch.zeros(channels).double(), torch.ones(channels).double()
        y = F.batch_norm(x, mean, variance, w, b, training=True, momentum=0.3)
        z = F.batch_norm(y * y, mean, variance, w, b, True, 0.2, 1e-3)
        return z, F.batch_norm(x, mean, variance, w, b), mean.clone(), variance.clone()

    check(P_world, trained, [numbers(shape)], [numbers(channels), numbers(channels)])
    check(P_world, lambda x: F.batch_norm(x, None, None, training=True), [numbers(shape)])


@pytest.mark.mpi
def test_modules_of_batch_norm(P_world):
    def trained(x):
        layer = torch.nn.BatchNorm2d(4, momentum=None, dtype=torch.float64)
        layer(x), layer(x + 1)
        y = layer.eval()(x)
        return y, layer.running_mean.detach(), layer.running_var.detach()

    check(P_world, trained, [numbers(SHAPE)])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
def test_instance_norm(P_world):
    def tracked(x, w, b):
        mean, variance = torch.zeros(4).double(), torch.ones(4).double()
        y = F.instance_norm(x, mean, variance, w, b, True, 0.3)
        return y, F.instance_norm(x, mean, variance, w, b, use_input_stats=False), mean, variance

    check(P_world, tracked, [numbers(SHAPE)], [numbers((4,)), numbers((4,))])
    check(P_world, F.instance_norm, [numbers((2, 4, 9))])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
def test_on_copies_and_cut_twice(P_world):
    def both(x, w, b):
        y = x.redistribute() if hasattr(x, "redistribute") else x
        return F.group_norm(x, 2, w, b), F.group_norm(y, 2, w, b), F.batch_norm(y, None, None, w, b, True)

    check(P_world, both, [numbers(SHAPE)], [numbers((4,)), numbers((4,))])

    def beside_copies(x, w, b):
        y = x.redistribute(None, None, 2, None) if hasattr(x, "redistribute") else x
        mean, variance = torch.zeros(4).double(), torch.ones(4).double()
        return F.batch_norm(y, mean, variance, w, b, True), mean, variance, F.layer_norm(y, SHAPE[-2:])

    if P_world.size == 4:
        check(P_world, beside_copies, [numbers(SHAPE)], [numbers((4,)), numbers((4,))], only=[(1, 2, 2, 1)])


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_what_does_not_fit_is_refused_on_all_ranks(P_world):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    x = block(P_x, numbers(SHAPE))
    with pytest.raises((RuntimeError, ValueError)):
        F.layer_norm(x, (5, 8))
    with pytest.raises((RuntimeError, ValueError)):
        F.group_norm(x, 3)
    with pytest.raises((RuntimeError, ValueError)):
        F.batch_norm(x, None, None, torch.ones(5, dtype=torch.float64), training=True)
    with pytest.raises((RuntimeError, ValueError)):
        F.batch_norm(x, None, None)


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
def test_batch_norm_by_constants_takes_transposed_gradients(P_world):
    mean, variance = torch.randn(4, dtype=torch.float64), torch.rand(4, dtype=torch.float64) + 0.5
    x = torch.randn(P_world.size, 4, 3, 3, dtype=torch.float64, requires_grad=True)
    weights = [torch.rand(4, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    check(
        P_world,
        lambda x, w, b: F.batch_norm(x, mean, variance, w, b).flatten(2).transpose(1, 2),
        [x],
        weights,
        only=[(P_world.size, 1, 1, 1)],
    )


@pytest.mark.mpi
def test_groups_of_no_elements(P_world):
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 1, 0, 3), (1,)))
    try:
        F.group_norm(x, 1, weight=w)
    except RuntimeError as refusal:
        pytest.skip(f"torch {torch.__version__}: {refusal}")
    check(P_world, lambda x, w: F.group_norm(x, 1, weight=w), [x], [w])


@pytest.mark.mpi
def test_what_is_infinite_is_a_result_as_any_other(P_world):
    x = torch.randn(1, 2, 8, 4)
    x[0, 0, 0, 0] = float("inf")
    w = torch.ones(2, requires_grad=True)
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    y = F.instance_norm(block(P_x, x.requires_grad_()), weight=w)
    y.to_local().sum().backward()
    assert y.to_local()[0, 0].isnan().any()
    assert y.to_local()[0, 1].isfinite().all()


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("name", ["batch_norm", "instance_norm"])
def test_running_statistics_that_are_cut_are_refused_beside_copies_too(P_world, name):
    P_x = P_world.create_cartesian_topology_partition((P_world.size,))
    for cut in (0, 1):
        running = [torch.zeros(4), torch.ones(4)]
        running[cut] = shard(P_x, running[cut])
        for x in (torch.randn(3, 4, 5), SplitTensor(torch.randn(3, 4, 5), lay.replicated(P_x, (3, 4, 5)))):
            with pytest.raises(UnsupportedError, match="running statistics are plain tensors"):
                getattr(F, name)(x, *running, **({"training": True} if name == "batch_norm" else {}))


@pytest.mark.mpi
@pytest.mark.sizes(2, 3)
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_with_a_gradient_are_refused_as_by_torch(P_world, training):
    P_x = P_world.create_cartesian_topology_partition((P_world.size, 1, 1, 1))
    x, mean, variance = numbers((1, 2, 3, 3), False), numbers(2), torch.ones(2).double()
    for whole in (x, block(P_x, x)):
        with pytest.raises(RuntimeError, match="not differentiable"):
            F.batch_norm(whole, mean, variance, training=training)
