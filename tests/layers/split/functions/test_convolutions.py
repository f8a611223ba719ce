"""Convolutions of split tensors."""

from functools import partial

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

from distdl_rma import ShapeError
from distdl_rma.layers.ops.conv import convolution, worker_grid
from tests.layers.split.against_whole import check, cut_along, forms, numbers
from tests.layers.split.samples import samples_of

pytestmark = pytest.mark.mpi
# A function, and shapes of its input, weight and bias.
CASES = {
    "plain": (partial(F.conv2d, padding=1), (2, 4, 9, 7), (6, 4, 3, 3), 6),
    "strided": (partial(F.conv2d, stride=2, padding=1), (2, 4, 9, 11), (6, 4, 3, 3), 6),
    "groups": (partial(F.conv2d, groups=2), (2, 4, 9, 7), (6, 2, 3, 2), 6),
    "depthwise": (partial(F.conv2d, groups=4, padding=1), (2, 4, 9, 7), (4, 1, 3, 3), 4),
    "dilated": (partial(F.conv2d, dilation=3, padding=3), (2, 4, 13, 11), (3, 4, 3, 3), 3),
    "same": (partial(F.conv2d, padding="same"), (2, 4, 9, 7), (3, 4, 5, 3), 3),
    "valid": (partial(F.conv1d, padding="valid"), (2, 4, 9), (3, 4, 3), 3),
    "3-D": (partial(F.conv3d, padding=1), (1, 2, 5, 6, 5), (3, 2, 3, 3, 3), 3),
    "less than a window each": (partial(F.conv2d, padding=1), (1, 2, 3, 3), (4, 2, 3, 3), 4),
}
TRANSPOSED = {
    "padded": (
        partial(F.conv_transpose2d, stride=2, padding=1, output_padding=1), (2, 4, 5, 6), (4, 3, 3, 3), 3
    ),
    "groups": (partial(F.conv_transpose2d, stride=2, groups=2), (2, 4, 5, 6), (4, 3, 2, 2), 6),
    "1-D": (partial(F.conv_transpose1d, dilation=2), (2, 4, 5), (4, 3, 3), 3),
    "3-D": (partial(F.conv_transpose3d, stride=2), (1, 2, 4, 3, 5), (2, 3, 2, 2, 2), 3),
}  # fmt: skip


def of_copies(function):
    return lambda x, w, b: function(x.redistribute() if hasattr(x, "redistribute") else x, w, bias=b)


# Forms beyond torch's samples.
FORMS = {
    **{name: (f, [shape], [weight, (n,)]) for name, (f, shape, weight, n) in CASES.items()},
    **{f"transposed, {name}": (f, [shape], [w, (n,)]) for name, (f, shape, w, n) in TRANSPOSED.items()},
    **{
        f"a split weight of {function.__name__}": (of_copies(function), [(2, 3, 5), (3, 3, 2)], [(3,)])
        for function in (F.conv1d, F.conv_transpose1d)
    },
    "no elements": (partial(F.conv1d, padding=2), [(0, 6, 0)], [(4, 6, 1)]),
}
test_forms = forms(FORMS)
test_samples_of_torch = samples_of("convolutions", 2)


@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize("how", ["apart", "joined again for the backward"])
@pytest.mark.parametrize("case", CASES)
def test_how_the_halo_of_small_blocks_is_convolved_changes_nothing(P_world, monkeypatch, case, how):
    if how == "apart":
        monkeypatch.setattr(worker_grid, "_NBYTES_PER_SIDE", 0)
        monkeypatch.setattr(worker_grid, "_WIDE_HALO", 1000.0)
    else:
        monkeypatch.setattr(convolution, "SMALLEST_NBYTES", 0)
    function, shape, weight, outputs = CASES[case]
    check(P_world, function, [numbers(*shape)], [numbers(*weight), numbers(outputs)])


@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0)])
def test_volumes_that_torch_leaves_to_slow_kernels(P_world, stride, padding):
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((1, 9, 18, 14, 12), (8, 9, 3, 3, 3), (8,)))
    check(P_world, partial(F.conv3d, stride=stride, padding=padding), [x], [w, b], atol=2e-3)


@pytest.fixture
def volume(P_world):
    """Input, weight and bias of a convolution on one rank, and the input as a split tensor."""
    if P_world.size > 1:
        pytest.skip("of one rank")
    x, w, b = (torch.randn(s) for s in ((1, 9, 18, 14, 12), (8, 9, 3, 3, 3), (8,)))
    return x, w, b, cut_along(P_world, 0, x)


@pytest.mark.sizes(1)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.processes
def test_volume_of_one_rank_is_differentiated_forward_as_by_torch(volume):
    x, w, _, whole = volume
    with forward_ad.dual_level():
        y = F.conv3d(whole, forward_ad.make_dual(w, w))
        assert torch.equal(forward_ad.unpack_dual(y).tangent, F.conv3d(x, w))


@pytest.mark.sizes(1)
def test_torch_says_what_is_wrong_with_a_convolution_of_a_whole_volume(volume):
    x, w, b, whole = volume
    wrong = [(w[:, :8], b), (w, b[:7]), (w, b.double()), (w.double(), None)]
    for arguments in (*wrong, (w, b, 0), (w, b, 1, -1), (w, b, (1, 1))):
        with pytest.raises(RuntimeError) as expected:
            F.conv3d(x, *arguments)
        with pytest.raises(RuntimeError) as found:
            F.conv3d(whole, *arguments)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_a_bias_of_another_type_is_refused_also_where_torch_takes_it(P_world, function, kernel):
    x, w, b = torch.randn(2, 2, 5), torch.randn(2, 2, kernel), torch.randn(2, dtype=torch.float64)
    cut = cut_along(P_world, 2, x)
    with pytest.raises((RuntimeError, ShapeError), match=r"bias (type|torch.float64)"):
        function(cut, w, b)


def test_output_padding_is_smaller_than_the_stride(P_world):
    x, w = torch.randn(2, 2, 5, 5), torch.randn(2, 2, 1, 2)
    cut = cut_along(P_world, 3, x)
    with pytest.raises(RuntimeError, match="output padding"):
        F.conv_transpose2d(cut, w, output_padding=(1, 0))
