"""Random layers equal torch's, and random movements the same of global tensors, whatever operations do."""

from functools import partial

import pytest

from tests.fuzz import interface, layers, loss, movement
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
