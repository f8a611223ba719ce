"""Public models and training loops on a device: those of the host, in whose tests the model is moved."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_map

from distdl_rma import distribute
from distdl_rma.layers import staging
from tests.fake_device import needs_fake_device
from tests.layers.model import test_nets, training
from tests.layers.model import test_training_features as loops
from tests.zoo import zoo

pytestmark = [pytest.mark.mpi(min_size=2), needs_fake_device]
LOOPS = {
    "clipping": partial(loops.test_clipping_by_the_global_norm, norm_type=2.0),
    "accumulation": partial(loops.test_accumulation_with_and_without_no_sync, quiet=False),
    "no_sync": partial(loops.test_accumulation_with_and_without_no_sync, quiet=True),
    "moving averages": loops.test_moving_averages,
    "closures": loops.test_lbfgs_with_a_closure,
    "checkpoints": loops.test_checkpoints_within_checkpoints,
    "frozen": lambda comm: training.both(
        lambda model: training.loop(model, training.sgd(model), _freeze(model))
    ),
}


def _freeze(model):
    # In the last step the body has no gradient.
    return lambda step: model.body.requires_grad_(step + 2 < training.STEPS)


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch, device):
    """Models that are distributed are on the device, and what they are called with goes there."""

    def moved(model, *args, **options):
        # Else torch makes new parameters for a device that is not its own, and parts tied ones.
        monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        split = distribute(model.to(device), *args, **options)
        call = type(split).__call__

        class There(type(split)):
            def __call__(self, *given, **named):
                return call(self, *tree_map(_to, given), **tree_map(_to, named))

        split.__class__ = There
        return split

    def _to(x):
        return x.to(device) if isinstance(x, torch.Tensor) else x

    monkeypatch.setattr(staging, "ASYNCHRONOUS", {device.type})
    monkeypatch.setattr(training, "distribute", moved)


@pytest.mark.parametrize("name", LOOPS)
def test_loops_on_a_device(comm, name):
    LOOPS[name](comm)


@pytest.mark.in_turn(2, 3)
@pytest.mark.filterwarnings("ignore:monai.networks.blocks.Warp")
@pytest.mark.parametrize("name", test_nets.MODELS)
def test_public_models_on_a_device(comm, name):
    model = test_nets.MODELS[name]
    torch.manual_seed(5)
    made = test_nets.made(model)
    for module in made.modules():
        # It draws on the device.
        if type(module).__name__ == "StochasticDepth":
            module.p = 0.0
    training.train_beside(made, f"{comm.size}x1", model.inputs(), zoo.loss_of, steps=1)
