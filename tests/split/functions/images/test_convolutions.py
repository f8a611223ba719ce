"""Convolutions of split tensors."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F  # noqa: N812

from distdl_rma.ops.conv import worker_grid
from tests.split.against_whole import block, check
from tests.split.samples import check_functions

CASES = {
    "plain": (F.conv2d, (2, 4, 9, 7), (6, 4, 3, 3), {"padding": 1}),
    "strided": (F.conv2d, (2, 4, 9, 11), (6, 4, 3, 3), {"stride": 2, "padding": 1}),
    "groups": (F.conv2d, (2, 4, 9, 7), (6, 2, 3, 2), {"groups": 2}),
    "depthwise": (F.conv2d, (2, 4, 9, 7), (4, 1, 3, 3), {"groups": 4, "padding": 1}),
    "dilated": (F.conv2d, (2, 4, 13, 11), (3, 4, 3, 3), {"dilation": 3, "padding": 3}),
    "same": (F.conv2d, (2, 4, 9, 7), (3, 4, 5, 3), {"padding": "same"}),
    "valid": (F.conv1d, (2, 4, 9), (3, 4, 3), {"padding": "valid"}),
    "3-D": (F.conv3d, (1, 2, 5, 6, 5), (3, 2, 3, 3, 3), {"padding": 1}),
    "transposed": (
        F.conv_transpose2d,
        (2, 4, 5, 6),
        (4, 3, 3, 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
    ),
    "transposed groups": (F.conv_transpose2d, (2, 4, 5, 6), (4, 3, 2, 2), {"stride": 2, "groups": 2}),
    "transposed 1-D": (F.conv_transpose1d, (2, 4, 5), (4, 3, 3), {"dilation": 2}),
    "transposed 3-D": (F.conv_transpose3d, (1, 2, 4, 3, 5), (2, 3, 2, 2, 2), {"stride": 2}),
}


OVERLAPPING = [(case, True) for case in CASES if "transposed" not in case]


@pytest.mark.mpi
@pytest.mark.sizes(2, 3, 4)
@pytest.mark.parametrize("part", range(2))
def test_samples_of_torch(P_world, part):
    check_functions(P_world, "images.convolutions", part, 2)


@pytest.mark.mpi
@pytest.mark.sizes(1, 2, 3, 4)
@pytest.mark.parametrize(("case", "overlaps"), [*((case, False) for case in CASES), *OVERLAPPING])
def test_results_and_gradients_are_those_of_the_whole(P_world, monkeypatch, case, overlaps):
    # Of blocks as small as these no halo would be convolved apart.
    if overlaps:
        monkeypatch.setattr(worker_grid, "_NBYTES_PER_SIDE", 0)
        monkeypatch.setattr(worker_grid, "_WIDE_HALO", 1000.0)
    function, shape, weight, options = CASES[case]
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in (shape, weight))
    outputs = function(x, w, **options).shape[1]
    b = torch.randn(outputs, dtype=torch.float64, requires_grad=True)
    check(P_world, lambda x, w, b: function(x, w, b, **options), [x], [w, b])


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
@pytest.mark.parametrize(("stride", "padding"), [(1, 1), (2, 1), (1, 0)])
def test_volumes_that_torch_leaves_to_slow_kernels(P_world, stride, padding):
    x, w = (torch.randn(s, requires_grad=True) for s in ((1, 9, 18, 14, 12), (8, 9, 3, 3, 3)))
    b = torch.randn(8, requires_grad=True)
    check(P_world, lambda x, w, b: F.conv3d(x, w, b, stride, padding), [x], [w, b], atol=2e-3)


@pytest.mark.mpi
@pytest.mark.sizes(1)
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.processes
def test_volume_of_one_rank_is_differentiated_forward_as_by_torch(P_world):
    x, w = torch.randn(1, 9, 18, 14, 12), torch.randn(8, 9, 3, 3, 3)
    whole = block(P_world.create_cartesian_topology_partition((1,) * 5), x)
    with forward_ad.dual_level():
        y = F.conv3d(whole, forward_ad.make_dual(w, w))
        assert torch.equal(forward_ad.unpack_dual(y).tangent, F.conv3d(x, w))


@pytest.mark.mpi
@pytest.mark.sizes(1)
def test_torch_says_what_is_wrong_with_a_convolution_of_a_whole_volume(P_world):
    x, w, b = (torch.randn(s) for s in ((1, 9, 18, 14, 12), (8, 9, 3, 3, 3), (8,)))
    whole = block(P_world.create_cartesian_topology_partition((1,) * 5), x)
    for weight, bias, others in (
        (w[:, :8], b, ()),
        (w, b[:7], ()),
        (w, b.double(), ()),
        (w.double(), None, ()),
        (w, b, (0,)),
        (w, b, (1, -1)),
        (w, b, ((1, 1),)),
    ):
        with pytest.raises(RuntimeError) as expected:
            F.conv3d(x, weight, bias, *others)
        with pytest.raises(RuntimeError) as found:
            F.conv3d(whole, weight, bias, *others)
        assert str(found.value).splitlines()[0] == str(expected.value).splitlines()[0]


@pytest.mark.mpi
@pytest.mark.parametrize("function", [F.conv1d, F.conv_transpose1d])
def test_a_split_weight_of_an_input_that_all_ranks_have(P_world, function):
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 3, 5), (3, 3, 2)))
    b = torch.randn(3, dtype=torch.float64, requires_grad=True)

    def of_copies(x, w, b):
        x = x.redistribute() if hasattr(x, "redistribute") else x
        return function(x, w, bias=b)

    check(P_world, of_copies, [x, w], [b])


@pytest.mark.mpi
def test_an_input_without_elements(P_world):
    w = torch.randn(4, 6, 1, dtype=torch.float64, requires_grad=True)
    x = torch.randn(0, 6, 0, dtype=torch.float64, requires_grad=True)
    check(P_world, lambda x, w: F.conv1d(x, w, padding=2), [x], [w])


@pytest.mark.mpi
def test_output_padding_is_smaller_than_the_stride(P_world):
    x, w = torch.randn(2, 2, 5, 5), torch.randn(2, 2, 1, 2)
    cut = block(P_world.create_cartesian_topology_partition((1, 1, 1, P_world.size)), x)
    with pytest.raises(RuntimeError, match="output padding"):
        F.conv_transpose2d(cut, w, output_padding=(1, 0))
