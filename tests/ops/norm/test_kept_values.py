"""Values per channel, from where they are kept to where the input is cut, and back."""

import pytest
import torch

from distdl_rma import Machine
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.norm.normalisation import KeptValues

pytestmark = pytest.mark.mpi
CHANNELS = 7


def uneven(P_x):
    """Input whose channels all lie on the last rank but one on each other."""
    lengths = (1,) * (P_x.size - 1)
    channels = Listed((*lengths, CHANNELS - len(lengths)))
    return Decomposition(P_x, (Balanced(2, 1), channels), (0, 1))


def kept_values(P_world, store):
    P_x = P_world.create_cartesian_topology_partition((1, P_world.size))
    source = uneven(P_x)
    places = {
        "cut": Decomposition(P_x, (Balanced(CHANNELS, P_x.size),), (None, 0)),
        "as the input": Decomposition(P_x, (source.splits[1],), (None, 0)),
        "whole": Decomposition.replicated(P_world, (CHANNELS,)),
    }
    site = CallSite(Machine.of(P_world), "test")
    return KeptValues(site, source, (1,), places[store]), source, places[store]


@pytest.mark.parametrize("store", ["cut", "as the input", "whole"])
def test_values_come_cut_as_the_input_and_go_back(P_world, comm, store):
    kept, source, place = kept_values(P_world, store)
    assert comm.size == 1 or kept.as_kept == (store == "as the input")
    kept.connect({"weight": torch.float32}, back=True)
    whole = torch.arange(CHANNELS, dtype=torch.float32)
    mine, used = place.slices(), source.slices()[1:]
    here = whole[mine].clone().requires_grad_()
    found = kept.to_input("weight", here)
    assert torch.equal(found.detach(), whole[used])
    (found * found.detach()).sum().backward()
    expected = whole.clone()
    if store == "whole":
        # Gradients of whole copies are summed elsewhere.
        expected = torch.zeros(CHANNELS)
        expected[used] = whole[used]
    assert torch.equal(here.grad, expected[mine])
    back = kept.to_store(whole.double()[used])
    assert back.dtype == torch.float64
    assert torch.equal(back, expected.double()[mine])
