"""Compares a distributed model with the same model alone: outputs, gradients and state, module by module.

    alone   seed, one step, every output kept                       outputs, loss, gradients, buffers
              |                                                            |
    split   seed, the same step; each output, made whole, is compared -----+--> rows of a ``Comparison``

Both take the same values first, and both are put back afterwards. Rounding differs, since sums over ranks
have another order; so numbers are equal up to a tolerance, which is relative to the largest element of a
tensor: an error of rounding is as large as the terms of a sum, not as its result. Gradients of a bias before
a norm, which are zero but for rounding, are measured by those of the weight beside it.

Between ranks, in contrast, all must be identical: parameters, buffers, gradients and the random generator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ConfigurationError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.layers.dtypes import as_words
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.tensor import SplitTensor
from distdl_rma.layers.staging import down
from distdl_rma.layers.sync.registry import not_on_one_device
from distdl_rma.segments.consensus import gather_words, together
from distdl_rma.segments.machine import Machine
from distdl_rma.trace import in_columns

# Tolerance: this power of the dtype's resolution, relative to the largest element, at least to ``_SMALL``.
_POWER, _SMALL = 0.6, 1e-3
# Number of rows that ``print`` shows.
_WORST = 5


@dataclass(frozen=True)
class Difference:
    """Difference between a tensor of the distributed model and the same tensor of the model alone.

    ``what`` is ``"output"``, ``"loss"``, ``"input gradient"``, ``"gradient"`` or ``"buffer"``, of ``name``.
    ``error`` is the largest difference, ``scale`` the largest element. ``where`` is the smallest box of
    global indices with all differing elements: start and stop for each dimension, or None.

    Examples
    --------
    >>> alone, split = nn.Conv2d(1, 1, 3), distribute(nn.Conv2d(1, 1, 3), {"H": -1})
    >>> found = compare(alone, split, torch.rand(1, 1, 8, 8))
    >>> [(each.what, each.name) for each in found.differences if each.equal][:3]
    [('output', 'model'), ('loss', 'the step'), ('input gradient', 'input 0')]
    """

    what: str
    name: str
    shape: tuple[int, ...] = ()
    error: float = 0.0
    scale: float = 0.0
    tolerance: float = 0.0
    where: tuple[tuple[int, int], ...] | None = None
    problem: str = ""

    @property
    def equal(self) -> bool:
        """Whether both are equal up to rounding."""
        return not self.problem and self.where is None

    def __str__(self) -> str:
        if self.problem:
            return f"{self.what} of {self.name}: {self.problem}"
        found = f"{self.what} of {self.name}, {self.shape}: off by {self.error:.1e} of {self.scale:.1e}"
        if self.where is None:
            return found
        return f"{found} at {' x '.join(f'[{a}, {b})' for a, b in self.where)}"


@dataclass
class Comparison:
    """Result of ``compare``; ``print`` shows the verdict and the worst rows, ``table`` has all.

    ``differences`` are in the order of the computation. ``drifted`` names tensors that differ between ranks.

    Examples
    --------
    >>> alone, split = nn.Conv2d(1, 1, 3), distribute(nn.Conv2d(1, 1, 3), {"H": -1})
    >>> found = compare(alone, split, torch.rand(1, 1, 8, 8))
    >>> found.equal, found.drifted
    (True, [])
    """

    differences: list[Difference] = field(default_factory=list)
    drifted: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all is equal up to rounding, and identical on all ranks."""
        return self.first is None and not self.drifted

    @property
    def first(self) -> Difference | None:
        """The first difference beyond rounding, or None."""
        return next((each for each in self.differences if not each.equal), None)

    def table(self) -> str:
        """A row for each tensor, in the order of the computation."""
        return self._rows(self.differences)

    def __str__(self) -> str:
        wrong, all_of_them = [each for each in self.differences if not each.equal], len(self.differences)
        lines = [f"all {all_of_them} tensors are equal up to rounding"]
        if wrong:
            lines = [f"{len(wrong)} of {all_of_them} tensors differ, the first: {wrong[0]}"]
        lines.append(f"not alike on all ranks: {', '.join(self.drifted) or 'nothing'}")
        worst = sorted(self.differences, key=lambda each: (each.equal, -each.error / (each.tolerance or 1)))
        return "\n".join([*lines, self._rows(worst[:_WORST]), "(the worst rows; table() has all of them)"])

    def _rows(self, differences: list[Difference]) -> str:
        rows = [("", "what", "of", "error", "of", "shape")]
        for each in differences:
            numbers = (each.problem, "") if each.problem else (f"{each.error:.1e}", f"{each.scale:.1e}")
            rows.append(("" if each.equal else "!!!", each.what, each.name, *numbers, str(each.shape)))
        return "\n".join(in_columns(rows))


def compare(
    alone: nn.Module,
    split: nn.Module,
    inputs: Any,
    targets: Any = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    *,
    seed: int = 0,
) -> Comparison:
    """Run a step of both models, and compare all results; collective over the machine, blocking.

    For sizes at which every rank can hold the whole tensors: the outputs of all modules are kept. Afterwards
    parameters, buffers, gradients and the random generator are as before.

    Parameters
    ----------
    alone
        The same model, not distributed, with the same names of parameters and buffers; gets their values.
        It is on the device of ``split``, or on the CPU, by whose generator split tensors draw.
    split
        The model that ``distribute`` made.
    inputs
        A tensor, or a tuple of arguments; whole, equal on all ranks, on the device of ``split``. Gradients of
        cut ones are compared.
    targets, loss_fn
        The loss is ``loss_fn(output, targets)``, or ``loss_fn(output)`` without targets. Without a function
        it is the sum of the outputs' mean squares.
    seed
        Seeds both runs.

    Returns
    -------
    Comparison
        Equal on all ranks.

    Raises
    ------
    ConfigurationError
        On all ranks, with both devices, if a model or an input is on another one on some rank.

    Examples
    --------
    >>> net = lambda: nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
    >>> found = compare(net(), distribute(net(), {"H": -1}), torch.rand(2, 1, 8, 8))
    >>> found.equal, found.first
    (True, None)
    """
    if "distributed" not in vars(split) or "distributed" in vars(alone):
        raise ConfigurationError("compare: takes a model alone first, and then one that distribute() made")
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    found = Comparison()
    handle: Any = split.distributed
    home, failed = handle.machine, ConfigurationError
    with together(home, home.ranks, "compare", failed=failed):
        there, device = _devices(alone, split, (arguments, targets))
    # Seeds are those of all generators.
    drawn = {} if device.type == "cpu" else {"device_type": device.type}
    forked = torch.random.fork_rng([device.index] if drawn else (), **drawn)
    # Differences between ranks are reported, so the models' own checks must not raise.
    with handle.unchecked(), _unchanged(alone), _unchanged(split), forked:
        _take_values(alone, split)
        expected: dict[tuple[str, int], list[torch.Tensor]] = {}
        # Clones, since later functions may change an output in place.
        with _outputs(
            alone, lambda path, at, ys: expected.update({(path, at): [y.detach().clone() for y in ys]})
        ):
            given = _step(alone, arguments, targets, loss_fn, seed, there)

        def check(path: str, at: int, ys: list[torch.Tensor]) -> None:
            wanted = expected.get((path, at), [])
            name = path or "model"
            if len(wanted) != len(ys):
                problem = f"{len(ys)} tensors instead of {len(wanted)}"
                found.differences.append(Difference("output", name, problem=problem))
            for y, other in zip(ys, wanted, strict=False):
                found.differences.append(_difference("output", name, y, other))

        with _outputs(split, check):
            mine = _step(split, arguments, targets, loss_fn, seed, device)
        found.differences.append(_difference("loss", "the step", mine[0], given[0]))
        for at, (x, other) in enumerate(zip(mine[1], given[1], strict=True)):
            if other.grad is not None and isinstance(x, SplitTensor):
                found.differences.append(_difference("input gradient", f"input {at}", x.grad, other.grad))
        gradients = {name: p.grad for name, p in split.named_parameters()}
        scales = _scales(alone)
        for name, p in alone.named_parameters():
            if p.grad is not None or gradients.get(name) is not None:
                scale = scales.get(name.rpartition(".")[0], 0.0)
                found.differences.append(_difference("gradient", name, gradients.get(name), p.grad, scale))
        buffers = dict(split.named_buffers())
        for name, buffer in alone.named_buffers():
            found.differences.append(_difference("buffer", name, buffers.get(name), buffer))
        held = dict(split.named_parameters()) | buffers
        held |= {f"gradient of {name}": g for name, g in gradients.items() if g is not None}
        held["the generator of random numbers"] = torch.get_rng_state()
        found.drifted = _drifted(home, held)
    return found


def _devices(alone: nn.Module, split: nn.Module, given: Any) -> tuple[torch.device, torch.device]:
    # Where the model alone computes, and where the distributed one does.
    of_models = []
    for name, model in (("alone", alone), ("that is distributed", split)):
        if problem := not_on_one_device(model):
            raise ConfigurationError(f"compare: in the model {name}, {problem}")
        of_models.append([x.device for x in chain(model.parameters(), model.buffers())][:1])
    of_tensors = [x.device for x in tensors_in(given)]
    here = next(iter((*of_models[1], *of_tensors)), torch.device("cpu"))
    there = next(iter(of_models[0]), here)
    others = [("an input or target", device) for device in of_tensors]
    others += [] if there.type == "cpu" else [("the model alone", there)]
    for name, device in others:
        if device != here:
            raise ConfigurationError(
                f"compare: {name} is on {device}, but the distributed model on {here}: move it there"
            )
    return there, here


def _step(
    model: nn.Module,
    arguments: tuple[Any, ...],
    targets: Any,
    loss_fn: Callable[..., Any] | None,
    seed: int,
    device: torch.device,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    # Returns the loss, and the floating-point inputs as leaves.
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    leaves: list[torch.Tensor] = []
    targets = mapped(lambda x: x.to(device), targets)

    def leaf(x: torch.Tensor) -> torch.Tensor:
        x = x.detach().to(device, copy=True)
        if x.is_floating_point() or x.is_complex():
            leaves.append(x.requires_grad_())
        return x

    given = mapped(leaf, arguments)
    handle = vars(model).get("distributed")
    if handle is not None:
        given = mapped(lambda x: x if isinstance(x, SplitTensor) else x.detach(), handle.cut(given))
        leaves = [x for x in tensors_in(given) if x.is_floating_point() or x.is_complex()]
    y = model(*given)
    if loss_fn is None:
        exact = [each for each in tensors_in(y) if each.is_floating_point() or each.is_complex()]
        squares = [each.abs().square().mean() for each in exact]
        loss = sum([s.full_tensor() if isinstance(s, SplitTensor) else s for s in squares], torch.zeros(()))
    else:
        loss = loss_fn(y) if targets is None else loss_fn(y, targets)
    if loss.requires_grad:
        loss.backward()
    return loss, leaves


def _scales(model: nn.Module) -> dict[str, float]:
    # The largest gradient in each module. A bias before a norm has no gradient except rounding errors of sums
    # that are as large as those of its weight.
    found: dict[str, float] = {}
    for name, p in model.named_parameters():
        if p.grad is not None and p.numel():
            path = name.rpartition(".")[0]
            found[path] = max(found.get(path, 0.0), float(p.grad.abs().nan_to_num().max()))
    return found


def _difference(what: str, name: str, found: Any, expected: Any, least: float = 0.0) -> Difference:
    if found is None or expected is None:
        return Difference(what, name, problem="has none here" if found is None else "only here")
    mine = found.full_tensor() if isinstance(found, SplitTensor) else found
    other = expected.detach()
    mine = mine.detach().to(other.device)
    shape = tuple(other.shape)
    if tuple(mine.shape) != shape or not other.numel():
        problem = "" if tuple(mine.shape) == shape else f"has shape {tuple(mine.shape)}"
        return Difference(what, name, shape, problem=problem)
    exact = not (other.is_floating_point() or other.is_complex())
    if exact:
        mine, other = mine.to(torch.float64), other.to(torch.float64)
    apart = (mine - other).abs()
    scale = float(other.abs().nan_to_num().max())
    tolerance = 0.0 if exact else max(scale, least, _SMALL) * torch.finfo(other.dtype).eps ** _POWER
    # NaN equals NaN, and infinity equals the same infinity.
    same = (apart <= tolerance) | (mine == other) | (mine.isnan() & other.isnan())
    wrong, where = (~same).nonzero(), None
    if len(wrong):
        ends = zip(wrong.amin(0).tolist(), wrong.amax(0).tolist(), strict=True)
        where = tuple((first, last + 1) for first, last in ends)
    error = float(apart.nan_to_num(posinf=float("inf")).max())
    return Difference(what, name, shape, error, scale, tolerance, where)


@contextmanager
def _outputs(model: nn.Module, see: Callable[[str, int, list[torch.Tensor]], None]) -> Iterator[None]:
    # Calls ``see`` with a module's path, the number of its call, and its outputs.
    counts: dict[str, int] = {}

    def hook(path: str, _module: nn.Module, _args: Any, output: Any) -> None:
        at = counts.get(path, 0)
        counts[path] = at + 1
        see(path, at, tensors_in(output))

    handles = [module.register_forward_hook(partial(hook, path)) for path, module in model.named_modules()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _state(model: nn.Module) -> dict[str, Any]:
    # A copy, with the versions that some modules check when they load it.
    state = model.state_dict()
    state.update({key: value.clone() for key, value in state.items() if isinstance(value, torch.Tensor)})
    return state


def _take_values(alone: nn.Module, split: nn.Module) -> None:
    alone.load_state_dict(_state(split))
    # A state has only the persistent buffers.
    theirs = dict(split.named_buffers())
    for name, buffer in alone.named_buffers():
        if name in theirs and theirs[name].shape == buffer.shape:
            buffer.copy_(theirs[name])


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    state = _state(model)
    tables = [module._buffers for module in model.modules()]
    buffers = [(table, key, x, x.clone()) for table in tables for key, x in table.items() if x is not None]
    gradients = [(p, p.grad) for p in model.parameters()]
    try:
        yield
    finally:
        model.load_state_dict(state)
        for table, key, x, before in buffers:
            table[key] = x.copy_(before)
        for p, gradient in gradients:
            p.grad = gradient


def _drifted(machine: Machine, held: Mapping[str, torch.Tensor]) -> list[str]:
    # Names of tensors that differ between ranks.
    mine = {name: fingerprint(as_words(down(x.detach()).contiguous()).tobytes()) for name, x in held.items()}
    everyone = gather_words(machine.segments, mine, "compare (state of the ranks)").values()
    return [name for name in held if len({each.get(name) for each in everyone}) > 1]
