"""Kinds of calls: what a recording of a call holds for, and so what must be alike for it to be replayed.

A recording has no branches. All that its Python code may branch on has to be as it was::

    facts    of the arguments: layouts, shapes, strides and types of tensors, all other values;
             modes of torch; requires_grad, shape, strides and type of each parameter and buffer
    state    the very objects that modules and functions hold and name (``State``); numbers and texts may
             also be equal ones

Both are read in each call, by a few functions in C: ``state`` is one flat list.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter, is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distdl_rma.layers.split.tensor import SplitTensor, checked_block

_ROUNDED = float, complex
_PLAIN = bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice, range, *_ROUNDED
_HOLDERS = (dict, list, set, tuple)
_UNSEEN = torch.Tensor, type, ModuleType
# Of longer lists, so many elements are entered.
_MANY = 1000
_LIBRARIES = {"torch", "numpy", "distdl_rma", "mpi4py", *sys.stdlib_module_names}
_of_tensor = attrgetter("requires_grad", "dtype", "shape")
# What may be assigned to a function anew, as notebooks do with changed code.
_OF_FUNCTION = [*map(attrgetter, ("__code__", "__defaults__", "__kwdefaults__"))]


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


class State:
    """What the calls of a step may branch on, or change, beside their arguments; read again in each call.

    It is found by a walk, in which each object is met once::

        module                    its attributes, its hooks, and its forward unless that is torch's
        list, dict, set, tuple    all in it
        function, method          the variables that its code and code within it name: of closures, globals,
                                  attributes of its object and of classes of that
        other object              those of its attributes that the function names which led to it

    Objects of torch, numpy and this library are not entered. ``step`` is a function that calls the model,
    None for the model itself.
    """

    def __init__(self, model: nn.Module, step: Callable[..., Any] | None = None) -> None:
        # Lists, dicts and sets, with their places; tables of variables, and which of them; cells of closures.
        self.holders: list[Any] = []
        self.paths: list[str] = []
        self._tables: list[tuple[Any, list[str]]] = []
        self._cells: list[tuple[str, Any]] = []
        self._functions: list[FunctionType] = []
        self.modules: list[nn.Module] = []
        # Generators of random numbers of Python and numpy.
        self.generators: list[Any] = []
        self._met: dict[int, Any] = {}
        of_all: Any = (random, "_inst"), (np.random.mtrand, "_rand")
        for root in (model, step, *(getattr(*each) for each in of_all)):
            self._look("", root, frozenset())
        # Most of them, as of hooks, are empty.
        self._empty = [x for x in self.holders if not x]
        filled = [x for x in self.holders if x]
        self._contents = [part for x in filled for part in ((x, x.values()) if _is_dict(x) else (x,))]
        self.then = self.held()
        # A loss may be a module beside the model, with parameters of the same names.
        inner = {child for module in self.modules for child in module.children()}
        outer = [module for module in self.modules if module not in inner]
        roots = [(f"{type(each).__name__} {at}" if at else "", each) for at, each in enumerate(outer)]
        parameters = [(name, x) for path, each in roots for name, x in each.named_parameters(path)]
        buffers = [(name, x) for path, each in roots for name, x in each.named_buffers(path)]
        others = [(f"an attribute ({n})", x) for n, x in enumerate(self.then) if isinstance(x, torch.Tensor)]
        # Each tensor once, by its first name: parameters, buffers, and attributes that are neither.
        once = {x: name for name, x in reversed([*parameters, *buffers, *others])}
        named = {name: x for x, name in reversed([*once.items()])}
        self.tensors = [*named.values()]
        # Parameters with gradients, in torch's order, and all other tensors, whose values calls may change.
        self.learnt = {once[x]: x for _, x in parameters if x.requires_grad}
        self.fixed = {name: x for name, x in named.items() if not x.requires_grad}
        self.facts = self.of_tensors()

    def _look(self, path: str, x: Any, names: frozenset[str]) -> None:
        if id(x) in self._met or type(x) in _PLAIN or isinstance(x, _UNSEEN):
            return
        self._met[id(x)] = x
        if isinstance(x, (random.Random, np.random.Generator, np.random.RandomState)):
            self.generators.append(x)
        elif isinstance(x, nn.Module):
            self.modules.append(x)
            self._look(path, vars(x), names)
            self._look(path, x.forward, names)
        elif type(x) in _HOLDERS or _is_dict(x):
            if not isinstance(x, tuple):
                self.holders.append(x)
                self.paths.append(path)
            for key, each in [*x.items()] if _is_dict(x) else [*enumerate(x)][:_MANY]:
                self._look(f"{path}.{key}" if path else str(key), each, names)
        elif isinstance(x, (FunctionType, MethodType)):
            self._function(x)
        elif isinstance(x, partial):
            self._look(path, (x.func, x.args, x.keywords), names)
        elif not _is_of_library(type(x)):
            self._object(path, x, names)

    def _object(self, path: str, x: Any, names: frozenset[str]) -> None:
        for called in (vars(each).get("__call__") for each in type(x).__mro__):
            if isinstance(called, FunctionType):
                names = names | _names_in(called.__code__)
                self._function(MethodType(called, x))
        if not hasattr(x, "__dict__"):
            raise NotCapturedError(f"{path} is of type {type(x).__name__}, whose attributes are not seen")
        self._table(path, vars(x), names, names)

    def _function(self, function: Any) -> None:
        inner, owner = getattr(function, "__func__", function), getattr(function, "__self__", None)
        # Methods of modules read no tables of their object: once for all modules of a class.
        of_class = isinstance(owner, nn.Module) and id(inner) in self._met
        if not isinstance(inner, FunctionType) or _is_of_library(inner) or of_class:
            return
        self._met[id(inner)] = inner
        self._functions.append(inner)
        names = _names_in(inner.__code__)
        for name, cell in zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True):
            self._cells.append((name, cell))
            self._look(name, _content(cell), names)
        self._look("", (inner.__defaults__, inner.__kwdefaults__), names)
        self._table("", inner.__globals__, names, names)
        classes = [] if owner is None else type(owner).__mro__
        for each in classes:
            if not _is_of_library(each):
                self._table("", vars(each), names, names)
                for method in (x for name, x in vars(each).items() if name in names):
                    if isinstance(method, FunctionType):
                        self._look("", MethodType(method, owner), names)
        if owner is not None and not isinstance(owner, nn.Module):
            self._table("", getattr(owner, "__dict__", {}), names, names)

    def _table(self, path: str, table: Any, wanted: frozenset[str], names: frozenset[str]) -> None:
        found = [name for name in sorted(wanted) if name in table]
        if found:
            self._tables.append((table, found))
        for name in found:
            # Functions of a class are met as methods.
            if isinstance(table, dict) or not isinstance(table[name], FunctionType):
                self._look(f"{path}.{name}" if path else name, table[name], names)

    def held(self) -> list[Any]:
        """All that is held now."""
        found = [*chain.from_iterable(self._contents)]
        for table, names in self._tables:
            found += [table.get(name, _ABSENT) for name in names]
        for of_each in _OF_FUNCTION:
            found += map(of_each, self._functions)
        return found + [_content(cell) for _, cell in self._cells]

    def of_tensors(self) -> list[Any]:
        """What the tensors are now, but for their values."""
        return [*map(_of_tensor, self.tensors), *[x.stride() for x in self.tensors]]

    def is_unchanged(self) -> bool:
        """Whether the same is held as when this was made."""
        now, then = self.held(), self.then
        if any(self._empty) or len(now) != len(then) or self.of_tensors() != self.facts:
            return False
        return all(map(is_, now, then)) or all(map(alike, now, then))

    def copy(self) -> list[Any]:
        """All of it, for ``restore``."""
        tables = [{name: table[name] for name in names if name in table} for table, names in self._tables]
        return [*[each.copy() for each in self.holders], *tables, [_content(cell) for _, cell in self._cells]]

    def restore(self, before: list[Any]) -> str:
        """Put it back; name the first attribute or variable that was another, empty if none was."""
        changed, (*contents, cells) = "", before
        held = zip(self.paths, self.holders, contents, strict=False)
        tables = zip(self._tables, contents[len(self.holders) :], strict=True)
        for path, each, old in held:
            if (name := _first_change(each, old)) is not None:
                changed = changed or ".".join(part for part in (path, name) if part)
                each.clear()
                each.extend(old) if isinstance(each, list) else each.update(old)
        for (table, names), old in tables:
            if name := _first_change({key: table[key] for key in names if key in table}, old):
                changed = changed or name
                if isinstance(table, dict):
                    table.update(old)
        for (name, cell), old in zip(self._cells, cells, strict=True):
            if not alike(_content(cell), old):
                changed = changed or name
                cell.cell_contents = old
        return changed


_ABSENT = object()


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        # It is not assigned yet.
        return _ABSENT


def _is_of_library(x: Any) -> bool:
    return str(x.__module__).partition(".")[0] in _LIBRARIES


def _is_dict(x: Any) -> bool:
    return isinstance(x, dict)


def _names_in(code: CodeType) -> frozenset[str]:
    # Names in the code of a function, and of functions in it.
    inner = [_names_in(each) for each in code.co_consts if isinstance(each, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _first_change(now: Any, before: Any) -> str | None:
    # Key of the first other value, empty if there are no keys; None if nothing has changed.
    if not isinstance(now, dict):
        return None if len(now) == len(before) and all(map(alike, now, before)) else ""
    if [*now] != [*before]:
        return str(next(iter({*now} ^ {*before}), ""))
    return next((str(key) for key in now if not alike(now[key], before[key])), None)


def is_plain(x: Any) -> bool:
    """Whether a value is compared by what it is, not by which object it is."""
    return type(x) in _PLAIN


def alike(one: Any, other: Any) -> bool:
    """Whether two values are one object, or equal plain ones."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(alike, one, other))
    # By their texts: 0.0 and -0.0 are equal, and NaN equals nothing.
    return type(one) in _PLAIN and (repr(one) == repr(other) if type(one) in _ROUNDED else bool(one == other))
