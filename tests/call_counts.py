"""Calls of Python and of C that a step takes on one rank, waiting apart: exact, and alike on every machine.

By hand, with what is called and how often: ``mpiexec -n 2 python -m mpi4py -m tests.call_counts norm``.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Machine, distribute, layers, shard
from distdl_rma.layers.ops.core.autograd import mark_summed_later

# What looks whether others are there does so as often as they are late, and looks for what it waits for.
_WAITS = frozenset({"until", "_wait", "arrived", "advance", "flag_after", "_board_is_full"})
_SEGMENTS = "/distdl_rma/segments/"
_WARM_UPS = 4
Profile = Counter[tuple[str, str]]


class Calls(NamedTuple):
    """Functions of Python that were entered, and functions of C that Python called."""

    python: int
    c: int

    def within(self, most: Calls) -> bool:
        return self.python <= most.python and self.c <= most.c

    def __str__(self) -> str:
        return f"{self.python}/{self.c}"


def profile_of(act: Callable[[], Any]) -> Profile:
    """What a call calls on this thread, by file and name, for functions of C under an empty file."""
    found: Profile = Counter()
    waits = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal waits
        waiting = frame.f_code.co_name in _WAITS and _SEGMENTS in frame.f_code.co_filename
        if event == "call":
            waits += waiting
            if not waits:
                found[frame.f_code.co_filename.rpartition("/distdl_rma/")[2], frame.f_code.co_name] += 1
        elif event == "return":
            waits -= waiting
        elif event == "c_call" and not waits and argument is not sys.setprofile:
            found["", argument.__qualname__] += 1

    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    # That of what was to be counted.
    found[__file__, act.__code__.co_name] -= 1
    return found


def total(found: Profile) -> Calls:
    """Sums of a profile."""
    c = sum(number for (file, _), number in found.items() if not file)
    return Calls(sum(found.values()) - c, c)


def most(found: Profile) -> Calls:
    """The most of any rank; collective over all."""
    return Calls(*map(max, zip(*MPI.COMM_WORLD.allgather(total(found)), strict=True)))


def steps(machine: Machine) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Functions of split tensors, by name; each is to be called in one place, which keeps the operation."""
    torch.manual_seed(0)
    P_x = machine.partition((1, 1, machine.size, 1))
    x = shard(P_x, torch.randn(2, 4, 16, 16))
    x.to_local().requires_grad_()
    target = shard(P_x, torch.randn(2, 4, 16, 16))
    weight, filters = (torch.randn(4, 4, *k, requires_grad=True) for k in ((), (3, 3)))
    gamma, beta = (torch.randn(4, requires_grad=True) for _ in range(2))
    mean, variance = torch.zeros(4), torch.ones(4)
    # Large enough that it is convolved while halos travel.
    large = shard(P_x, torch.randn(1, 4, 512, 512))
    large.to_local().requires_grad_()
    # As parameters of a distributed model, whose gradients are summed at the end of the step.
    for parameter in (weight, filters, gamma, beta):
        mark_summed_later(parameter, True)
    tokens = shard(machine.partition((1, machine.size, 1)), torch.randn(2, 16, 4))
    tokens.to_local().requires_grad_()
    yield "convolution", lambda: F.conv2d(x, filters, beta, 1, 1)
    yield "convolution of 512x512", lambda: F.conv2d(large, filters, beta, 1, 1)
    yield "instance norm", lambda: F.instance_norm(x, weight=gamma, bias=beta)
    yield "batch norm", lambda: F.batch_norm(x, mean, variance, gamma, beta, True)
    yield "max pool 2x2", lambda: F.max_pool2d(x, 2)
    yield "max pool 3x3", lambda: F.max_pool2d(x, 3, 2, 1)
    yield "linear", lambda: F.linear(tokens, weight, beta)
    yield "relu", lambda: F.relu(x)
    yield "mse loss", lambda: F.mse_loss(x, target)


def profiles(call: Callable[[], Any]) -> tuple[Profile, Profile]:
    """What a forward and what a backward of a function calls, once it is known for its inputs."""
    for _ in range(_WARM_UPS):
        y = call().to_local()
        y.backward(torch.ones_like(y))
    found: list[torch.Tensor] = []

    def forward() -> None:
        found.append(call()._local)

    ahead = profile_of(forward)
    y = found.pop()
    gradient = torch.ones_like(y)

    def backward() -> None:
        torch.autograd.backward(y, gradient)

    back = profile_of(backward)
    # What every backward of torch costs.
    plain = torch.ones_like(y, requires_grad=True).view_as(y)

    def nothing() -> None:
        torch.autograd.backward(plain, gradient)

    back.subtract(profile_of(nothing))
    # What only counting needs.
    ahead[__file__, "<lambda>"] -= 1
    ahead["", "list.append"] -= 1
    return ahead, back


def of_a_layer(machine: Machine, name: str, *arguments: Any) -> tuple[Profile, Profile]:
    """What a forward and a backward of a layer call, of plain shards of one shape that all ranks pass."""
    torch.manual_seed(0)
    layer = getattr(layers, name)(machine.partition((1, 1, machine.size, 1)), *arguments)
    x, found = torch.randn(2, 4, 8, 16, requires_grad=True), []
    inputs = (x, torch.zeros_like(x)) if name.endswith("Loss") else (x,)

    def forward() -> None:
        found.append(layer(*inputs))

    def backward() -> None:
        found[-1].backward(torch.ones_like(found[-1]))

    def step(take: Callable[[Callable[[], None]], Any]) -> tuple[Any, Any]:
        both = take(forward), take(backward)
        found.clear()
        return both

    for _ in range(_WARM_UPS):
        step(lambda act: act())
    return step(profile_of)


# Arguments of layers whose calls are counted, by name.
LAYERS: dict[str, tuple[Any, ...]] = {
    "DistributedConv2d": (4, 4, 3, 1, 1),
    "DistributedMaxPool2d": (3, 2, 1),
    "DistributedUpsample": (None, 2),
    "DistributedGroupNorm": (2, 4),
    "DistributedBatchNorm2d": (4,),
    "DistributedMSELoss": (),
}


def modules() -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Modules whose calls are counted within a distributed model, by name."""
    yield "module: convolution", lambda: nn.Conv2d(4, 4, 3, padding=1)
    yield "module: instance norm", lambda: nn.InstanceNorm2d(4, affine=True)
    yield "module: batch norm", lambda: nn.BatchNorm2d(4)
    yield "module: max pool 3x3", lambda: nn.MaxPool2d(3, 1, 1)
    yield "module: linear", lambda: nn.Linear(16, 16)
    yield "module: relu", nn.ReLU


def of_a_model(machine: Machine, inner: Sequence[nn.Module]) -> tuple[Profile, Profile]:
    """What a forward and a backward of a distributed model of a convolution and more modules calls."""
    torch.manual_seed(0)
    P_x = machine.partition((1, 1, machine.size, 1))
    model = distribute(nn.Sequential(nn.Conv2d(4, 4, 1), *inner), P_x)
    x, found = shard(P_x, torch.randn(2, 4, 16, 16)), []

    def forward() -> None:
        found.append(model(x))

    def backward() -> None:
        found[-1].backward()

    def step(take: Callable[[Callable[[], None]], Any]) -> tuple[Any, Any]:
        ahead = take(forward)
        found.append(found[-1].square().sum())
        back = take(backward)
        found.clear()
        return ahead, back

    for _ in range(_WARM_UPS):
        step(lambda act: act())
    profiles = step(profile_of)
    model.distributed.close()
    return profiles


def of_a_module(machine: Machine, make: Callable[[], nn.Module]) -> tuple[Profile, Profile]:
    """What a module adds to a forward and a backward of a distributed model."""
    few, more = (of_a_model(machine, [make() for _ in range(n)]) for n in (1, 2))
    for larger, smaller in zip(more, few, strict=True):
        larger.subtract(smaller)
    return more


def main() -> None:
    """Print the figures, and what they are made of for functions that are named."""
    asked = sys.argv[1:]
    with Machine() as machine:
        torch.set_num_threads(1)
        of_functions = ((name, profiles(call)) for name, call in steps(machine))
        of_modules = ((name, of_a_module(machine, make)) for name, make in modules())
        of_calls = (("model of one module", of_a_model(machine, [])) for _ in range(1))
        of_layers = ((name, of_a_layer(machine, name, *given)) for name, given in LAYERS.items())
        for name, found in chain(of_functions, of_modules, of_calls, of_layers):
            ahead, back = map(most, found)
            if machine.rank == 0:
                print(f"{name:23} forward {ahead}, backward {back}")
                if any(word in name for word in asked):
                    _print_parts(found)


def _print_parts(found: tuple[Profile, Profile]) -> None:
    for title, profile in zip(("forward", "backward"), found, strict=True):
        print(f"  {title}")
        for (file, function), number in profile.items():
            if number:
                print(f"    {number:3} {file or 'C'} {function}")


if __name__ == "__main__":
    main()
