"""Layers take what their sequential twins take, by the same names."""

import inspect

import pytest
from torch import nn

from distdl_rma import layers

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
