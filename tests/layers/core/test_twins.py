"""Distributed twins are found by isinstance as torch's layers are, and treated right by what finds them."""

import pytest
import torch
from torch import nn

from distdl_rma import layers
from distdl_rma.layers import DistributedBatchNorm2d, DistributedConv2d, DistributedLinear
from distdl_rma.layers.core.layer import DistributedLayer
from tests.layers.every_layer import EVERY_LAYER, line, rows
from tests.layers.test_names import TWINS, constructor

# Of torch's classes: how they are copied and loaded, how a convolution is called inside, checks that the
# distributed forward makes in its own way, and what an embedding of one machine is made from.
HARMLESS = {
    "__module__", "__doc__", "__init__", "__annotations__", "__annotate__", "__annotate_func__",
    "__constants__", "__setstate__", "_load_from_state_dict", "_version", "_conv_forward",
    "_check_input_dim", "_apply_instance_norm", "_get_no_batch_dim", "_handle_no_batch_input",
    "_fill_padding_idx_with_zero", "from_pretrained", "_output_padding", "__abstractmethods__", "_abc_impl",
}  # fmt: skip


def torchs(kind):
    """The class of torch that a layer is the twin of."""
    return getattr(nn, kind.__name__.removeprefix("Distributed"))


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_an_instance_of_the_class_of_torch(name):
    kind = getattr(layers, name)
    assert issubclass(kind, torchs(kind))
    assert kind.__mro__.index(DistributedLayer) < kind.__mro__.index(torchs(kind))


@pytest.mark.parametrize("name", TWINS)
def test_nothing_of_torchs_class_shows_through(name):
    kind = getattr(layers, name)
    for base in torchs(kind).__mro__:
        if base is nn.Module:
            break
        for key in set(vars(base)) - HARMLESS:
            owner = next(part for part in kind.__mro__ if key in vars(part))
            assert not owner.__module__.startswith("torch"), key


def twins_of(P_world):
    """Every twin, in all forms that it has, and the class of torch."""
    for make in EVERY_LAYER.values():
        layer, _ = make(P_world)
        if type(layer).__name__ in TWINS:
            yield layer, torchs(type(layer))


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_twins_have_the_attributes_of_torchs_layers(P_world):
    missing = set()
    for layer, twin in twins_of(P_world):
        wanted = {key for key in constructor(twin) if key not in ("device", "dtype", "_weight", "_freeze")}
        for base in twin.__mro__:
            wanted |= set(vars(base).get("__constants__", ()))
        missing |= {(twin.__name__, key) for key in wanted if not hasattr(layer, key)}
    assert not missing


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_initialisers_and_weight_decay_written_for_torch_treat_twins_right(P_world):
    P_x, P_f = rows(P_world), line(P_world)
    model = nn.Sequential(
        DistributedConv2d(P_x, 4, 4, 3, padding=1),
        DistributedBatchNorm2d(P_x, 4),
        DistributedLinear(P_f, P_f, P_f, 4, 4),
    )

    def initialise(module):
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.constant_(module.weight, 0.5)

    before = [parameter.clone() for parameter in model.parameters()]
    model.apply(initialise)
    changed = [not torch.equal(b, p) for b, p in zip(before, model.parameters(), strict=True) if p.numel()]
    assert changed[:4] == [True, False, True, False]
    decayed = {
        f"{path}.weight" for path, part in model.named_modules() if isinstance(part, nn.Conv2d | nn.Linear)
    }
    assert decayed == {"0.weight", "2.weight"}


def test_only_twins_are_found():
    plain = [getattr(layers, name) for name in layers.__all__ if name not in TWINS]
    kinds = [kind for kind in plain if isinstance(kind, type) and issubclass(kind, DistributedLayer)]
    for kind in kinds:
        bases = {base for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules")}
        assert bases <= {nn.Module} or issubclass(kind, nn.Linear), kind
