"""What a call changes beside its results is refused and put back; objects that cannot be read, and copies."""

from __future__ import annotations

import copy
import warnings
from collections import deque
from dataclasses import dataclass
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from distdl_rma import UnsupportedError, distribute
from tests.layers.capture import settings
from tests.layers.capture.test_kinds import Data, Net, Plain, reads
from tests.layers.model.test_compile import replayed

# In processes, each rank has variables and classes of its own.
pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.processes]


def counts(given):
    given.steps += 1
    return given.steps


def counts_in_class(_):
    Counted.steps += 1
    return Counted.steps


def keeps(given):
    if not hasattr(given, "kept"):
        given.kept = 1.0
    return given.kept


def sets_variable(_):
    settings.seen = 1.0
    return 1.0


class Counted:
    """Steps of all its objects."""

    steps = 0


def replaces(given):
    object.__setattr__(given, "steps", given.steps + 1)
    return given.steps


def adds(given):
    given[0] += 1
    return 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    """Fields that are not set."""

    steps: int = 0


class Kept:
    """A place for a value."""

    __slots__ = ("kept",)


CHANGING = {
    "an attribute": (counts, Data, "given.steps"),
    "an attribute of a class": (counts_in_class, Counted, "steps"),
    "a new attribute": (keeps, Plain, "given.kept"),
    "a new variable": (sets_variable, Plain, "settings.seen"),
    "a slot": (keeps, Kept, "given.kept"),
    "a frozen object": (replaces, Frozen, "given.steps"),
    "an array": (adds, lambda: np.zeros(2), "given"),
    "a deque": (lambda g: len(g.append(1) or g), deque, "given"),
}


def seen(x):
    # Numbers and keys that it has.
    return {name for name in dir(x) if name != "mT" and hasattr(x, name)}, repr(getattr(x, "__dict__", x))


@pytest.mark.parametrize("name", CHANGING)
def test_what_a_call_changes_is_refused_and_put_back(P_world, name):
    read, made, what = CHANGING[name]
    torch.manual_seed(3)
    model = distribute(reads(read, made=made)(), {"H": -1})
    before = seen(model.given)
    with pytest.raises(UnsupportedError, match=f"changes '{what}'"):
        replayed(lambda x: model(x).mean())(torch.rand(1, 1, 8, 6))
    assert seen(model.given) == before
    assert Counted.steps == 0
    assert not hasattr(settings, "seen")
    model.distributed.close()


def test_what_changes_each_time_is_named(P_world):
    torch.manual_seed(3)
    model = distribute(reads(lambda g: g.factor, made=Plain)(), {"H": -1})
    model.compile("replay")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(9):
            model.given.factor = 1.0 + at
            model(torch.rand(1, 1, 8, 6))
    assert "such as 'given.factor'" in "".join(str(each.message) for each in caught)
    model.distributed.close()


class Unreadable(list):
    """An object that raises."""

    def __iter__(self):
        raise RuntimeError("it has no elements")


@pytest.mark.mpi(min_size=2)
def test_objects_that_raise(P_world, comm):
    torch.manual_seed(3)
    given = Unreadable([1]) if comm.rank == 1 else [1]
    model = distribute(reads(lambda _: 1, made=lambda: given)(), {"H": -1})
    x, other = torch.rand(1, 1, 8, 6), Unreadable([1])
    model.compile("replay")
    with pytest.raises(
        UnsupportedError, match="rank 1: an object that it names cannot be read: RuntimeError"
    ):
        model(x)
    model.compile("replay", fallback=True)
    with pytest.warns(UserWarning, match="cannot be read"):
        y = model(x)
    assert torch.equal(
        y.full_tensor(), nn.functional.conv2d(x, model.conv.weight, model.conv.bias, padding=1)
    )
    with pytest.raises(UnsupportedError, match="cannot be read"):
        replayed(lambda x: (model(x).mean(), other))
    model.given = None
    # It has any attribute that is asked for.
    model.given = Mock()
    assert replayed(lambda x: model(x).mean())(torch.rand(1, 1, 8, 6)).shape == ()
    model.distributed.close()


def test_a_copy_of_what_holds_a_step_has_recorded_nothing(P_world):
    class Trainer:
        def __init__(self):
            self.model = distribute(Net(), {"H": -1})
            self.step = replayed(self.loss)

        def loss(self, x):
            return self.model(x).mean()

    one, x = Trainer(), torch.rand(1, 1, 8, 6)
    one.step(x)
    other = copy.deepcopy(one)
    assert (len(one.step.kinds), len(other.step.kinds)) == (1, 0)
    other.model.conv.bias.data += 1
    assert torch.equal(other.step(x).full_tensor(), other.model(x).mean().full_tensor())
    for each in (one, other):
        each.model.distributed.close()
