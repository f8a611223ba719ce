"""Random layers equal torch's, and random movements the same of global tensors, whatever operations do."""

from functools import partial

import pytest

from tests.fake_device import needs_fake_device, register
from tests.fuzz import interface, layers, loss, movement, twins
from tests.matrix import check_each, over_seeds

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning"),
]
FAMILIES = {family: partial(layers.check, family=family) for family in layers.FAMILIES}
FAMILIES |= {"loss": loss.check, "movement": movement.check, "from global parameters": interface.check}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("family", FAMILIES)
@over_seeds(128, each=16)
def test_random_layers_are_right(P_world, comm, family, seeds):
    check_each(FAMILIES[family], P_world, comm, seeds)


@needs_fake_device
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
@pytest.mark.parametrize("family", layers.FAMILIES)
@over_seeds(48, each=8)
def test_random_layers_are_right_on_a_device(P_world, comm, family, seeds, monkeypatch):
    monkeypatch.setattr(twins, "PLACE", register())
    check_each(FAMILIES[family], P_world, comm, seeds)
