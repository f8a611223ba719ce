"""A dense shard may lie in memory as it likes, in the forward and in the backward."""

from functools import partial
from itertools import product

import pytest
import torch

from tests.layers.partitioned.every_layer import EVERY_LAYER, dense, outcome

pytestmark = pytest.mark.mpi


# The same numbers as a contiguous tensor, otherwise laid out.
LAYOUTS = {
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: dense(x.transpose(-1, -2)).transpose(-1, -2),
    "every other element": lambda x: torch.stack([x, x], -1)[..., 0],
    "negative bit": lambda x: torch.complex(x, -x).conj().imag,
    "with an offset": lambda x: torch.cat([x, x], -1)[..., x.shape[-1] :],
}


def laid(lay_out, x):
    """A tensor laid out in a way, if it has the dimensions and the elements for that."""
    fits = x.dim() == 4 or (x.dim() > 1 and lay_out is not LAYOUTS["channels last"])
    return lay_out(x) if fits and x.numel() and x.is_floating_point() else x


def test_every_layer_takes_any_layout_of_inputs_and_gradient(P_world, comm):
    for name, make in EVERY_LAYER.items():
        layer, inputs = make(P_world)
        expected = outcome(layer, inputs)
        # On one rank, and then on all.
        for (layout, lay_out), where in product(LAYOUTS.items(), ([comm.size - 1], range(comm.size))):
            mine = [laid(lay_out, x) for x in inputs] if comm.rank in where else inputs
            found, told = outcome(layer, mine, partial(laid, lay_out)), f"{name}, {layout}: "
            torch.testing.assert_close(found, expected, msg=told.__add__)


def test_elements_may_share_memory_and_so_may_class_indices(P_world):
    for make in EVERY_LAYER.values():
        layer, inputs = make(P_world)
        alike = [x[..., :1].expand_as(x) for x in inputs]
        again = [dense(x) for x in alike]
        torch.testing.assert_close(layer(*alike), layer(*again))
