"""Layers take what their sequential twins take, by the same names."""

import inspect

import pytest
from torch import nn

from distdl_rma import ArgumentError, layers
from tests.layers.every_layer import EVERY_LAYER

TWINS = [
    name
    for name in layers.__all__
    if name.startswith("Distributed") and hasattr(nn, name.removeprefix("Distributed"))
]


def test_twins_are_found():
    assert len(TWINS) > 50


@pytest.mark.parametrize("name", TWINS)
def test_forward_takes_the_arguments_of_torch(name):
    mine, torchs = getattr(layers, name), getattr(nn, name.removeprefix("Distributed"))
    assert list(inspect.signature(mine.forward).parameters) == list(
        inspect.signature(torchs.forward).parameters
    )


def constructor(kind):
    """Arguments of a class of layers, in order, but those that torch itself has given up."""
    return [name for name in inspect.signature(kind).parameters if name not in ("size_average", "reduce")]


@pytest.mark.parametrize("name", TWINS)
def test_constructors_take_the_arguments_of_torch_after_the_partitions(name):
    mine, torchs = getattr(layers, name), getattr(nn, name.removeprefix("Distributed"))
    names, wanted = constructor(mine), constructor(torchs)
    shared = [name for name in names if name in wanted]
    assert shared == wanted
    partitions = [name for name in names[: names.index(wanted[0])] if name.startswith("P_")] if wanted else []
    assert partitions == names[: len(partitions)] != []
    # By position as far as torch's have not changed their places.
    kinds = inspect.signature(mine).parameters
    given_up = list(inspect.signature(torchs).parameters) != wanted
    for key in [] if given_up else wanted:
        assert kinds[key].kind == inspect.signature(torchs).parameters[key].kind, key
        assert kinds[key].default == inspect.signature(torchs).parameters[key].default, key


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
                with pytest.raises(ArgumentError, match=f"^{kind.__name__}: placement"):
                    make(P_world)
                patch.undo()
    assert {kind.__name__ for kind in seen} == {
        name for name in LAYERS if PLACED & set(inspect.signature(getattr(layers, name)).parameters)
    }


def _told(build, given):
    def told(layer, *arguments, **options):
        build(layer, *arguments, **{key: options[key] for key in options if key not in PLACED} | given)

    return told
