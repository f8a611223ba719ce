"""The objects of a state: how models, optimizers and others describe their state, and load it."""

from __future__ import annotations

import base64
import copy
import random
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.checkpoints.form import checked, decode, dtype_name, encode, in_line, tensors_in
from distdl_rma.checkpoints.items import Item, Kind, Part
from distdl_rma.errors import (
    CheckpointError,
    ConfigurationError,
    MismatchError,
    PartitionError,
    ShapeError,
    UnsupportedError,
)
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition

# Decompositions of the tensors of a module's state that are not whole on every rank, by key.
Cuts = Callable[[nn.Module], dict[str, Decomposition]]
_MODULE, _OPTIMIZER, _OBJECT, _TENSOR, _VALUE = "module", "optimizer", "object", "tensor", "value"
_NAMES = {_OBJECT: "an object with state_dict()", _VALUE: "a plain value"}
# Forms of the state of all objects, by entry.
Forms = dict[str, Any]


def kind_of(thing: Any) -> str:
    """Kind of an object of a state."""
    if isinstance(thing, nn.Module):
        return _MODULE
    if isinstance(thing, torch.optim.Optimizer):
        return _OPTIMIZER
    if isinstance(thing, torch.Tensor):
        return _TENSOR
    return _OBJECT if hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") else _VALUE


def _entries(state: Mapping[str, Any]) -> ItemsView[str, Any]:
    if not isinstance(state, Mapping):
        raise ConfigurationError(
            f"checkpoint: a state is a dict such as {{'model': model}}, got a {type(state).__name__!r}"
        )
    return state.items()


def main_model(state: Mapping[str, Any]) -> str | None:
    """Entry whose tensors have the keys of the model itself: ``model``, or the first module."""
    modules = [entry for entry, thing in _entries(state) if isinstance(thing, nn.Module)]
    return "model" if "model" in modules else next(iter(modules), None)


class Objects:
    """The objects of a state on this rank; local.

    ``forms`` describes them, and fills ``tensors`` with this rank's blocks, ``kinds`` with dtypes and global
    shapes, and ``layouts`` with the decompositions of those that are cut; all by the item's name.
    """

    def __init__(self, state: MutableMapping[str, Any], main: str | None, cuts: Cuts) -> None:
        self.state, self._main = state, main
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, Kind] = {}
        self.layouts: dict[str, Decomposition] = {}
        self._names: dict[int, str] = {}
        for entry, module in _entries(state):
            if not isinstance(entry, str):
                raise UnsupportedError(f"checkpoint: names of the state are strings, got {entry!r}")
            if isinstance(module, nn.Module):
                prefix = self._prefix(entry)
                self.layouts |= {prefix + key: blocks for key, blocks in cuts(module).items()}
                for key, parameter in module.named_parameters():
                    self._names.setdefault(id(parameter), prefix + key)
            elif hasattr(module, "decomposition"):
                self.layouts[f"{entry}/value"] = module.decomposition

    def _prefix(self, entry: str) -> str:
        return "" if entry == self._main else f"{entry}/"

    def forms(self) -> Forms:
        """Forms of all objects."""
        return {entry: self._form(entry, thing) for entry, thing in self.state.items()}

    def _form(self, entry: str, thing: Any) -> Any:
        kind = kind_of(thing)
        if kind == _OPTIMIZER:
            return {"kind": kind} | self._optimizer(entry, thing)
        if kind == _MODULE:
            prefix = self._prefix(entry)
            held = {key: encode(value, prefix + key, self._take) for key, value in thing.state_dict().items()}
            return {"kind": kind, "state": held}
        value = thing.state_dict() if kind == _OBJECT else thing
        if kind == _TENSOR:
            return {"kind": kind, "state": self._take(f"{entry}/value", checked(entry, value))}
        return {"kind": kind, "state": encode(value, entry, self._take_or_write)}

    def _take(self, name: str, tensor: torch.Tensor) -> Any:
        layout = self.layouts.get(name)
        if layout is None and hasattr(tensor, "decomposition"):
            raise UnsupportedError(
                f"checkpoint: {name!r} is a split tensor within other values; put it into the state itself"
            )
        block = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if name in self.kinds:
            raise UnsupportedError(f"checkpoint: two tensors of the state are called {name!r}; rename one")
        self.tensors[name] = block.detach()
        self.kinds[name] = dtype_name(block.dtype), tuple(tensor.shape if layout is None else layout.shape)
        return {"tensor": name}

    def _take_or_write(self, name: str, tensor: torch.Tensor) -> Any:
        # Steps of optimizers and the like: one number, whose holders need no layout.
        single = tensor.dim() == 0 and not tensor.dtype.is_complex and not hasattr(tensor, "decomposition")
        return in_line(tensor) if single else self._take(name, tensor)

    def _named(self, entry: str, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        # Names of the parameters of each group.
        groups = [[self._names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if any("" in group for group in groups):
            raise PartitionError(
                f"checkpoint: {entry!r} has a parameter of no model in the state; put the model there too"
            )
        return groups

    def _optimizer(self, entry: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        named, packed = self._named(entry, optimizer), optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for group in named for name in group]
        groups = [
            {
                "names": some,
                "options": encode(
                    {key: value for key, value in group.items() if key != "params"},
                    f"{entry}/group {number}",
                    self._take_or_write,
                ),
            }
            for number, (some, group) in enumerate(zip(named, packed["param_groups"], strict=True))
        ]
        states: dict[str, Any] = {}
        self._check_cut(entry, optimizer, packed["state"], names)
        for number, values in packed["state"].items():
            if not isinstance(number, int):
                raise UnsupportedError(f"checkpoint: {entry!r} has state of no parameter: {number!r}")
            name, parameter = names[number], parameters[number]
            layout = self.layouts.get(name)
            if layout is not None and not parameter.numel():
                # This rank has nothing of the parameter, and may have no state, or another number of steps.
                continue
            for key, value in values.items():
                if layout is not None and isinstance(value, torch.Tensor) and value.dim():
                    if value.shape != parameter.shape:
                        raise UnsupportedError(
                            f"checkpoint: {key!r} of {name!r} in {entry!r} has shape {tuple(value.shape)},"
                            f" the block of the parameter {tuple(parameter.shape)}: it cannot be put together"
                        )
                    self.layouts[f"{entry}/{name}/{key}"] = layout
            states[name] = encode(values, f"{entry}/{name}", self._take_or_write)
        return {"class": type(optimizer).__name__, "groups": groups, "state": states}

    def _check_cut(
        self, entry: str, optimizer: torch.optim.Optimizer, states: object, names: Iterable[str]
    ) -> None:
        cut = next((name for name in names if name in self.layouts), None)
        if states and cut is not None and isinstance(optimizer, torch.optim.LBFGS):
            raise UnsupportedError(
                f"checkpoint: {entry!r} is an LBFGS, whose state is one vector of all parameters, but"
                f" {cut!r} is cut over ranks"
            )

    def wanted(self, forms: Forms, kinds: Mapping[str, Kind]) -> set[str]:
        """Items that these objects take; adds the layouts of optimizers' tensors.

        Raises if the saved state does not fit: entries, keys, shapes, dtypes and parameters are named.
        """
        found: set[str] = set()
        for entry, thing in self.state.items():
            form, kind = forms.get(entry), kind_of(thing)
            if form is None:
                raise CheckpointError(f"checkpoint: it has no {entry!r}, only {sorted(forms)}")
            if form["kind"] != kind and {form["kind"], kind} != {_TENSOR, _VALUE}:
                saved, here = (_NAMES.get(each, f"a {each}") for each in (form["kind"], kind))
                raise CheckpointError(f"checkpoint: {entry!r} is {saved} in it, and {here} here")
            found.update(tensors_in(form))
            if kind == _MODULE:
                self._check_module(entry, thing, form["state"], kinds)
            elif kind == _OPTIMIZER:
                self._check_optimizer(entry, thing, form, kinds)
            elif kind == _TENSOR and form["kind"] == _TENSOR:
                self._form(entry, thing)
                _check_kind(entry, self.kinds[f"{entry}/value"], kinds[f"{entry}/value"])
        return found

    def _check_module(
        self, entry: str, module: nn.Module, held: dict[str, Any], kinds: Mapping[str, Kind]
    ) -> None:
        mine = self._form(entry, module)["state"]
        _check_names(f"the model {entry!r}", held, mine)
        for key, form in mine.items():
            for name in tensors_in(form):
                if name in kinds:
                    _check_kind(f"{entry}: {key}", self.kinds[name], kinds[name])

    def _check_optimizer(
        self, entry: str, optimizer: torch.optim.Optimizer, form: dict[str, Any], kinds: Mapping[str, Kind]
    ) -> None:
        if form["class"] != type(optimizer).__name__:
            raise CheckpointError(
                f"checkpoint: {entry!r} is {form['class']} in it, and {type(optimizer).__name__} here"
            )
        named, saved = self._named(entry, optimizer), [group["names"] for group in form["groups"]]
        if len(named) != len(saved):
            raise CheckpointError(f"checkpoint: {entry!r} has {len(saved)} groups in it, {len(named)} here")
        for number, (theirs, mine) in enumerate(zip(saved, named, strict=True)):
            _check_names(f"group {number} of {entry!r}", theirs, mine)
        if isinstance(optimizer, torch.optim.LBFGS) and named != saved:
            raise CheckpointError(f"checkpoint: {entry!r} (LBFGS) has its parameters in another order")
        self._check_cut(entry, optimizer, form["state"], (name for group in named for name in group))
        for name, values in form["state"].items():
            layout = self.layouts.get(name)
            if layout is None:
                continue
            for item in tensors_in(values):
                if kinds[item][1] != layout.shape:
                    raise UnsupportedError(
                        f"checkpoint: {item!r} has shape {kinds[item][1]}, its parameter {layout.shape}: it"
                        " cannot be cut as the parameter is"
                    )
        self.lay_out({entry: form})

    def lay_out(self, forms: Forms) -> None:
        """Set the layouts of optimizers' tensors that are cut as their parameters are."""
        for form in forms.values():
            for name, values in form["state"].items() if form["kind"] == _OPTIMIZER else ():
                if name in self.layouts:
                    self.layouts |= dict.fromkeys(tensors_in(values), self.layouts[name])

    def part(self, item: Item) -> Part:
        """This rank's part of an item."""
        layout = self.layouts.get(item.name)
        return Part(item, Box.of_shape(item.shape) if layout is None else layout.box(layout.partition.me))

    def blank(self, item: Item) -> torch.Tensor:
        """Memory for this rank's block of an item."""
        layout = self.layouts.get(item.name)
        idle = layout is not None and not layout.partition.active
        return torch.empty((0,) if idle else self.part(item).box.shape, dtype=item.dtype)

    def in_place(self) -> dict[str, torch.Tensor | None]:
        """Items of models that are whole on all ranks, and the tensors that take them; call ``wanted`` first.

        The names are alike on all ranks. None for a tensor that cannot be filled in place, such as one with
        two names or with gaps in its memory.
        """
        found: dict[str, torch.Tensor | None] = {}
        for entry, module in self.state.items():
            if not isinstance(module, nn.Module):
                continue
            prefix = self._prefix(entry)
            own: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
            own |= dict(module.named_parameters(remove_duplicate=False))
            names = {key: prefix + key for key in own if prefix + key in self.tensors}
            shared = Counter(own[key].untyped_storage()._cdata for key in names)
            for key, name in names.items():
                x, saved = own[key], self.tensors[name]
                same = x.data_ptr() == saved.data_ptr() and x.shape == saved.shape
                plain = x.is_contiguous() and not x.is_conj() and not x.is_neg()
                if name not in self.layouts:
                    alone = shared[x.untyped_storage()._cdata] == 1
                    found[name] = x if same and plain and alone else None
        return found

    def load(
        self,
        forms: Forms,
        tensors: dict[str, torch.Tensor],
        step: Callable[[], AbstractContextManager[Any]] = nullcontext,
        fill: Callable[[], object] = lambda: None,
    ) -> None:
        """Load everything; if an object refuses its state, all objects are as before.

        ``wanted`` has checked models, optimizers, tensors and values. Each step is within a context of its
        own, which may raise the error of another rank. ``fill`` fills the tensors of ``in_place``, which no
        object that may refuse has.
        """
        objects = {entry: thing for entry, thing in self.state.items() if kind_of(thing) == _OBJECT}
        before = dict[str, Any]()
        try:
            with step():
                before |= {entry: copy.deepcopy(thing.state_dict()) for entry, thing in objects.items()}
                for entry, thing in objects.items():
                    thing.load_state_dict(decode(forms[entry]["state"], tensors.__getitem__))
        except Exception:
            with step():
                for entry, found in before.items():
                    objects[entry].load_state_dict(found)
            raise
        fill()
        with step():
            self._load_others(forms, tensors)

    def _load_others(self, forms: Forms, tensors: dict[str, torch.Tensor]) -> None:
        # Models, optimizers, tensors and plain values.
        give = tensors.__getitem__
        for entry, thing in list(self.state.items()):
            form, kind = forms[entry], kind_of(thing)
            if kind == _MODULE:
                thing.load_state_dict({key: decode(part, give) for key, part in form["state"].items()})
            elif kind == _OPTIMIZER:
                self._load_optimizer(entry, thing, form, tensors)
            elif kind == _TENSOR and form["kind"] == _TENSOR:
                with torch.no_grad():
                    (thing.to_local() if hasattr(thing, "to_local") else thing).copy_(
                        decode(form["state"], give)
                    )
            elif kind != _OBJECT:
                self.state[entry] = decode(form["state"], give)

    def _load_optimizer(
        self,
        entry: str,
        optimizer: torch.optim.Optimizer,
        form: dict[str, Any],
        tensors: dict[str, torch.Tensor],
    ) -> None:
        named = self._named(entry, optimizer)
        numbers = {name: at for at, name in enumerate(name for group in named for name in group)}
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        states = {
            numbers[name]: decode(values, tensors.__getitem__) for name, values in form["state"].items()
        }
        groups = [
            decode(group["options"], tensors.__getitem__) | {"params": [numbers[name] for name in names]}
            for group, names in zip(form["groups"], named, strict=True)
        ]
        optimizer.load_state_dict({"state": states, "param_groups": groups})
        for number, values in states.items():
            held = optimizer.state[parameters[number]]
            for key, value in values.items():
                # torch rounds the state to the type of the parameter.
                if isinstance(value, torch.Tensor) and value.dtype != held[key].dtype:
                    held[key] = value


def _check_kind(name: str, mine: Kind, saved: Kind) -> None:
    if mine != saved:
        raise ShapeError(
            f"checkpoint: {name!r} is {saved[0]} of shape {saved[1]} in it, and {mine[0]} of shape {mine[1]}"
            " here: it is of another model"
        )


def _check_names(whose: str, saved: Iterable[str], mine: Iterable[str]) -> None:
    saved, mine = dict.fromkeys(saved), dict.fromkeys(mine)
    missing, spare = [n for n in mine if n not in saved], [n for n in saved if n not in mine]
    if missing or spare:
        raise CheckpointError(
            f"checkpoint: it is not of {whose}: it lacks {_few(missing)}, and has {_few(spare)} besides"
        )


def _few(names: list[str]) -> str:
    return (
        ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"
    )


def merged(reported: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What all ranks report, as one: ``forms`` and ``kinds``, alike on all of them but for optimizers.

    A rank reports no state of a parameter if it holds nothing of the parameter. ``MismatchError`` names
    the entry that differs.
    """
    (rank, first), *others = reported.items()
    for other, theirs in others:
        if theirs == first:
            continue
        for name, kind in theirs["kinds"].items():
            if first["kinds"].setdefault(name, kind) != kind:
                raise MismatchError(
                    f"checkpoint: {name!r} is {first['kinds'][name]} on rank {rank}, {kind} on rank {other}"
                )
        for entry in dict.fromkeys((*first["forms"], *theirs["forms"])):
            mine, its = first["forms"].get(entry), theirs["forms"].get(entry)
            if mine and its and mine["kind"] == its["kind"] == _OPTIMIZER:
                for name, values in its["state"].items():
                    if mine["state"].setdefault(name, values) != values:
                        raise MismatchError(
                            f"checkpoint: {entry!r} has other state of {name!r} on rank {rank} than {other}"
                        )
                its = its | {"state": mine["state"]}
            if mine != its:
                raise MismatchError(
                    f"checkpoint: {entry!r} is not alike on ranks {rank} and {other}; all save the same"
                )
    return first


def generators() -> dict[str, Any]:
    """States of torch's generator on the CPU, Python's and numpy's; local."""
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002
    words = np.asarray(keys, np.uint32)
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "python": [random.getstate()[0], list(random.getstate()[1]), random.getstate()[2]],
        "numpy": [kind, base64.b64encode(words.tobytes()).decode(), *rest],
    }


def set_generators(found: Mapping[str, Any]) -> None:
    """Set the generators to saved states; local."""
    if "torch" in found:
        words = bytearray(base64.b64decode(found["torch"]))
        torch.set_rng_state(torch.frombuffer(words, dtype=torch.uint8))
    if "python" in found:
        version, numbers, gauss = found["python"]
        random.setstate((version, tuple(numbers), gauss))
    if "numpy" in found:
        kind, keys, *rest = found["numpy"]
        np.random.set_state((kind, np.frombuffer(base64.b64decode(keys), np.uint32), *rest))  # noqa: NPY002
