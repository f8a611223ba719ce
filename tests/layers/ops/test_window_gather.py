"""What the outputs of sliding windows read."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.window_gather import PADDING_MODES, WindowGather

pytestmark = pytest.mark.mpi

THREE = Stencil((Window(3, stride=2, left=2, right=2),))


def gather(P_world, mode, extent, value=0.0, dtype=torch.float64):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    source = Decomposition.balanced(P_x, (1, 1, extent))
    (count,) = THREE.outputs((extent,))
    outputs = source.with_splits({2: Balanced(count, P_world.size)})
    site = CallSite(Machine.of(P_world), "it")
    return source, outputs, WindowGather(site, THREE, source, outputs, dtype, mode, value)


# torch pads elements of the third type by constants only.
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint16])
@pytest.mark.parametrize("mode", PADDING_MODES)
def test_a_rank_gets_what_its_windows_read_of_the_padded_tensor(P_world, mode, dtype):
    source, outputs, reads = gather(P_world, mode, 11, value=5.0, dtype=dtype)
    x = torch.arange(1.0, 12.0, dtype=torch.float64).reshape(1, 1, 11)
    local = x[source.slices()].to(dtype)
    held = local if reads.movement is None else reads.movement(local)
    constants = {"zeros": ("constant", 0.0), "constant": ("constant", 5.0)}
    padded = F.pad(x, (2, 2), *constants.get(mode, (mode,))).to(dtype)
    start, stop = outputs.box(P_world.me).bounds[2]
    expected = padded[:, :, 2 * start : 2 * (stop - 1) + 3] if stop > start else padded[:, :, :0]
    assert torch.equal(reads.add_padding(held), expected)


def test_a_value_that_no_element_has_is_refused_on_all_ranks(P_world):
    for value, dtype in ((-1.0, torch.uint8), (1e6, torch.float16), ("0", torch.float32)):
        with pytest.raises(ShapeError, match=r"padding by .* elements of torch\."):
            gather(P_world, "constant", 11, value, dtype)


def test_padding_that_is_wider_than_the_mode_allows_is_refused(P_world):
    for mode, message in {
        "reflect": "smaller than the extent",
        "circular": "at most the extent",
        "replicate": "needs elements",
    }.items():
        with pytest.raises(ShapeError, match=message):
            gather(P_world, mode, {"reflect": 2, "circular": 1, "replicate": 0}[mode])
