"""Random models that change their inputs in place and assign buffers, beside themselves alone.

After each call the caller's tensors, lists and dicts, the buffers and the state are those of the model alone,
or every rank refuses.
"""

from __future__ import annotations

import copy
import io
import random
import re
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from mpi4py import MPI
from torch import nn

from distdl_rma import (
    Checkpoints,
    Partition,
    UnsupportedError,
    distribute,
    gather_state_dict,
    load_checkpoint,
)
from distdl_rma.layers.split import SplitTensor
from tests.fuzz.outcomes import folder_of_all, no_problem, outcome, same_end

COLLECTIVE = True
REFUSED: Counter[str] = Counter()
# Of the input, before it is convolved; names are those of the program below.
OF_INPUT = (
    "x -= x.mean()",
    "x.mul_({a})",
    "x[:, :, {i}:] = {a}",
    "x[:, :, {i}] += 1",
    "x[..., {j}] = x[..., 0]",
    "x.clamp_(min=-{a})",
    "x.add_(other)",
    "other.mul_(x)",
    "other[:, :, {i}:] = x.detach()[:, :, {i}:]",
    "x.copy_(x.detach().flip(2))",
    "x.transpose(2, 3).mul_({a})",
    "x[0].neg_()",
    "x.view(-1)[{i}] = {a}",
    "x[x > {a}] = 0",
    "torch.nn.functional.relu(x, inplace=True)",
    "x.div_(x.detach().abs().amax() + 1)",
    "x.mul_(net.gain)",
    "more['again'] = x",
    "more['list'].append(x)",
    "more['list'][0].add_({a})",
    "more['new'] = net.conv(x)",
    "more.pop('spare', None)",
    "plain.add_({a})",
    "plain[{i}:] = x.detach()[0, 0, {i}:]",
    "plain.mul_(x.detach()[0, 0])",
)
# Of buffers, once y is the convolution of the input.
OF_BUFFERS = (
    "net.part.mean = 0.9 * net.part.mean + {a} * z.mean((0, 2, 3))",
    "net.image = 0.5 * net.image + z[0]",
    "net.image = z.mean(0)",
    "net.number = z.amax()",
    "net.number = net.number + 1",
    "net.part.mean.mul_(0.5).add_(z.mean((0, 2, 3)))",
    "net.image.mul_(0.5).add_(z[-1])",
    "net.image[:, {i}:] = z[0, :, {i}:]",
    "net.image.copy_(z[0])",
    "net.part.mean[0] = z.sum()",
    "net.part.mean = net.hidden = z.amin((0, 2, 3))",
    "net.hidden = net.image.mean((1, 2))",
    "net.batch = z",
    "net.batch = net.batch if net.batch is not None else z * {a}",
    "y = y + net.image",
    "y = y * net.part.mean[:, None, None]",
    "y = y + net.number",
)


class Model(nn.Module):
    """A convolution, buffers and the forward of a seed."""

    def __init__(self, act: Callable[..., Any], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.conv, self.part = nn.Conv2d(2, 3, 3, padding=1), nn.Module()
        self.gain = nn.Parameter(torch.rand(()))
        self.act = act
        self.part.register_buffer("mean", torch.rand(3))
        self.register_buffer("image", torch.rand(3, 9, 7))
        self.register_buffer("number", torch.zeros(()))
        self.register_buffer("batch", None)
        self.register_buffer("hidden", torch.rand(3), persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(self, *args, **kwargs)


def text_of(rng: random.Random, learns: bool) -> str:
    """Source of a forward; without gradients an input changes also after it was convolved."""

    def drawn(lines: tuple[str, ...], most: int) -> list[str]:
        chosen = [rng.choice(lines) for _ in range(rng.randint(0, most))]
        return [each.format(a=round(rng.uniform(0.2, 1.5), 2), i=rng.randint(0, 6), j=rng.randint(0, 6))
                for each in chosen]  # fmt: skip

    body = ["z = y.detach()", *drawn(OF_BUFFERS, 4)]
    if rng.random() < 0.3:
        # What has a graph is assigned as a whole, and begins anew in every call.
        kept = [line for line in body[1:] if re.match(r"(net\.[\w.]+|y) = ", line)]
        body = ["z = y", *(re.sub(r"(?<!^)net\.(image|number|part\.mean|hidden)\b(?! =)",
                                  r"net.\1.detach()", line) for line in kept)]  # fmt: skip
    if rng.random() < 0.4:
        body = [body[0], "if net.training:", *("    " + line for line in body[1:]), "    pass"]
    first = drawn(OF_INPUT, 3)
    last = [] if learns else drawn(OF_INPUT, 1)
    lines = [*first, "y = net.conv(x)", *body, *last, "return y"]
    return "def act(net, x, other, more, plain):\n" + "".join(f"    {line}\n" for line in lines)


def arguments(rng: random.Random, learns: bool) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, and tensors that the caller keeps; equal for equal generators."""

    def image() -> torch.Tensor:
        return torch.rand(2, 2, 9, 7) - 0.5

    torch.manual_seed(rng.randrange(1000))
    kind = rng.random()
    x, other = image(), image()
    base = torch.rand(4, 2, 9, 7)
    if kind < 0.2:
        x = base[1:3]
    elif kind < 0.3:
        x = base.permute(0, 1, 3, 2).contiguous().permute(0, 1, 3, 2)[:2]
    elif kind < 0.4 and learns:
        x = image().requires_grad_() * 1.5
    elif kind < 0.5:
        other = x
    elif kind < 0.6:
        x, other = base[:2], base[2:]
    elif kind < 0.65:
        x, other = base[:2], base[1:3]
    more = {"list": [image()], "spare": 3, "inner": {"one": (image(), "text")}}
    plain = torch.rand(9, 7)
    if rng.random() < 0.5:
        return [x, other], {"more": more, "plain": plain, "base": base}
    return [], {"x": x, "other": other, "more": more, "plain": plain, "base": base}


def whole(x: Any) -> Any:
    """Results of a model as plain values."""
    if isinstance(x, dict):
        return {key: whole(one) for key, one in x.items()}
    if isinstance(x, (list, tuple)):
        return [*map(whole, x)]
    if isinstance(x, SplitTensor):
        x = x.full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def difference(mine: Any, theirs: Any, path: str) -> str:
    """The first difference beyond rounding; empty if there is none."""
    if isinstance(theirs, (dict, list, tuple)):
        both = [[*x] if isinstance(x, dict) else [*range(len(x))] for x in (mine, theirs)]
        if both[0] != both[1]:
            return f"{path}: {both[0]}, not {both[1]}"
        pairs = ((mine[key], theirs[key], f"{path}[{key!r}]") for key in both[1])
        return next(filter(None, (difference(*each) for each in pairs)), "")
    if type(mine) is not type(theirs):
        return f"{path} is a {type(mine).__name__}, not a {type(theirs).__name__}"
    if not isinstance(theirs, torch.Tensor):
        return "" if mine == theirs else f"{path}: {mine}, not {theirs}"
    kinds = [(tuple(x.shape), x.dtype, x.requires_grad) for x in (mine, theirs)]
    if kinds[0] != kinds[1]:
        return f"{path}: {kinds[0]}, not {kinds[1]}"
    atol = 1e-8 * max(1.0, float(theirs.detach().abs().nan_to_num(0, 0, 0).max())) if theirs.numel() else 0
    close = torch.allclose(mine.detach(), theirs.detach(), rtol=0, atol=atol, equal_nan=True)
    return "" if close else f"{path} differs by {float((mine - theirs).detach().abs().max()):.3g}"


def check(P_world: Partition, comm: MPI.Intracomm, seed: int) -> None:
    """Raise if the model of a seed leaves other things than alone; collective."""
    torch.set_default_dtype(torch.float64)
    try:
        compare(P_world, comm, random.Random(seed), seed)
    finally:
        torch.set_default_dtype(torch.float32)


def compare(P_world: Partition, comm: MPI.Intracomm, rng: random.Random, seed: int) -> None:
    """As ``check``, in double precision."""
    mode = rng.choice([torch.enable_grad, torch.enable_grad, torch.no_grad, torch.inference_mode])
    learns = mode is torch.enable_grad
    text, found = text_of(rng, learns), dict[str, Any]()
    exec(compile(text, "leavings.py", "exec"), {"torch": torch}, found)
    shape = [1, 1, 1, 1]
    shape[rng.choice([0, 1, 2, 2, 3, 3])] = comm.size
    shape = [1, 1, 2, 2] if comm.size == 4 and rng.random() < 0.3 else shape
    alone = Model(found["act"], seed)
    checks = rng.random() < 0.7
    grid = P_world.create_cartesian_topology_partition(shape)
    split = distribute(copy.deepcopy(alone), grid, check_copies=checks)
    what = f"{text}in {mode.__name__}, on {shape}, checks {checks}"
    try:
        for step in range(rng.randint(1, 3)):
            start, training = rng.randrange(1 << 30), rng.random() < 0.7
            if not step_of(comm, (split, alone), start, mode, training, f"step {step} of {what}"):
                return
        states(comm, split, alone, rng.random() < 0.2, what)
    finally:
        if hasattr(split, "distributed"):
            # After a call that was refused it names buffers that stay split.
            with suppress(UnsupportedError):
                split.distributed.close()


def step_of(
    comm: MPI.Intracomm, models: tuple[Any, Any], start: int, mode: Any, training: bool, what: str
) -> bool:
    """Whether a call of both models came to its end; raises if they differ."""
    told, ends = [], []
    for model in models:
        model.train(training).zero_grad()
        args, kwargs = arguments(random.Random(start), mode is torch.enable_grad)
        base = kwargs.pop("base")

        def act(model: Any = model, args: Any = args, kwargs: Any = kwargs) -> Any:
            with mode():
                return model(*args, **kwargs)

        y, error = outcome(act)
        ends.append(error)
        told.append([y, args, kwargs, base])
    if not same_end(comm, *ends, what, REFUSED):
        return False
    agree(comm, [whole(told[0][0])], [whole(told[1][0])], f"output, {what}")
    agree(comm, [*map(values, told[0][1:])], [*map(values, told[1][1:])], f"the caller's, {what}")
    for name in ("named_buffers", "state_dict"):
        agree(comm, *(dict(getattr(model, name)()) for model in models), f"{name}, {what}")
    if mode is torch.enable_grad and told[1][0].requires_grad:
        (_, mine), (_, theirs) = (outcome(one[0].square().sum().backward) for one in told)
        if theirs is not None or not same_end(comm, mine, theirs, what, REFUSED):
            return False
        agree(comm, *([p.grad for p in model.parameters()] for model in models), f"gradients, {what}")
    return True


def values(x: Any) -> Any:
    """What a caller holds: tensors that were plain are, results of the model may be split."""
    if isinstance(x, dict):
        return {key: whole(one) if key == "new" else values(one) for key, one in x.items()}
    return [*map(values, x)] if isinstance(x, (list, tuple)) else x


def states(comm: MPI.Intracomm, split: Any, alone: Any, saves: bool, what: str) -> None:
    """Compare all ways to save a model, and the model when it is closed."""
    expected = {key: x.detach() for key, x in alone.state_dict().items()}
    file = io.BytesIO()
    torch.save(split.state_dict(), file)
    file.seek(0)
    agree(comm, whole(torch.load(file)), whole(expected), f"torch.save, {what}")
    agree(comm, gather_state_dict(split), whole(expected), f"gather_state_dict, {what}")
    if saves:
        again = Model(alone.act, 0)
        again.batch = None if alone.batch is None else torch.zeros_like(alone.batch)
        with folder_of_all(comm) as folder:
            with Checkpoints(folder / "run") as checkpoints:
                checkpoints.save({"model": split}, 1)
            load_checkpoint(folder / "run", into=again)
        agree(comm, whole(dict(again.state_dict())), whole(expected), f"Checkpoints, {what}")
    split.distributed.close()
    agree(comm, dict(split.named_buffers()), dict(alone.named_buffers()), f"close(), {what}")


def agree(comm: MPI.Intracomm, mine: Any, theirs: Any, what: str) -> None:
    """Raise on all ranks if two things differ on one."""
    no_problem(comm, difference(mine, theirs, ""), what)
