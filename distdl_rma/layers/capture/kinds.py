"""Kinds of calls: what a recording of a call holds for, and so what must be alike for it to be replayed.

A recording has no branches. All that a model's Python code may branch on has to be as it was::

    facts    of the arguments: layouts, shapes, strides and types of tensors, all other values;
             modes of torch; requires_grad, shape, strides and type of each parameter and buffer
    state    of the modules: the very objects that they have as attributes, in lists and dicts among these,
             and as hooks; numbers and texts may also be equal ones

Both are read in each call, by a few functions in C: ``state`` is one flat list. What a model reads elsewhere,
as a global variable or an attribute of an object that is no module, is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable
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


class Given:
    """Arguments of a call: the tensors, blocks in place of split ones, and what describes all of them.

    ``NotCapturedError`` if one of them is neither a tensor nor a plain value.
    """

    def __init__(self, arguments: Any, modes: Any) -> None:
        self._leaves, self._spec = tree_flatten(arguments)
        self.tensors: list[torch.Tensor] = []
        self.facts = modes, self._spec, [*map(self._fact, self._leaves)]

    def rebuilt(self, tensors: Iterable[torch.Tensor]) -> Any:
        """The arguments with other blocks, and other plain tensors."""
        others = iter(tensors)
        leaves = [split_like(x, next(others)) if isinstance(x, torch.Tensor) else x for x in self._leaves]
        return tree_unflatten(leaves, self._spec)

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


def split_like(x: torch.Tensor, block: torch.Tensor) -> torch.Tensor:
    """A block as part of a tensor that is split as ``x`` is; the block itself if ``x`` is plain."""
    if not isinstance(x, SplitTensor):
        return block
    found = SplitTensor(block, x._layout)
    found._strides = x._strides
    return found


class State:
    """What the modules of a model hold, in its own lists and dicts, which are read again in each call."""

    def __init__(self, model: nn.Module) -> None:
        self.holders: list[Any] = []
        self.paths: list[str] = []
        for path, module in model.named_modules():
            own = vars(module)
            inner = [
                (each, name) for name, each in own.items() if type(each) in _HOLDERS or isinstance(each, dict)
            ]
            for each, name in [(own, ""), *inner]:
                self.holders.append(each)
                self.paths.append(".".join(part for part in (path, name) if part))
        self.then = self.held()
        named = {f"an attribute ({at})": x for at, x in enumerate(self.then) if isinstance(x, torch.Tensor)}
        named = dict(chain(model.named_parameters(), model.named_buffers(), named.items()))
        # Each tensor once: parameters, buffers, and attributes that are neither.
        named = {name: x for x, name in {x: name for name, x in reversed([*named.items()])}.items()}
        self.tensors = [*named.values()]
        # Parameters with gradients, in torch's order, and all other tensors, whose values calls may change.
        learnt = [(name, x) for name, x in model.named_parameters() if x.requires_grad]
        self.names: list[str] = [name for name, _ in learnt]
        self.learnt: list[torch.Tensor] = [x for _, x in learnt]
        self.fixed = {name: x for name, x in named.items() if not x.requires_grad}
        self.facts = self.of_tensors()

    def held(self) -> list[Any]:
        """All that the modules hold now."""
        found: list[Any] = []
        for each in self.holders:
            found += each.values() if isinstance(each, dict) else each
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
        """The contents of all lists and dicts, for ``restore``."""
        return [each.copy() for each in self.holders]

    def restore(self, before: list[Any]) -> str:
        """Put contents back; name the first attribute that had other ones, empty if none had."""
        changed = ""
        for path, each, old in zip(self.paths, self.holders, before, strict=True):
            now = each.values() if isinstance(each, dict) else each
            then = old.values() if isinstance(each, dict) else old
            if len(now) == len(then) and all(map(_alike, now, then)):
                continue
            names = (
                [name for name, x in each.items() if not _alike(x, old.get(name))]
                if isinstance(each, dict)
                else []
            )
            changed = changed or ".".join(str(part) for part in (path, *names[:1]) if part)
            each.clear()
            each.extend(old) if isinstance(each, list) else each.update(old)
        return changed


def is_plain(x: Any) -> bool:
    """Whether a value is compared by what it is, not by which object it is."""
    return type(x) in _PLAIN


def _alike(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))
