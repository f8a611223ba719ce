"""What the code of a step names may change between its calls; in a call it may not."""

from __future__ import annotations

import argparse
import functools
import sys
import threading
import types
import weakref
from collections import ChainMap, UserDict, deque, namedtuple
from dataclasses import dataclass
from enum import Enum

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError, distribute
from tests.layers.capture import settings
from tests.layers.capture.settings import Derived, Settings
from tests.layers.model.test_compile import alike, replayed

# In processes, each rank has variables and classes of its own.
pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2), pytest.mark.processes]

HERE = sys.modules[__name__]
FACTOR, NAME = 1.0, "factor"


def local():
    found = threading.local()
    found.factor = 1.0
    return found


class Net(nn.Module):
    """A convolution, and a function of it that reads what ``changed`` says: an owner and a name, or a key."""

    to = 3.0

    def __init__(self):
        super().__init__()
        self.conv, self.given = nn.Conv2d(1, 2, 3, padding=1), self.made()

    def made(self):
        """An object that the module has."""

    def changed(self):
        return HERE, "FACTOR"

    def forward(self, x):
        return self.of(self.conv(x))

    def of(self, y):
        return y * 1


class Plain:
    """An object that is no module."""

    def __init__(self):
        self.factor = 1.0

    def own(self):
        return self.factor

    def of_file(self):
        return FACTOR

    @property
    def shown(self):
        return FACTOR

    @staticmethod
    def alone():
        return FACTOR


def net(**names):
    """A class of modules with these attributes."""
    return type("Case", (Net,), names)


def reads(read, changed=None, made=None, to=3.0):
    """A class of modules: what it multiplies with, and of its object what changes; a variable if nothing."""
    names = {"made": lambda self: made()} if made else {}
    names |= {"changed": changed} if changed else {}
    return net(to=to, of=lambda self, y: y * read(self.given), **names)


def by_attribute():
    return by_attribute.factor


by_attribute.factor = 1.0


class Table:
    """Values in a list in a dict."""

    def __init__(self):
        self.table = {"slopes": [1.0], "flags": {"a": 1}}


def of_file():
    return FACTOR


def by_value(factor=1.0):
    return factor


GIVEN = Plain()


def by_default(*, given=GIVEN):
    return given.factor


@functools.lru_cache
def cached():
    return FACTOR


def passed_on(given):
    return given.factor


TWO = types.SimpleNamespace(first=1.0, second=1.0)


def first():
    return TWO.first


def second():
    return TWO.second


class Slots:
    """Attributes that no table has."""

    __slots__ = ("__private", "factor")

    def __init__(self):
        self.factor, self.__private = 1.0, 1.0

    def product(self):
        return self.factor * self.__private


@dataclass
class Data:
    """Fields, all of which methods name that every such class has."""

    factor: float = 1.0
    steps: int = 0


class Held:
    """What Python calls without a name."""

    factor = 1.5

    def __enter__(self):
        return self.factor

    def __exit__(self, *_):
        pass

    def __getitem__(self, key):
        return FACTOR


def within():
    with Held() as factor:
        return factor


class Made:
    """Its constructor reads a variable."""

    def __init__(self):
        self.result = FACTOR


class Loss(nn.Module):
    """A module that a step makes."""

    def __init__(self):
        super().__init__()
        self.result = FACTOR

    def forward(self, y):
        return y * self.result


class Shown:
    """Attributes of a table."""

    def __init__(self):
        self.table = {"factor": 1.0}

    def __getattr__(self, name):
        return self.table[name]


class Meta(type):
    """Gives its classes an attribute."""

    value = 1.0

    def __getattr__(cls, name):
        return cls.value


class OfMeta(metaclass=Meta):
    """A class without attributes of its own."""


def matched(given):
    match given:
        case Plain(factor=1.0):
            return 1.0
    return 3.0


class Standardised(nn.Conv2d):
    """A method of its own that torch's code calls."""

    def _conv_forward(self, *given):
        return super()._conv_forward(*given) * FACTOR


class Standardising(Net):
    """A module of a module of torch with a method of its own."""

    def __init__(self):
        super().__init__()
        self.conv = Standardised(1, 2, 3, padding=1)


@functools.wraps(F.relu)
def wrapped(y):
    return F.relu(y) * FACTOR


@functools.singledispatch
def dispatched(_):
    return 1.0


@dispatched.register
def _(_: int):
    return FACTOR


class Late:
    """An order that reads a variable."""

    def __lt__(self, other):
        return other < FACTOR


class OwnDict(UserDict):
    """A dictionary of a class of its own."""


def later():
    from tests.layers.capture import late

    return late.factor


class Descriptor:
    def __get__(self, instance, owner):
        return FACTOR


class Tripled(nn.Conv2d):
    """A class that a module may be of later."""

    def forward(self, x):
        return super().forward(x) * 3


class Numbers(list):
    """A list of a class of its own."""


Two = namedtuple("Two", "factor other")


class Way(Enum):
    """A choice."""

    ONE = 1.0
    THREE = 3.0


def imported_name():
    from tests.layers.capture.settings import factor

    return factor


def imported():
    from tests.layers.capture import settings as found

    return found.factor


def own(name="factor"):
    return lambda net: (net.given, name)


def fixed(*which):
    return lambda net: which


TABLE = {"f": 1.0}
NETS = {
    "nested code": net(of=lambda self, y: sum(each * FACTOR for each in (y,))),
    "a function": reads(lambda _: of_file()),
    "code": reads(lambda _: by_value(), fixed(by_value, "__code__"), to=(lambda factor=3.0: 3.0).__code__),
    "a default value": reads(lambda _: by_value(), fixed(by_value, "__defaults__"), to=(3.0,)),
    "one by name": reads(lambda _: by_default(), fixed(by_default, "__kwdefaults__"), to={"given": Held()}),
    "a list in a dict": reads(
        lambda g: g.table["slopes"][0], lambda net: (net.given.table, "slopes"), Table, [3.0]
    ),
    "an element of it": reads(
        lambda g: g.table["slopes"][0], lambda net: (net.given.table["slopes"], 0), Table
    ),
    "a key": reads(lambda g: len(g.table["flags"]), lambda net: (net.given.table["flags"], "b"), Table),
    "an attribute of its class": net(
        factor=1.0, of=lambda self, y: y * self.factor, changed=lambda self: (type(self), "factor")
    ),
    "a static method": net(of=staticmethod(lambda y: y * FACTOR)),
    "a class method": net(of=classmethod(lambda cls, y: y * FACTOR)),
    "a property": net(factor=property(lambda self: FACTOR), of=lambda self, y: y * self.factor),
    "a class": reads(lambda _: Settings.factor, fixed(Settings, "factor")),
    "a class that hides an attribute": reads(lambda _: Derived.factor, fixed(Derived, "factor")),
    "a Python module": reads(lambda _: settings.factor, fixed(settings, "factor")),
    "a function of one": reads(lambda _: settings.scaled(1), fixed(settings, "factor")),
    "a class of one": reads(lambda _: settings.Settings.factor, fixed(Settings, "factor")),
    "an import": reads(lambda _: imported(), fixed(settings, "factor")),
    "an imported name": reads(lambda _: imported_name(), fixed(settings, "factor")),
    "forward": reads(lambda _: 1, lambda net: (type(net), "forward"), to=lambda self, x: self.conv(x) * 3),
    "a method": reads(lambda g: g.own(), fixed(Plain, "own"), Plain, lambda self: 3.0),
    "an attribute": reads(lambda g: g.factor, own(), Plain),
    "one that a method reads": reads(lambda g: g.own(), own(), Plain),
    "one that a function reads": reads(passed_on, own(), Plain),
    "one in slots": reads(lambda g: g.factor, own(), Slots),
    "a private one": reads(lambda g: g.product(), own("_Slots__private"), Slots),
    "one of a data class": reads(lambda g: g.factor, own(), Data),
    "one of a namespace": reads(lambda g: g.factor, own(), lambda: types.SimpleNamespace(factor=1.0)),
    "one of a thread": reads(lambda g: g.factor, own(), local),
    "one of options": reads(lambda g: g.factor, own(), lambda: argparse.Namespace(factor=1.0)),
    "one that hides another": reads(lambda g: g.factor, own(), Held),
    "one by its text": reads(lambda g: getattr(g, "factor", 1.0), own(), types.SimpleNamespace),
    "one by a text of a variable": reads(lambda g: getattr(g, NAME), own(), Plain),
    "one of a proxy": reads(lambda g: g.factor, fixed(GIVEN, "factor"), lambda: weakref.proxy(GIVEN)),
    "one of a loop": reads(
        lambda g: next(getattr(g, name) for name in ("factor", "other")),
        own(),
        lambda: types.SimpleNamespace(factor=1.0, other=1.0),
    ),
    "one of a case": reads(matched, own(), Plain),
    "one of a metaclass": reads(lambda _: OfMeta.factor, fixed(Meta, "value")),
    "one of a table": reads(lambda g: g.factor, lambda net: (net.given.table, "factor"), Shown),
    "one of two": reads(lambda _: first() * second(), fixed(TWO, "second")),
    "one of a function": reads(lambda _: by_attribute(), fixed(by_attribute, "factor")),
    "one of a default value": reads(lambda _: by_default(), fixed(GIVEN, "factor")),
    "a variable of a method": reads(lambda g: g.of_file(), made=Plain),
    "a variable of a property": reads(lambda g: g.shown, made=Plain),
    "a variable of a static method": reads(lambda g: g.alone(), made=Plain),
    "a variable of an item": reads(lambda g: g[0], made=Held),
    "a variable of a constructor": reads(lambda _: Made().result),
    "a variable of a module that is made": reads(lambda _: Loss()(1.0)),
    "a variable of a cached function": reads(lambda _: (cached.cache_clear(), cached())[1]),
    "a variable of a descriptor": net(factor=Descriptor(), of=lambda self, y: y * self.factor),
    "a variable of a method that torch calls": Standardising,
    "a variable of a wrapper": net(of=lambda self, y: wrapped(y)),
    "a variable of an implementation": reads(lambda _: dispatched(1)),
    "a variable of an order": reads(lambda g: 1.0 + (g < 2.0), made=Late),
    "a new variable": reads(lambda _: getattr(settings, "more", 1.0), fixed(settings, "more")),
    "an import that comes late": reads(
        lambda _: later(), lambda net: (sys.modules["tests.layers.capture.late"], "factor")
    ),
    "an element of an array": reads(lambda g: float(g[0]), own(0), lambda: np.ones(2)),
    "an element of maps": reads(lambda g: g["f"], fixed(TABLE, "f"), lambda: ChainMap({}, TABLE)),
    "an element behind a view": reads(
        lambda g: g["f"], fixed(TABLE, "f"), lambda: types.MappingProxyType(TABLE)
    ),
    "an element of a dict of users": reads(lambda g: g["f"], own("f"), lambda: OwnDict(f=1.0)),
    "an attribute behind a weak reference": reads(
        lambda g: g().factor, fixed(GIVEN, "factor"), lambda: weakref.ref(GIVEN)
    ),
    "an attribute of a key": reads(
        lambda g: next(iter(g)).factor, fixed(GIVEN, "factor"), lambda: {GIVEN: 1}
    ),
    "a context": reads(lambda _: within(), fixed(Held, "factor")),
    "an element": reads(lambda g: g[0], own(0), lambda: Numbers([1.0])),
    "an element of a deque": reads(lambda g: g[0], own(0), lambda: deque([1.0])),
    "an element of a user's dict": reads(lambda g: g["f"], own("f"), lambda: UserDict(f=1.0)),
    "a named tuple": reads(lambda g: g.factor, lambda net: (net, "given"), lambda: Two(1.0, 0), Two(3.0, 0)),
    "a choice": reads(lambda g: g.value, lambda net: (net, "given"), lambda: Way.ONE, Way.THREE),
    "a class of an object": reads(lambda _: 1, lambda net: (net.conv, "__class__"), to=Tripled),
}


def check(net, change, kinds, is_same, loss=torch.mean):
    """A step and its replay, ``change()`` in between: the same numbers; of how many kinds, and which."""
    torch.manual_seed(3)
    model = distribute(net, {"H": -1})
    step, x, found = replayed(lambda x: loss(model(x))), torch.rand(1, 1, 8, 6), []
    for at in range(6):
        for function in (step, lambda x: loss(model(x))):
            model.zero_grad()
            result = function(x)
            result.backward()
            found.append([result.full_tensor().detach(), *[p.grad.clone() for p in model.parameters()]])
        assert alike(*found[-2:]), at
        if at == 2:
            change(model)
    assert alike(found[0], found[-1]) is is_same
    assert len(step.kinds) == kinds
    assert step.kinds[-1].known
    model.distributed.close()


@pytest.mark.parametrize("name", NETS)
def test_what_code_names_may_change(P_world, name, monkeypatch):
    # As if no test had imported it.
    monkeypatch.delitem(sys.modules, f"{settings.__package__}.late", raising=False)
    monkeypatch.delattr(sys.modules[settings.__package__], "late", raising=False)

    def change(model):
        owner, key = model.changed()
        if owner is TABLE:
            monkeypatch.setitem(owner, key, model.to)
        elif isinstance(owner, (dict, list, deque, UserDict, np.ndarray)):
            owner[key] = model.to
        else:
            monkeypatch.setattr(owner, key, model.to, raising=False)

    # An import is seen by a call that comes after it.
    check(NETS[name](), change, kinds=2 + ("late" in name), is_same=False)


class Criterion:
    """A loss that is no module, with a number and a tensor."""

    def __init__(self):
        self.factor, self.tensors = 1.0, (torch.ones(()),)

    def part(self, y):
        return y * self.factor * self.tensors[0].exp()

    def __call__(self, y):
        return self.part(y).mean()


def test_what_a_step_names_may_change(P_world):
    # The number makes another kind, values of a tensor are read in each call.
    def adds(model):
        criterion.tensors[0].add_(0.25)

    criterion = Criterion()
    check(Net(), lambda model: setattr(criterion, "factor", 3.0), kinds=2, is_same=False, loss=criterion)
    check(Net(), adds, kinds=1, is_same=False, loss=criterion)


def test_what_no_code_names_may_change(P_world):
    # Trainers count steps, and data classes name all their fields in methods of their own.
    def change(model):
        model.given.steps += 1

    check(reads(lambda g: g.factor, made=Data)(), change, kinds=1, is_same=True)


class Counting(Net):
    """A module that its loop writes to, and whose code reads another attribute."""

    steps, factor = 0, 1.0

    def of(self, y):
        return y * self.factor


class Copied(dict):
    """A dictionary whose copies are others."""

    def copy(self):
        return {key: Plain() for key in self}


def test_what_is_no_change(P_world):
    # A counter of a module, a set that has lost elements, and a dictionary that copies what is in it.
    def change(model):
        model.steps += 1

    model = Counting()
    check(model, change, kinds=2, is_same=True)
    some = {*range(0, 10_000, 1000)}
    some -= {*range(2000, 9000, 1000)}
    one = Plain()
    check(reads(lambda g: len(g[0]), made=lambda: (some, Copied(a=one)))(), lambda _: None, 1, is_same=True)
    assert model.steps == 1


class Base(Net):
    """A constructor that names what the loop writes to."""

    def __init__(self):
        super().__init__()
        self.steps, self.power = 0, np.float64(1)

    def of(self, y):
        return y * self.loss

    @property
    def loss(self):
        return float(self.power)


class Calling(Base):
    """A method that calls that of its base."""

    def of(self, y):
        return super().of(y)


def test_what_an_attribute_and_a_variable_are_both_named(P_world, monkeypatch):
    # A variable that has the name of an attribute, a counter that a constructor sets, and equal numbers.
    monkeypatch.setattr(HERE, "loss", 0, raising=False)

    def change(model):
        model.steps += 1
        model.power = np.float64(1)
        monkeypatch.setattr(HERE, "loss", 1)

    check(Calling(), change, kinds=1, is_same=True)


def test_values_that_follow_from_numbers_of_python_may_be_read(P_world):
    def axes(y):
        return y.mean(torch.arange(1, y.dim()).tolist()).sum() * torch.full((), 2.0).item()

    check(Net(), lambda _: None, kinds=1, is_same=True, loss=axes)

    def changed(y, x):
        some = torch.arange(2.0)
        some[0] = x.sum()
        return y.sum() * some.tolist()[0]

    model = distribute(Net(), {"H": -1})
    with pytest.raises(UnsupportedError, match="reads the values"):
        replayed(lambda x: changed(model(x), x))(torch.rand(1, 1, 8, 6))
    model.distributed.close()


def test_split_tensors_among_what_a_step_names(P_world):
    torch.manual_seed(3)
    model, x = distribute(Net(), {"H": -1}), torch.rand(1, 1, 8, 6)
    target, kept = model(x).detach() * 0.5, []
    step = replayed(lambda x: (model(x) - target).square().mean() + 0 * len(kept))
    for _ in range(3):
        model.zero_grad()
        found = step(x)
        found.backward()
        assert torch.equal(found.full_tensor(), (model(x) - target).square().mean().full_tensor())
        # Changes of it are read.
        target.mul_(0.5)
    assert [kind.known for kind in step.kinds] == [True]
    kept.append(found.detach())
    assert torch.equal(step(x).full_tensor(), (model(x) - target).square().mean().full_tensor())
    assert len(step.kinds) == 2
    model.distributed.close()
