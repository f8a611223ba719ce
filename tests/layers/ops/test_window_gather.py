"""What the outputs of sliding windows read."""

import pytest
import torch

from distdl_rma import Machine, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.halo import Stencil, Window
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.window_gather import WindowGather

pytestmark = pytest.mark.mpi

THREE = Stencil((Window(3, stride=2, left=2, right=2),))


def gather(P_world, mode, extent, value=0.0, dtype=torch.float64):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))
    source = Decomposition.balanced(P_x, (1, 1, extent))
    (count,) = THREE.outputs((extent,))
    outputs = source.with_splits({2: Balanced(count, P_world.size)})
    site = CallSite(Machine.of(P_world), "it")
    WindowGather(site, THREE, source, outputs, dtype, mode, value)


# What a gather is made for, and the words that refuse it.
REFUSED = [
    (("constant", 11, -1.0, torch.uint8), r"padding by .* elements of torch\."),
    (("constant", 11, 1e6, torch.float16), r"padding by .* elements of torch\."),
    (("constant", 11, "0", torch.float32), r"padding by .* elements of torch\."),
    (("reflect", 2), "smaller than the extent"),
    (("circular", 1), "at most the extent"),
    (("replicate", 0), "needs elements"),
]


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_padding_that_no_element_has_or_that_is_too_wide_is_refused(P_world, arguments, words):
    with pytest.raises(ShapeError, match=words):
        gather(P_world, *arguments)
