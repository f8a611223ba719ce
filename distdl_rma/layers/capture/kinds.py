"""Kinds of calls: what a recording of a call holds for, and so what must be alike for it to be replayed.

A recording has no branches. All that its Python code may branch on has to be as it was::

    facts    of the arguments: layouts, shapes, strides and types of tensors, all other values;
             modes of torch; requires_grad, shape, strides and type of each parameter and buffer
    state    of the modules: the very objects that they have as attributes, in lists and dicts among these,
             and as hooks; numbers and texts may also be equal ones

Both are read in each call, by a few functions in C: ``state`` is one flat list. What a model reads elsewhere,
as a global variable or an attribute of an object that is no module, is not seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distdl_rma.layers.split.tensor import SplitTensor, checked_block

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.Size,
    slice,
    range,
)
_HOLDERS = (dict, list, set)
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
            return type(x), x
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


def hooks_of(module: nn.Module) -> list[Any]:
    """The user's hooks before and after the forward of a module."""
    hooks = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return [each for each in hooks if not str(each.__module__).startswith("distdl_rma.")]


class Variables:
    """What a function reads beside its arguments: of closures, globals that it names, and of its object."""

    def __init__(self, function: Any) -> None:
        inner = getattr(function, "__func__", function)
        if not hasattr(inner, "__code__"):
            raise NotCapturedError(f"{function!r} is no function or method")
        code, owner = inner.__code__, getattr(function, "__self__", None)
        self._cells = dict(zip(code.co_freevars, inner.__closure__ or (), strict=True))
        tables = inner.__globals__, {} if owner is None or isinstance(owner, nn.Module) else vars(owner)
        self._tables = [(table, [name for name in code.co_names if name in table]) for table in tables]
        self.owner = {"self": owner} if isinstance(owner, nn.Module) else {}

    def read(self) -> dict[str, Any]:
        """All of them, now."""
        found = {name: cell.cell_contents for name, cell in self._cells.items()}
        for table, names in self._tables:
            found.update((name, table[name]) for name in names)
        return found | self.owner

    def write(self, values: dict[str, Any]) -> None:
        """Set those that have other values."""
        for name, cell in self._cells.items():
            cell.cell_contents = values[name]
        for table, names in self._tables:
            table.update((name, values[name]) for name in names)


class State:
    """What the modules of a step hold, in their own lists and dicts, which are read again in each call.

    ``step`` is a function that calls the model, None for the model itself.
    """

    def __init__(self, model: nn.Module, step: Callable[..., Any] | None = None) -> None:
        self.holders: list[Any] = []
        self.paths: list[str] = []
        self.modules: list[nn.Module] = []
        self._variables = [Variables(each) for each in ([] if step is None else [step])]
        self._variables += [Variables(hook) for part in model.modules() for hook in hooks_of(part)]
        roots: dict[str, Any] = {"": model}
        for each in self._variables:
            roots |= each.read()
        for name, root in roots.items():
            self._look(name, root)
        self._contents = [each.values() if isinstance(each, dict) else each for each in self.holders]
        self.then = self.held()
        parts = [(name, root) for name, root in roots.items() if isinstance(root, nn.Module)]
        learnt = [each for name, root in parts for each in root.named_parameters(name)]
        buffers = [each for name, root in parts for each in root.named_buffers(name)]
        others = [(f"an attribute ({n})", x) for n, x in enumerate(self.then) if isinstance(x, torch.Tensor)]
        # Each tensor once, by its first name: parameters, buffers, and attributes that are neither.
        once = {x: name for name, x in reversed([*learnt, *buffers, *others])}
        named = {name: x for x, name in reversed([*once.items()])}
        self.tensors = [*named.values()]
        # Parameters with gradients, in torch's order, and all other tensors, whose values calls may change.
        self.learnt = {
            name: x for name, x in named.items() if x.requires_grad and isinstance(x, nn.Parameter)
        }
        self.fixed = {name: x for name, x in named.items() if not x.requires_grad}
        self.facts = self.of_tensors()

    def _look(self, name: str, root: Any) -> None:
        # Modules, and what they hold; each once.
        for path, module in root.named_modules(prefix=name) if isinstance(root, nn.Module) else ():
            if module not in self.modules:
                self.modules.append(module)
                self._hold(path, own := vars(module))
                for key, each in own.items():
                    self._hold(f"{path}.{key}" if path else key, each)
        self._hold(name, root)

    def _hold(self, path: str, x: Any) -> None:
        if type(x) in _HOLDERS or isinstance(x, dict):
            self.holders.append(x)
            self.paths.append(path)

    def held(self) -> list[Any]:
        """All that the modules hold now."""
        found = [*chain.from_iterable(self._contents)]
        for each in self._variables:
            found += each.read().values()
        return found

    def of_tensors(self) -> list[Any]:
        """What the tensors are now, but for their values."""
        return [*map(_of_tensor, self.tensors), *[x.stride() for x in self.tensors]]

    def is_unchanged(self) -> bool:
        """Whether the modules hold the same as when this was made."""
        now, then = self.held(), self.then
        if len(now) != len(then) or self.of_tensors() != self.facts:
            return False
        return all(map(is_, now, then)) or all(map(_alike, now, then))

    def copy(self) -> list[Any]:
        """The contents of all lists and dicts, and the variables, for ``restore``."""
        return [*[each.copy() for each in self.holders], *[each.read() for each in self._variables]]

    def restore(self, before: list[Any]) -> str:
        """Put contents back; name the first attribute or variable that had other ones, empty if none had."""
        changed, count = "", len(self.holders)
        for path, each, old in zip(self.paths, self.holders, before[:count], strict=True):
            name = _first_change(each, old)
            if name is not None:
                changed = changed or ".".join(part for part in (path, name) if part)
                each.clear()
                each.extend(old) if isinstance(each, list) else each.update(old)
        for variables, old in zip(self._variables, before[count:], strict=True):
            changed = changed or _first_change(variables.read(), old) or ""
            variables.write(old)
        return changed


def _first_change(now: Any, before: Any) -> str | None:
    # Key of the first other value, empty if there are no keys; None if nothing has changed.
    if not isinstance(now, dict):
        return None if len(now) == len(before) and all(map(_alike, now, before)) else ""
    return next((str(key) for key in {**now, **before} if not _alike(now.get(key), before.get(key))), None)


def is_plain(x: Any) -> bool:
    """Whether a value is compared by what it is, not by which object it is."""
    return type(x) in _PLAIN


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))
