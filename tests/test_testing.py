"""What the public checks find: results, gradients and adjoints that are wrong on some rank or grid."""

import pytest
import torch

from distdl_rma import ArgumentError
from distdl_rma.layers import Repartition
from distdl_rma.layers.split import SplitTensor
from distdl_rma.testing import assert_adjoint, assert_equals_whole, block, grids

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3, 4)]


def of_blocks(function):
    """A function that computes on blocks as if they were whole."""

    def act(x, *others):
        if not isinstance(x, SplitTensor):
            return function(x, *others)
        return SplitTensor.from_local(function(x.to_local(), *others), x.partition, x.shape)

    return act


def drawn(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype, requires_grad=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float32])
def test_what_is_right_passes_on_every_grid(P_world, dtype):
    x, w = drawn(5, 7, dtype=dtype), drawn(7, 2500, dtype=dtype)
    close = 1e-4 if dtype == torch.float32 else 1e-10
    assert_equals_whole(P_world, lambda x, w: (x.tanh() @ w, x.shape[0]), [x], [w], atol=close, rtol=close)
    assert_equals_whole(P_world, of_blocks(torch.exp), [x], only=[(P_world.size, 1)])


def test_a_result_that_differs_on_a_grid_is_found_and_the_grid_is_named(P_world):
    x = drawn(5, 7)
    rows = of_blocks(lambda x: x - x.mean(0))
    assert_equals_whole(P_world, rows, [x], only=[(1, P_world.size)])
    with pytest.raises(AssertionError) as caught:
        assert_equals_whole(P_world, rows, [x])
    assert caught.value.__notes__ == [f"on a grid {next(grids(2, P_world.size))}"]
    with pytest.raises(AssertionError, match="is not"):
        assert_equals_whole(P_world, lambda x: isinstance(x, SplitTensor), [x])


def test_a_comparison_on_no_grid_is_refused(P_world):
    with pytest.raises(ArgumentError, match="no grid"):
        assert_equals_whole(P_world, torch.exp, [torch.tensor(1.0)])
    with pytest.raises(ArgumentError, match="no grid"):
        assert_equals_whole(P_world, torch.exp, [torch.rand(3, 4)], only=[])
    assert [*grids(2, 4)] == [(2, 2)] and [*grids(3, 1)] == [(1, 1, 1)]


def test_gradients_that_differ_are_found_unless_they_are_not_wanted(P_world):
    x, w = drawn(5, 7), drawn(7)

    def forgets(x, w):
        return x * (w.detach() if isinstance(x, SplitTensor) else w)

    def doubles(x, w):
        return (2 * x - x.detach() if isinstance(x, SplitTensor) else x) * w

    with pytest.raises(AssertionError, match="and none if they are split"):
        assert_equals_whole(P_world, lambda x: x.detach() if isinstance(x, SplitTensor) else x, [x])
    for wrong in (forgets, doubles):
        assert_equals_whole(P_world, wrong, [x], [w], gradients=False)
        with pytest.raises(AssertionError, match="not close"):
            assert_equals_whole(P_world, wrong, [x], [w])


def test_a_movement_has_its_adjoint_and_other_functions_have_not(P_world):
    rows, columns = ((1, 1, *grid) for grid in ((P_world.size, 1), (1, P_world.size)))
    P_x, P_y = (P_world.create_cartesian_topology_partition(grid) for grid in (rows, columns))
    x = block(P_x, drawn(2, 3, 5, 7)).to_local()
    move = Repartition(P_x, P_y)
    assert_adjoint(P_world, move, x)
    assert_adjoint(P_world, lambda x: 3 * move(x), x)
    for wrong in (lambda x: move(x).square(), lambda x: move(2 * x - x.detach()), lambda x: move(x).detach()):
        with pytest.raises(AssertionError, match=r"<f\(x\), y> is .*, <x, f\*\(y\)> is "):
            assert_adjoint(P_world, wrong, x)
