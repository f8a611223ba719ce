"""The objects of a state: how models, optimizers and others describe their state, and load it.

An entry of a state is one of five kinds, which differ in what may refuse, and in where tensors go::

    kind        such as                    its state is                     when it is loaded module      a
    model                    tensors by the model's keys      last: it has been checked, and cannot
                                                                            refuse
    optimizer   Adam                       tensors by names of parameters   early, and undone if another one
    refuses object      a scheduler, a generator   what state_dict() gives          likewise tensor      an
    averaged weight         one tensor                       last, in place value       a number, a list
    itself                           last, replaced in the dict

Tensors get names, which are those of the items in the data file. The main model's are its own keys, so that
other programs find them; all others begin with their entry::

    {"model": m, "optimizer": Adam}     weight   bias   optimizer/weight/exp_avg   optimizer/bias/exp_avg  ...

Optimizers name parameters by numbers, in the order of their groups. Here they have the names of the model:
another job may list the same parameters in another order, and a rank that holds nothing of a parameter may
have no state of it.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from distdl_rma.errors import (
    CheckpointError,
    ConfigurationError,
    MismatchError,
    PartitionError,
    ShapeError,
    UnsupportedError,
    told,
)
from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.jobs.checkpoints.form import Take, checked, decode, dtype_name, encode, in_line, tensors_in
from distdl_rma.jobs.checkpoints.items import Item, Kind, Part

# Decompositions of the tensors of a module's state that are not whole on every rank, by key.
Cuts = Callable[[nn.Module], dict[str, Decomposition]]
_MODULE, _OPTIMIZER, _OBJECT, _TENSOR, _VALUE = "module", "optimizer", "object", "tensor", "value"
_NAMES = {_OBJECT: "an object with state_dict(), or a generator", _VALUE: "a plain value"}
# Forms of the state of all objects, by entry.
Forms = dict[str, Any]


# How the state of a generator of random numbers is read and set. They have no state_dict, and say it in four
# ways.
_GENERATORS: dict[type[Any], tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (
        lambda thing: thing.get_state().numpy().tobytes(),
        lambda thing, state: thing.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8)),
    ),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (
        lambda thing: thing.get_state(legacy=False),
        lambda thing, state: thing.set_state(_within(state)),
    ),
    np.random.Generator: (
        lambda thing: thing.bit_generator.state,
        lambda thing, state: setattr(thing.bit_generator, "state", _within(state)),
    ),
}


# Those that every program has, by the names of the manifest. Those behind ``random.random()`` and
# ``numpy.random.rand()`` have no public name.
_OF_ALL: dict[str, Any] = {
    "torch": torch.default_generator, "python": random._inst, "numpy": np.random.mtrand._rand,
}  # fmt: skip


def _within(state: Any) -> Any:
    # numpy does not check which of its words is the next one: it would read behind its table, and draw what
    # lies there.
    if not (0 <= state["state"].get("pos", 0) <= 624 and 0 <= state.get("buffer_pos", 0) <= 4):
        raise ValueError("no state of a generator: the place of the next number is outside")
    return state


def _state_of(thing: Any) -> Any:
    return _GENERATORS[type(thing)][0](thing) if type(thing) in _GENERATORS else thing.state_dict()


def _load_into(thing: Any, state: Any) -> None:
    _GENERATORS[type(thing)][1](thing, state) if type(thing) in _GENERATORS else thing.load_state_dict(state)


def kind_of(thing: Any) -> str:
    """Kind of an object of a state; a distributed model is a module, and a split tensor a tensor."""
    if isinstance(thing, nn.Module):
        return _MODULE
    if isinstance(thing, torch.optim.Optimizer):
        return _OPTIMIZER
    if isinstance(thing, torch.Tensor):
        return _TENSOR
    loads = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
    return _OBJECT if loads or type(thing) in _GENERATORS else _VALUE


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
    shapes, and ``layouts`` with the decompositions of those that are cut; all by the item's name. A tensor
    without a layout is whole on every rank.

    To save, ``forms`` is called once. To load, ``wanted`` first, which checks whatever can be checked without
    the tensors and knows then which items are needed; ``blank`` and ``part`` for each of these; then
    ``load``. Until ``load`` no object has been changed, and if it raises none has been either.
    """

    def __init__(self, state: MutableMapping[str, Any], main: str | None, cuts: Cuts) -> None:
        self.state, self._main = state, main
        self.tensors: dict[str, torch.Tensor] = {}
        self.kinds: dict[str, Kind] = {}
        self.layouts: dict[str, Decomposition] = {}
        # Split tensors within modules and values.
        self._split: dict[str, Any] = {}
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
            elif isinstance(module, torch.Tensor):
                self._names.setdefault(id(module), f"{entry}/value")

    @property
    def devices(self) -> dict[str, torch.device]:
        """Devices of the tensors, one of each type; without the CPU."""
        return {x.device.type: x.device for x in self.tensors.values() if not x.is_cpu}

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
        value = _state_of(thing) if kind == _OBJECT else thing
        if kind == _TENSOR:
            return {"kind": kind, "state": self._take(f"{entry}/value", checked(entry, value))}
        return {"kind": kind, "state": encode(value, entry, self._take_or_write)}

    def _take(self, name: str, tensor: torch.Tensor) -> Any:
        # Notes a tensor under its name. A split tensor anywhere in a state brings its layout; a block of a
        # distributed layer is a plain tensor, whose layout ``cuts`` has named before.
        if name not in self.layouts and hasattr(tensor, "decomposition"):
            self._split[name], self.layouts[name] = tensor, tensor.decomposition
        layout = self.layouts.get(name)
        block = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if name in self.kinds:
            raise UnsupportedError(f"checkpoint: two tensors of the state are called {name!r}; rename one")
        self.tensors[name] = block.detach()
        self.kinds[name] = dtype_name(block.dtype), tuple(tensor.shape if layout is None else layout.shape)
        return {"tensor": name}

    def _take_or_write(self, name: str, tensor: torch.Tensor) -> Any:
        # Steps of optimizers and the like: one number, whose holders need no layout, and of which there is
        # one for every parameter.
        single = tensor.dim() == 0 and not tensor.dtype.is_complex and not hasattr(tensor, "decomposition")
        return in_line(tensor) if single else self._take(name, tensor)

    def _named(self, entry: str, optimizer: torch.optim.Optimizer) -> list[list[str]]:
        # Names of the parameters of each group: those of the model in the state that has the same objects.
        groups = [[self._names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        if any("" in group for group in groups):
            raise PartitionError(
                f"checkpoint: {entry!r} has a parameter of no model in the state; put the model there too, or"
                " the parameter itself"
            )
        return groups

    def _optimizer(self, entry: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        named, packed = self._named(entry, optimizer), optimizer.state_dict()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        names = [name for group in named for name in group]
        groups = list[dict[str, Any]]()
        for number, (some, group) in enumerate(zip(named, packed["param_groups"], strict=True)):
            options = {key: value for key, value in group.items() if key != "params"}
            options = encode(options, f"{entry}/group {number}", self._take_or_write)
            groups.append({"names": some, "options": options})
        states: dict[str, Any] = {}
        self._check_cut(entry, optimizer, packed["state"])
        for number, values in packed["state"].items():
            if not isinstance(number, int):
                raise UnsupportedError(f"checkpoint: {entry!r} has state of no parameter: {number!r}")
            name, parameter = names[number], parameters[number]
            layout = self.layouts.get(name)
            if layout is not None and not parameter.numel():
                # This rank has nothing of the parameter, and may have no state, or another number of steps.
                continue
            # Momentum and the like are cut as their parameter is; a number, such as the step, is alike on all
            # ranks.
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

    def _check_cut(self, entry: str, optimizer: torch.optim.Optimizer, states: object) -> None:
        # A vector of all parameters mixes those that are cut with others, and has no box of a whole.
        names = chain.from_iterable(self._named(entry, optimizer))
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
        found, self._saved = set[str](), kinds
        for entry, thing in self.state.items():
            if entry not in forms:
                raise CheckpointError(f"checkpoint: it has no {entry!r}, only {sorted(forms)}")
            with told(CheckpointError, f"checkpoint: its form of {entry!r} is of another kind"):
                self._check(entry, thing, forms[entry])
                found.update(tensors_in(forms[entry]))
        return found

    def _check(self, entry: str, thing: Any, form: dict[str, Any]) -> None:
        # The form that an object would have here is compared with the one that was saved: whatever decides
        # how something is saved decides so what is fit to be restored. A number may have been a tensor, or
        # become one.
        kind, state = kind_of(thing), form["state"]
        if form["kind"] != kind and {form["kind"], kind} != {_TENSOR, _VALUE}:
            saved, here = (_NAMES.get(each, f"a {each}") for each in (form["kind"], kind))
            raise CheckpointError(f"checkpoint: {entry!r} is {saved} in it, and {here} here")
        if kind == _OPTIMIZER:
            self._check_optimizer(entry, thing, form)
        elif kind == _MODULE:
            mine = self._form(entry, thing)["state"]
            _check_names(f"the model {entry!r}", state, mine, {**self._saved, **self.kinds})
            self._check_tensors(entry, state, mine)
        elif kind == _TENSOR and form["kind"] == _TENSOR:
            self._check_tensors(entry, {"": state}, {"": self._form(entry, thing)["state"]})
        elif kind == _VALUE:
            # Finds the split tensors that take their blocks; other values are replaced.
            # That the present value has no form is no reason not to replace it.
            with suppress(UnsupportedError):
                self._form(entry, thing)

    def _check_tensors(self, entry: str, saved: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
        for key, form in mine.items():
            if form != saved[key] and form == {"tensor": next(tensors_in(form), None)}:
                raise CheckpointError(
                    f"checkpoint: {key!r} of {entry!r} is {saved[key]!r:.80} in it, no tensor"
                )
            for name in set(tensors_in(form)) & self._saved.keys():
                if (here := self.kinds[name]) != (there := self._saved[name]):
                    raise ShapeError(
                        f"checkpoint: {f'{entry}: {key}' if key else entry!r} is {_text(there)} in it, and"
                        f" {_text(here)} here: it is of another model"
                    )

    def _check_optimizer(self, entry: str, optimizer: torch.optim.Optimizer, form: dict[str, Any]) -> None:
        if form["class"] != type(optimizer).__name__:
            raise CheckpointError(
                f"checkpoint: {entry!r} is {form['class']} in it, and {type(optimizer).__name__} here"
            )
        named, saved = self._named(entry, optimizer), [group["names"] for group in form["groups"]]
        if len(named) != len(saved):
            raise CheckpointError(f"checkpoint: {entry!r} has {len(saved)} groups in it, {len(named)} here")
        for number, (theirs, mine) in enumerate(zip(saved, named, strict=True)):
            _check_names(f"group {number} of {entry!r}", theirs, mine, {**self._saved, **self.kinds})
        if isinstance(optimizer, torch.optim.LBFGS) and named != saved:
            raise CheckpointError(f"checkpoint: {entry!r} (LBFGS) has its parameters in another order")
        self._check_cut(entry, optimizer, form["state"])
        for name, values in form["state"].items():
            layout = self.layouts.get(name)
            if layout is None:
                continue
            for item in tensors_in(values):
                if (shape := self._saved[item][1]) != layout.shape:
                    raise UnsupportedError(
                        f"checkpoint: {item!r} has shape {shape}, its parameter {layout.shape}: it cannot be"
                        " cut as the parameter is"
                    )
        self.lay_out({entry: form})

    def lay_out(self, forms: Forms) -> None:
        """Set the layouts of optimizers' tensors that are cut as their parameters are.

        By the forms of all ranks: one that holds nothing of a parameter has not seen its momentum.
        """
        for form in forms.values():
            for name, values in form["state"].items() if form["kind"] == _OPTIMIZER else ():
                if name in self.layouts:
                    self.layouts |= dict.fromkeys(tensors_in(values), self.layouts[name])

    def part(self, item: Item) -> Part:
        """This rank's part of an item."""
        layout = self.layouts.get(item.name)
        return Part(item, Box.of_shape(item.shape) if layout is None else layout.box(layout.partition.me))

    def blank(self, item: Item) -> torch.Tensor:
        """Memory for this rank's block of an item; without elements if this rank has no part of it."""
        layout = self.layouts.get(item.name)
        idle = layout is not None and not layout.partition.active
        return torch.empty((0,) if idle else self.part(item).box.shape, dtype=item.dtype)

    def in_place(self) -> dict[str, torch.Tensor | None]:
        """Items of models that are whole on all ranks, and the tensors that take them; call ``wanted`` first.

        The names are alike on all ranks. None for a tensor that cannot be filled in place, such as one with
        two names, with gaps in its memory, or on a device. All others need no second copy while they are
        restored, which would be as large as the model.
        """
        found: dict[str, torch.Tensor | None] = {}
        for entry, module in self.state.items():
            if not isinstance(module, nn.Module):
                continue
            prefix = self._prefix(entry)
            own: dict[str, torch.Tensor] = dict(module.named_buffers(remove_duplicate=False))
            own |= dict(module.named_parameters(remove_duplicate=False))
            whole = self.tensors.keys() - self.layouts.keys()
            names = {key: prefix + key for key in own if prefix + key in whole}
            shared = Counter(own[key].untyped_storage()._cdata for key in names)
            for key, name in names.items():
                x, saved = own[key], self.tensors[name]
                same = x.is_cpu and x.data_ptr() == saved.data_ptr() and x.shape == saved.shape
                plain = x.is_contiguous() and not x.is_conj() and not x.is_neg()
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
        """Load everything; if an object or an optimizer refuses its state, all objects are as before.

        First all forms become values, then who may refuse is asked, with what undoes it at hand, and what
        cannot be undone comes last: filling a model in place leaves nothing to go back to.

        ``wanted`` has checked models, optimizers, tensors and values. Each step is within a context of its
        own, which may raise the error of another rank. ``fill`` fills the tensors of ``in_place``, which no
        object that may refuse has.
        """
        values, undo = dict[str, Any](), list[Callable[[], object]]()
        with step():
            for entry, thing in self.state.items():
                with told(CheckpointError, f"checkpoint: the state of {entry!r} has no such form"):
                    values[entry] = self._value(entry, thing, forms[entry], {**tensors, **self._split})
        try:
            with step():
                for entry, thing in self.state.items():
                    refused = f"checkpoint: {entry!r} refuses its state, and nothing has been changed"
                    with told(CheckpointError, refused):
                        undo += _loaded(thing, values[entry])
        except Exception:
            with step():
                for each in undo:
                    each()
            raise
        fill()
        with step(), torch.no_grad():
            for name in self._split.keys() & tensors.keys():
                self._split[name].to_local().copy_(tensors[name])
            for entry, thing in list(self.state.items()):
                if (kind := kind_of(thing)) == _MODULE:
                    thing.load_state_dict(values[entry])
                elif kind == _TENSOR and forms[entry]["kind"] == _TENSOR:
                    (thing.to_local() if hasattr(thing, "to_local") else thing).copy_(values[entry])
                elif kind in (_TENSOR, _VALUE):
                    self.state[entry] = values[entry]

    def _value(self, entry: str, thing: Any, form: Any, tensors: Mapping[str, Any]) -> Any:
        # What an object takes. An optimizer wants numbers for its parameters, in its own order here.
        give = tensors.__getitem__
        if kind_of(thing) == _MODULE:
            return {key: decode(part, give) for key, part in form["state"].items()}
        if (kind := kind_of(thing)) != _OPTIMIZER:
            return _where(_state_of(thing) if kind == _OBJECT else thing, decode(form["state"], give))
        named = self._named(entry, thing)
        numbers = {name: at for at, name in enumerate(name for group in named for name in group)}
        groups = [
            dict(decode(group["options"], give)) | {"params": [numbers[name] for name in names]}
            for group, names in zip(form["groups"], named, strict=True)
        ]
        states = {numbers[name]: dict(decode(values, give)) for name, values in form["state"].items()}
        return {"state": states, "param_groups": groups}


def _where(mine: Any, found: Any) -> Any:
    # What replaces a value or a state, with its tensors on the devices of those that they replace.
    (held, form), (new, other) = tree_flatten(mine), tree_flatten(found)
    if form != other:
        return found
    for at, (x, y) in enumerate(zip(held, new, strict=True)):
        if isinstance(x, torch.Tensor) and type(y) is torch.Tensor:
            new[at] = y.to(x.device)
    return tree_unflatten(new, form)


def _loaded(thing: Any, found: Any) -> Iterator[Callable[[], object]]:
    # Loads a state into an object that may refuse it, or an optimizer; gives beforehand what undoes this. So
    # the undoing is known even if loading fails in the middle, and leaves the object half changed.
    if (kind := kind_of(thing)) == _OBJECT:
        yield partial(_load_into, thing, copy.deepcopy(_state_of(thing)))
        _load_into(thing, found)
    elif kind == _OPTIMIZER:
        yield partial(vars(thing).update, state=thing.state, param_groups=thing.param_groups)
        thing.load_state_dict(found)
        parameters = [p for group in thing.param_groups for p in group["params"]]
        for number, values in found["state"].items():
            held = thing.state[parameters[number]]
            for key, value in values.items():
                # torch rounds the state to the type of the parameter: float32 momentum of a parameter in
                # 16 bits would lose half of its bits.
                if isinstance(value, torch.Tensor) and value.dtype != held[key].dtype:
                    held[key] = value.to(held[key].device)


def _text(kind: Kind) -> str:
    return f"{kind[0]} of shape {kind[1]}"


def _check_names(whose: str, saved: Iterable[str], mine: Iterable[str], kinds: Mapping[str, Kind]) -> None:
    saved, mine = dict.fromkeys(saved), dict.fromkeys(mine)
    missing, spare = [n for n in mine if n not in saved], [n for n in saved if n not in mine]
    if missing or spare:
        raise CheckpointError(
            f"checkpoint: it is not of {whose}: it lacks {_few(missing, kinds)}, and has {_few(spare, kinds)}"
            " besides"
        )


def _few(names: list[str], kinds: Mapping[str, Kind]) -> str:
    found = [f"{name!r}{f' ({_text(kinds[name])})' if name in kinds else ''}" for name in names[:5]]
    return ", ".join(found) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "none"


def merged(reported: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """What all ranks report, as one: ``forms`` and ``kinds``, alike on all of them but for optimizers.

    A rank reports no state of a parameter if it holds nothing of the parameter: others fill it in.
    ``MismatchError`` names the entry that differs. Each rank computes this from the same words, so that all
    have the same result or raise the same error without a further message.
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


class _OfDevice:
    """The generator of a device that every program has."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def state_dict(self) -> bytes:
        """The state, which torch has as bytes of the CPU."""
        return self._module.get_rng_state(self._device).numpy().tobytes()

    def load_state_dict(self, state: bytes) -> None:
        """Set the state."""
        self._module.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8), self._device)


def generators_of(devices: Mapping[str, torch.device]) -> dict[str, Any]:
    """Torch's generator on the CPU, Python's and numpy's, and those of devices by type; by name."""
    return _OF_ALL | {kind: _OfDevice(device) for kind, device in devices.items()}


def forms_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Forms of the states of generators; local."""
    take: Take = lambda _name, words: in_line(words)  # noqa: E731
    return {name: encode(_state_of(thing), name, take) for name, thing in generators.items()}


def drawn(generators: Mapping[str, Any], found: Mapping[str, Any], place: int, size: int) -> dict[str, Any]:
    """States of generators for one of ``size`` ranks, checked; of forms that each rank or one has given.

    Those of Python and numpy are left out if neither is the case, and ``UnsupportedError`` refuses torch's.
    Those of a device that a checkpoint lacks, as one of a job without it, are left out too.
    """
    give = dict[str, torch.Tensor]().__getitem__
    with told(CheckpointError, "checkpoint: restore(..., generators=False) goes on without its generators"):
        states = {}
        for name in (each for each in generators if each in found or each in _OF_ALL):
            if (count := len(found[name])) in (1, size):
                states[name] = decode(found[name][place % count], give)
            elif name not in ("python", "numpy"):
                raise UnsupportedError(
                    f"checkpoint: the generators of its {count} ranks differed, and {size} ranks cannot go"
                    " on with them: seed all ranks alike, or restore(..., generators=False)"
                )
        # Tried first: all others change only when everything else is restored.
        for name, state in states.items():
            before = _state_of(generators[name])
            try:
                _load_into(generators[name], state)
            finally:
                _load_into(generators[name], before)
    return states


def set_generators(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Set generators to states of ``drawn``; local."""
    for name, state in states.items():
        _load_into(generators[name], state)
