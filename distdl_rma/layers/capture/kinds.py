"""Kinds of calls: what a recording of a call holds for, and so what must be alike for it to be replayed.

A recording has no branches. All that its Python code may branch on has to be as it was::

    facts    of the arguments: layouts, shapes, strides and types of tensors, all other values;
             modes of torch; requires_grad, shape, strides and type of each parameter and buffer
    state    the very objects that modules hold, and that code names (``State``); numbers and texts may also
             be equal ones

Both are read in each call, by a few functions in C: ``state`` is one flat list.

Which attributes a call reads is not known before it, and in a replay it reads none. So all are compared whose
names are in its code, wherever they stand in it. That is more than it reads, and at times a needless kind::

    step -- names --> model.cfg.scale     code of the step and of the model names "cfg" and "scale"
              |            |      |
           methods      object   compared, as "scale" of any other object that was met
"""

from __future__ import annotations

import gc
import random
import sys
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from dis import get_instructions
from functools import partial
from itertools import accumulate, chain, islice, repeat
from operator import attrgetter, is_
from types import CodeType, FunctionType, MappingProxyType, MemberDescriptorType, ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distdl_rma.layers.split.tensor import SplitTensor, checked_block

_ROUNDED = float, complex
_PLAIN = bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range, *_ROUNDED
_HOLDERS = (dict, list, set, tuple, frozenset, deque)
# Of longer lists, so many elements are entered; elements of longer arrays are not seen.
_MANY, _MANY_BYTES = 1000, 2**20
# Objects of these are not entered, code of the others neither.
_CLOSED = {"torch", "numpy", "distdl_rma", "mpi4py"}
# Those that draw, log and read files are large, and seldom in a step but by name.
_TOOLS = {"h5py", "lightning", "matplotlib", "pandas", "pytorch_lightning", "scipy", "tqdm", "wandb", "zarr"}
_LIBRARIES = _CLOSED.union(_TOOLS, sys.stdlib_module_names)
# Attributes of methods, properties and the like: functions, what they are called with, and tables.
_OF_PYTHON = {"builtins", "functools", "collections"}
_PARTS = ["__func__", "__self__", "__wrapped__", "fget", "fset", "func", "args", "keywords", "data"]
# They show another object, and have no name for it.
_VIEWS = (MappingProxyType, KeysView, ValuesView, ItemsView)
# Where these are in code, its texts may be names.
_BY_TEXT = {"getattr", "hasattr", "setattr", "delattr", "__setattr__", "vars", "__dict__", "globals"}
_CONSTRUCTORS = {"__init__", "__new__"}
# Methods that dataclasses and attrs write, which name all fields, and where they say that they stand.
_OF_ALL = {"__repr__", "__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__hash__"}
_WRITTEN = "<string>", "<attrs"
_ABSENT = object()
_of_tensor = attrgetter("requires_grad", "dtype", "shape")


class NotCapturedError(Exception):
    """Why a call cannot be captured."""


class OtherNumbersError(NotCapturedError):
    """A call raised, by its cause, while it was recorded on other numbers than the program's."""


def refuse(problem: str) -> None:
    """Raise ``NotCapturedError`` if there is a problem."""
    if problem:
        raise NotCapturedError(problem)


class Given:
    """Arguments of a call: the tensors, blocks in place of split ones, and what describes all of them.

    ``NotCapturedError`` if one of them is neither a tensor nor a plain value.
    """

    def __init__(self, arguments: Any, modes: Any) -> None:
        self._leaves, self._spec = flattened(arguments)
        self.tensors: list[torch.Tensor] = []
        # Attributes of split tensors need no rules.
        with torch._C.DisableTorchFunctionSubclass():
            self.facts = modes, self._spec, [*map(self._fact, self._leaves)]

    def rebuilt(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The arguments with other blocks, and other plain tensors."""
        others = iter(tensors)
        leaves = [split_like(x, next(others)) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return restored(leaves, self._spec)

    def _fact(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            if type(x) not in _PLAIN:
                raise NotCapturedError(f"an argument is of type {type(x).__name__}")
            # 1, 1.0 and True are equal.
            return type(x), repr(x) if type(x) in _ROUNDED else x
        split = isinstance(x, SplitTensor)
        block = checked_block(x) if isinstance(x, SplitTensor) else x
        if block.layout is not torch.strided or (not split and x.requires_grad and torch.is_grad_enabled()):
            what = "requires a gradient" if x.requires_grad else f"has the layout {block.layout}"
            raise NotCapturedError(f"a plain tensor among the arguments {what}")
        self.tensors.append(block)
        layout = (x._layout, x._strides) if isinstance(x, SplitTensor) else x.device
        return layout, *_of_tensor(block), block.stride(), block.storage_offset()


def flattened(arguments: Any) -> tuple[list[Any], Any]:
    """Leaves of ``(args, kwargs)``, and their form; the usual call, of tensors by place, in few calls."""
    args, kwargs = arguments
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return [*args], len(args)
    return tree_flatten(arguments)


def restored(leaves: list[Any], form: Any) -> Any:
    """The arguments, or a result, of which ``flattened`` gave the form; a form None is that of one leaf."""
    if form is None:
        return leaves[0]
    return (leaves, {}) if isinstance(form, int) else tree_unflatten(leaves, form)


def split_like(x: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """A block as part of a tensor that is split as ``x`` is; the block itself if ``x`` is plain."""
    if not isinstance(x, SplitTensor):
        return block
    found = SplitTensor(block, x._layout)
    found._strides = x._strides
    return found


class _Slots(Mapping[str, Any]):
    """Attributes of an object that are in slots, as a table."""

    def __init__(self, x: Any, names: list[str]) -> None:
        self._x, self._names = x, names

    def __getitem__(self, name: str) -> Any:
        if name not in [*self]:
            raise KeyError(name)
        return getattr(self._x, name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._names if hasattr(self._x, name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class _Space(NamedTuple):
    """Attributes of an object or a class, or variables of a Python module: of a table, the named ones."""

    path: str
    table: Any
    names: set[str]
    # Those that the walk has entered.
    found: list[str]
    # Whose attributes they are, if they are not set in the table.
    owner: Any

    def named(self) -> dict[str, Any]:
        # That code imports a module is no change that it makes.
        found = {name: self.table[name] for name in sorted(self.table.keys() & self.names)}
        return {name: x for name, x in found.items() if not isinstance(x, ModuleType)}

    def enter(self) -> list[str]:
        """Names that are to be entered now, and have not been."""
        wanted = self.table.keys() & self.names
        if isinstance(self.owner, type):
            called = {x for x, y in self.table.items() if x[:2] == "__" and hasattr(y, "__get__")}
            wanted = (wanted | called) - _CONSTRUCTORS
        new = sorted(wanted.difference(self.found))
        self.found.extend(new)
        return new

    def restore(self, before: dict[str, Any]) -> None:
        """Put ``named`` back."""
        owner, table = self.owner, self.table
        # Of a frozen object, too.
        of: Any = type if isinstance(owner, type) else object
        drop = table.__delitem__ if owner is None else partial(of.__delattr__, owner)
        put = table.__setitem__ if owner is None else partial(of.__setattr__, owner)
        for name in self.named().keys() - before.keys():
            drop(name)
        for each in before.items():
            put(*each)


class State:
    """What the calls of a step may branch on, or change, beside their arguments; read again in each call.

    It is found by a walk, in which each object is met once::

        module of torch           all its attributes
        list, dict, set, tuple    all in it
        function, method          variables that its code and code within it name: of closures, and globals;
                                  Python modules that it imports; what default values of arguments hold
        other module, its class,  hooks; those of its attributes that any code names which was found
        object, Python module
        class of an object        its methods that Python itself calls, such as ``__getitem__``; of a class
                                  that code names, its constructor

    Attributes lead to code, and code names more attributes: the walk goes on until there are no new ones.
    Objects of torch, numpy and this library are not entered, and no code of these, of Python, and of
    libraries that draw, log and read files. ``step`` is a function that calls the model, None for the model
    itself. Objects may raise any error while they are read.
    """

    def __init__(self, model: nn.Module, step: Callable[..., Any] | None = None) -> None:
        # What may change: where it is, a function that copies it, and one that puts a copy back.
        self._parts: list[tuple[str, Callable[[], Any], Callable[[Any], object]]] = []
        # Lists, dicts and sets; cells of closures; what has attributes.
        self._holders: list[Any] = []
        self._cells: list[Any] = []
        self._functions: list[FunctionType] = []
        self.modules: list[nn.Module] = []
        self._objects: list[Any] = []
        # Generators of random numbers of Python and numpy.
        self.generators: list[Any] = []
        self._met: dict[int, Any] = {}
        # Names in all code that was found.
        self._names = {"forward", "__getattr__", "dispatcher", "maps", *vars(nn.Module())}
        self._spaces: dict[tuple[int, bool], _Space] = {}
        self._all_spaces: list[_Space] = []
        self._arrays: list[Any] = []
        of_all: Any = (random, "_inst"), (np.random.mtrand, "_rand")
        for root in (model, step, *(getattr(*each) for each in of_all)):
            self._look("", root)
        # The list grows meanwhile.
        while sum(map(self._enter, self._all_spaces)):
            pass
        # Most of them, as of hooks, are empty.
        self._empty = [x for x in self._holders if not x]
        filled = [x for x in self._holders if x]
        self._contents = [part for x in filled for part in ((x, x.values()) if isinstance(x, dict) else (x,))]
        # Of variables also those that are not there, and may be later.
        found = [(x, x.found if x.names is self._names else sorted(x.names)) for x in self._all_spaces]
        self._entered = [(space.table.get, names) for space, names in found if names]
        # What is asked of objects. What may be assigned to a function anew: notebooks change code.
        of_functions = [*map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))]
        self._asked: list[Any] = [(each, self._functions) for each in of_functions]
        both = (type, self.modules), (type, self._objects), (vars, self._objects)
        self._asked += *both, (_content, self._cells), (np.ndarray.tobytes, self._arrays)
        self._tables = [x.table for x in self._all_spaces if x.names is self._names]
        self.then, self._keys = self.held(), [*map(tuple, self._tables)]
        self._first = [copied() for _, copied, _ in self._parts]
        # A loss may be a module beside the model, with parameters of the same names.
        inner = {child for module in self.modules for child in module.children()}
        outer = [module for module in self.modules if module not in inner]
        roots = [(f"{type(each).__name__} {at}" if at else "", each) for at, each in enumerate(outer)]
        parameters = [(name, x) for path, each in roots for name, x in each.named_parameters(path)]
        buffers = [(name, x) for path, each in roots for name, x in each.named_buffers(path)]
        held = [(n, x) for n, x in enumerate(self.then) if isinstance(x, torch.Tensor)]
        rest = [(f"an attribute ({n})", x._local if isinstance(x, SplitTensor) else x) for n, x in held]
        # Each tensor once, by its first name: parameters, buffers, and attributes that are neither.
        once = {x: name for name, x in reversed([*parameters, *buffers, *rest])}
        named = {name: x for x, name in reversed([*once.items()])}
        self.tensors = [*named.values()]
        # Parameters with gradients, in torch's order, and all other tensors, whose values calls may change.
        self.learnt = {once[x]: x for _, x in parameters if x.requires_grad}
        self.fixed = {name: x for name, x in named.items() if not x.requires_grad}
        self.facts = self.of_tensors()

    def _look(self, path: str, x: Any) -> None:
        if id(x) in self._met or type(x) in _PLAIN or isinstance(x, torch.Tensor):
            return
        self._met[id(x)] = x
        if isinstance(x, np.ndarray) and x.nbytes <= _MANY_BYTES:
            self._arrays.append(x)
            self._parts.append((path, x.copy, partial(np.copyto, x)))
        elif isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(x)
        elif isinstance(x, FunctionType):
            self._function(x)
        elif isinstance(x, (type, ModuleType)):
            self._named(path, x)
        elif isinstance(x, nn.Module) or not _is_of(_CLOSED, type(x)):
            self._object(path, x)

    def _object(self, path: str, x: Any) -> None:
        own, holds = _of_users(type(x).__mro__), isinstance(x, _HOLDERS)
        if holds:
            if not isinstance(x, (tuple, frozenset)):
                self._holders.append(x)
                self._parts.append((path, partial(_copied, x), partial(_refill, x)))
            for key, each in islice(x.items() if isinstance(x, dict) else enumerate(x), _MANY):
                self._look(f"{path}.{key}" if path else str(key), each)
                self._look(path, key)
        if isinstance(x, nn.Module):
            self.modules.append(x)
            # Code of torch reads attributes, and calls methods, that are of a class of users.
            of_torch: Any = next(each for each in type(x).__mro__ if _is_of(_CLOSED, each))
            self._names.update(of_torch.forward.__code__.co_names if own else ())
            (self._look if of_torch is not nn.Module else self._space)(path, vars(x))
        elif type(x).__dictoffset__ if own else hasattr(x, "__dict__") and not holds:
            self._objects.append(x)
            self._space(path, vars(x))
        slots = [n for each in own for n, y in vars(each).items() if isinstance(y, MemberDescriptorType)]
        if slots:
            self._space(path, _Slots(x, slots), x)
        for each in own:
            self._space("", vars(each), each)
        for each in _behind(x):
            self._look(path, each)

    def _named(self, path: str, x: Any) -> None:
        # A Python module or a class that code names, and may call.
        if isinstance(x, ModuleType) and not _is_of(_LIBRARIES, x):
            self._space(path, vars(x))
        for each in _of_users((*getattr(x, "__mro__", ()), *type(x).__mro__)):
            self._space("", vars(each), each)
            for name in sorted(_CONSTRUCTORS):
                self._look("", vars(each).get(name))

    def _function(self, function: FunctionType) -> None:
        # Functions that wrap others may say that they are of the file of these.
        name = str(function.__globals__.get("__name__")).partition(".")[0]
        if name in _LIBRARIES:
            cells = () if name in _CLOSED else map(_content, function.__closure__ or ())
            known = [x for x in cells if isinstance(x, (dict, FunctionType))]
            self._look("", (vars(function).get("__wrapped__"), *known))
            return
        if function.__name__ in _OF_ALL and function.__code__.co_filename.startswith(_WRITTEN):
            return
        self._functions.append(function)
        names, variables, imported = _named_by(function)
        self._names |= names
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._cells.append(cell)
            self._parts.append((name, partial(_content, cell), partial(_fill, cell)))
            # Where code calls super(): the class of a method, which is that of an object.
            self._look(name, _content(cell) if name != "__class__" else None)
        self._look("", (function.__defaults__, function.__kwdefaults__))
        self._space("", vars(function))
        self._space("", function.__globals__, names=variables)
        package = function.__globals__.get("__package__") or ""
        parents = "", *accumulate(package.split("."), "{}.{}".format)
        self._space("", sys.modules, names={f"{x}.{y}".strip(".") for x in parents for y in imported})

    def _space(self, path: str, table: Any, owner: Any = None, names: Any = None) -> None:
        # Variables of a Python module are named by the code in it; as its attributes, by any code.
        made = _Space(path, table, self._names if names is None else set(), [], owner)
        key = id(table if owner is None else owner), names is None
        if key not in self._spaces:
            self._spaces[key] = made
            self._all_spaces.append(made)
            self._parts.append((path, made.named, made.restore))
        self._spaces[key].names.update(names or ())

    def _enter(self, space: _Space) -> bool:
        new = space.enter()
        for name in new:
            self._look(f"{space.path}.{name}" if space.path else name, space.table[name])
        return bool(new)

    def held(self) -> list[Any]:
        """All that is held now."""
        found = [*chain.from_iterable(self._contents)]
        for get, names in self._entered:
            found += map(get, names, repeat(_ABSENT))
        return [*found, *chain.from_iterable(map(of, each) for of, each in self._asked)]

    def of_tensors(self) -> list[Any]:
        """What the tensors are now, but for their values."""
        return [*map(_of_tensor, self.tensors), *[x.stride() for x in self.tensors]]

    def is_unchanged(self) -> bool:
        """Whether the same is held as when this was made."""
        # An attribute that an object, or a class, did not have may hide one of a class.
        now, then, keys = self.held(), self.then, [*map(tuple, self._tables)]
        if any(self._empty) or len(now) != len(then) or keys != self._keys or self.of_tensors() != self.facts:
            return False
        return all(map(is_, now, then)) or all(map(alike, now, then))

    def changes(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """What is not as it was when this was made: names, and functions that put it back."""
        for (path, copied, put_back), old in zip(self._parts, self._first, strict=True):
            if (name := _first_change(copied(), old)) is not None:
                yield ".".join(part for part in (path, name) if part), partial(put_back, old)

    def restore(self) -> str:
        """Put all of it back; name the first attribute or variable that was another, empty if none was."""
        changes = [*self.changes()]
        for _, put_back in changes:
            put_back()
        # Of a root, whose keys have another order, there is no name.
        return changes[0][0] or "the order of attributes" if changes else ""


def _copied(x: Any) -> Any:
    # Not by a method that a class of users may have.
    return dict(x) if isinstance(x, dict) else {*x} if isinstance(x, set) else [*x]


def _refill(x: Any, before: Any) -> None:
    x.clear()
    x.extend(before) if isinstance(x, (list, deque)) else x.update(before)


def _fill(cell: Any, x: Any) -> None:
    cell.cell_contents = x
    if x is _ABSENT:
        del cell.cell_contents


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It is not assigned yet.
        return _ABSENT


def _behind(x: Any) -> list[Any]:
    # What a method, a property, a view and the like show. Not asked of all: a mock object has any attribute.
    found = gc.get_referents(x) if isinstance(x, _VIEWS) else [x()] if isinstance(x, ref) else []
    of_python = any(_is_of(_OF_PYTHON, each) for each in type(x).__mro__[:-1])
    return [*found, *[getattr(x, part, None) for part in _PARTS if of_python]]


def _is_of(packages: set[str], x: Any) -> bool:
    return str(x.__name__ if isinstance(x, ModuleType) else x.__module__).partition(".")[0] in packages


def _of_users(classes: Iterable[type]) -> list[type]:
    return [each for each in classes if not _is_of(_LIBRARIES, each)]


def _named_by(function: FunctionType) -> tuple[set[str], set[str], set[str]]:
    # All names in its code, and in functions in it; names of variables; names that it imports.
    codes = _codes(function.__code__)
    names = {*chain.from_iterable(code.co_names for code in codes)}
    used = [(x.opname, x.argval) for code in codes for x in get_instructions(code)]
    # Attributes may have names of variables that the code does not read.
    variables = {name for how, name in used if "GLOBAL" in how or how == "LOAD_NAME"}
    imported = {name for how, name in used if "IMPORT" in how}
    if _BY_TEXT & names or any(how == "MATCH_CLASS" for how, _ in used):
        given = chain.from_iterable(code.co_consts for code in codes)
        texts = [*chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in given)]
        variables.update(x for x in texts if "globals" in names and isinstance(x, str))
        texts += map(function.__globals__.get, [*variables])
        names.update(x for x in texts if isinstance(x, str))
    return names, variables, imported


def _codes(code: CodeType) -> list[CodeType]:
    # The code of a function, and of functions in it.
    return [code, *chain.from_iterable(_codes(x) for x in code.co_consts if isinstance(x, CodeType))]


def _first_change(now: Any, before: Any) -> str | None:
    # Key of the first other value, empty if there are no keys; None if nothing has changed.
    if isinstance(now, dict):
        if [*now] != [*before]:
            return str(next(iter({*now} ^ {*before}), ""))
        return next((str(key) for key in now if not alike(now[key], before[key])), None)
    if isinstance(now, list):
        same = len(now) == len(before) and all(map(alike, now, before))
    elif isinstance(now, np.ndarray):
        same = now.tobytes() == before.tobytes()
    else:
        same = now == before if isinstance(now, set) else alike(now, before)
    return None if same else ""


def is_plain(x: Any) -> bool:
    """Whether a value is compared by what it is, not by which object it is."""
    return type(x) in _PLAIN


def alike(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain ones."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, np.generic):
        return bool(one.tobytes() == other.tobytes())
    if type(one) is tuple:
        return len(one) == len(other) and all(map(alike, one, other))
    # By their texts: 0.0 and -0.0 are equal, and NaN equals nothing.
    return type(one) in _PLAIN and (repr(one) == repr(other) if type(one) in _ROUNDED else bool(one == other))
