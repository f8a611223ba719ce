"""Layers are twins of torch's by name, arguments, attributes and class, and say what they are made of."""

import inspect

import pytest
import torch
from torch import nn

from distdl_rma import ArgumentError, layers
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from tests.layers.partitioned.every_layer import EVERY_LAYER, OTHERS

TWINS = [
    name
    for name in layers.__all__
    if name.startswith("Distributed") and hasattr(nn, name.removeprefix("Distributed"))
]


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


def constructor(kind):
    """Arguments of a class of layers, in order, but those that torch itself has given up."""
    return [name for name in inspect.signature(kind).parameters if name not in ("size_average", "reduce")]


@pytest.mark.parametrize("name", TWINS)
def test_calls_take_the_arguments_of_torch_and_constructors_do_so_after_the_partitions(name):
    mine = getattr(layers, name)
    called, theirs = (inspect.signature(kind.forward).parameters for kind in (mine, torchs(mine)))
    assert [*called] == [*theirs]
    names, wanted = constructor(mine), constructor(torchs(mine))
    shared = [name for name in names if name in wanted]
    assert shared == wanted
    partitions = [name for name in names[: names.index(wanted[0])] if name.startswith("P_")] if wanted else []
    assert partitions == names[: len(partitions)] != []
    # By position as far as torch's have not changed their places.
    kinds, theirs = (inspect.signature(kind).parameters for kind in (mine, torchs(mine)))
    for key in wanted if list(theirs) == wanted else []:
        assert (kinds[key].kind, kinds[key].default) == (theirs[key].kind, theirs[key].default), key


PLACED = {"placement", "weights"}
BOTH = {"placement": "replicated", "weights": "root"}
LAYERS = [name for name in layers.__all__ if isinstance(getattr(layers, name), type) and name != "Movement"]


@pytest.mark.parametrize("name", LAYERS)
def test_where_parameters_are_kept_is_called_placement_everywhere(name):
    parameters = inspect.signature(getattr(layers, name)).parameters
    assert ("placement" in parameters) == ("weights" in parameters)
    if "placement" in parameters:
        both = [parameters[key] for key in ("placement", "weights")]
        assert all(p.kind is p.KEYWORD_ONLY and p.default in (None, p.empty) for p in both)
    assert "name" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


@pytest.mark.mpi
@pytest.mark.sizes(1)
def test_where_parameters_are_kept_is_said_in_three_words(P_world, monkeypatch):
    seen = set()
    for make in EVERY_LAYER.values():
        layer, _ = make(P_world)
        kind = type(layer)
        if "placement" not in inspect.signature(kind).parameters or kind in seen:
            continue
        seen.add(kind)
        assert layer.placement in ("replicated", "root", "cut")
        with monkeypatch.context() as patch:
            for given in ({"placement": "sideways"}, {"weights": ""}, {"placement": 0}, BOTH):
                patch.setattr(kind, "__init__", _told(kind.__init__, given))
                said = "=.*root' mean the same; give one" if given is BOTH else " is one of"
                with pytest.raises(ArgumentError, match=f"^{kind.__name__}: placement{said}"):
                    make(P_world)
                patch.undo()
    assert {kind.__name__ for kind in seen} == {
        name for name in LAYERS if PLACED & set(inspect.signature(getattr(layers, name)).parameters)
    }


def _told(build, given):
    def told(layer, *arguments, **options):
        build(layer, *arguments, **{key: options[key] for key in options if key not in PLACED} | given)

    return told


_WINDOW = "kernel_size=(3,), stride=(1,), padding=(0,), "
_NORM = "num_features=6, eps=1e-05, momentum=0.1, "
# Constructors, by names without their "Distributed", and what the layers are printed as.
PRINTED = {
    "Conv1d(line, 2, 3, 3)": f"in_channels=2, out_channels=3, {_WINDOW}dilation=(1,), groups=1, bias=True,"
    " padding_mode='zeros', P_x={line}, P_y={line}",
    # One argument by two names.
    "ConvTranspose1d(line, line, line, 2, 2, 3, placement='root', weights='root')": "in_channels=2,"
    f" out_channels=2, {_WINDOW}output_padding=(0,), groups=1, bias=True, dilation=(1,), placement='root',"
    " P_x={line}, P_y={line}, P_W={line}",
    "LinearAllGather(plane, 3, 4)": "in_features=3, out_features=4, bias=True, P_x={plane}, P_y={plane},"
    " P_w={workers}",
    "LinearAllGather(plane, 3, 4, weights='root')": "in_features=3, out_features=4, bias=True,"
    " placement='root', P_x={plane}, P_y={plane}, P_w={workers}",
    "InstanceNorm1d(line, 6, affine=True)": f"{_NORM}affine=True, bias=True, track_running_stats=False,"
    " P_x={line}, P_y={line}",
    "InstanceNorm1d(line, 6, weights='replicated')": f"{_NORM}affine=False, bias=False,"
    " track_running_stats=False, placement='replicated', P_x={line}, P_y={line}",
    "CrossEntropyLoss(blocks, torch.ones(4), ignore_index=3)": "reduction=mean, ignore_index=3,"
    " label_smoothing=0.0, weight=(4,), P_x={blocks}",
    "CircularPad1d(line, 1)": "padding=(1, 1), P_x={line}, P_y={line}",
}


@pytest.mark.mpi
def test_layers_are_printed_with_their_arguments_and_an_unusual_placement(P_world, comm):
    n = comm.size
    shapes = {"line": (1, 1, n), "plane": (1, n), "blocks": (n, 1), "workers": (1, n, 1)}
    names = {key: P_world.create_cartesian_topology_partition(shape) for key, shape in shapes.items()}
    for call, printed in PRINTED.items():
        layer = eval(f"layers.Distributed{call}", {"layers": layers, "torch": torch} | names)
        assert repr(layer) == f"{type(layer).__name__}({printed.format(**shapes)})"
        assert "Conv" not in call or layer.weights == layer.placement


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_an_instance_of_the_class_of_torch_of_which_nothing_shows_through(name):
    kind = getattr(layers, name)
    assert kind.__mro__.index(DistributedLayer) < kind.__mro__.index(torchs(kind))
    for base in torchs(kind).__mro__:
        if base is nn.Module:
            break
        for key in set(vars(base)) - HARMLESS:
            owner = next(part for part in kind.__mro__ if key in vars(part))
            assert not owner.__module__.startswith("torch"), key


@pytest.mark.mpi
@pytest.mark.sizes(1, 2)
def test_twins_have_the_attributes_of_torchs_layers(P_world):
    missing = set()
    for layer in (make(P_world)[0] for make in EVERY_LAYER.values()):
        if type(layer).__name__ not in TWINS:
            continue
        twin = torchs(type(layer))
        wanted = {key for key in constructor(twin) if key not in ("device", "dtype", "_weight", "_freeze")}
        for base in twin.__mro__:
            wanted |= set(vars(base).get("__constants__", ()))
        missing |= {(twin.__name__, key) for key in wanted if not hasattr(layer, key)}
    assert not missing


def test_the_table_of_every_layer_has_all():
    assert set(layers.__all__) - OTHERS == {key.partition(" ")[0] for key in EVERY_LAYER}


def test_only_twins_are_found():
    assert len(TWINS) > 50
    plain = [getattr(layers, name) for name in layers.__all__ if name not in TWINS]
    kinds = [kind for kind in plain if isinstance(kind, type) and issubclass(kind, DistributedLayer)]
    for kind in kinds:
        bases = {base for base in kind.__mro__ if base.__module__.startswith("torch.nn.modules")}
        assert bases <= {nn.Module} or issubclass(kind, nn.Linear), kind
