"""Public models that are tried, and how a step of one is compared with the model alone."""

from __future__ import annotations

import builtins
import importlib
import re
import traceback
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from tests.layers.model.public import torchvision_models

LIST = Path(__file__).with_name("models.txt")
# So many times what a rounding of the inputs changes of a tensor is a rounding, and so many are tried.
ROUNDINGS = 4


class Found(NamedTuple):
    """What came of a model: exact, differs, refused, fails, or fails alone; and a number or words."""

    outcome: str
    says: str


@dataclass(frozen=True)
class Tried:
    """A model of a package, what goes into it, and how this is cut."""

    package: str
    module: str
    name: str
    expression: str
    shapes: str
    cut: str
    precision: str

    @property
    def path(self) -> str:
        return f"{self.package}/{self.name}"

    def made(self) -> nn.Module:
        """The model in torch's default type, with random parameters of which none is zero.

        Nothing is drawn for each element: such numbers differ between a model and its split twin.
        """
        torchvision_models()  # Others import torchvision, too.
        torch.manual_seed(0)
        names = _Names(importlib.import_module(self.module))
        model: nn.Module = eval(self.expression, {}, names)
        model = model.double() if self.precision == "double" else model
        for module in model.modules():
            for name in ("p", "drop_prob", "dropout", "dropout_prob", "attention_dropout"):
                if isinstance(getattr(module, name, None), float):
                    setattr(module, name, 0.0)
        with torch.no_grad():
            for p in model.parameters():
                if p.is_complex():
                    p.data = p.to(torch.get_default_dtype().to_complex())  # double() leaves these.
                p += 0.02 * torch.randn_like(p)
        return model.train()

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Random tensors, or whole numbers below a limit."""
        torch.manual_seed(1)
        found = []
        for each in self.shapes.split():
            limit, _, shape = each.rpartition(":")
            size = [int(n) for n in shape.split("x")]
            found.append(torch.randint(int(limit[1:]), size) if limit else torch.rand(size))
        return tuple(found)


class _Names(dict[str, Any]):
    """Names of a module, which may import them when they are asked for, and torch's ``nn``."""

    def __init__(self, module: Any) -> None:
        super().__init__(nn=nn)
        self._module = module

    def __missing__(self, name: str) -> Any:
        return getattr(self._module, name, None) or getattr(builtins, name)


def models() -> Iterator[Tried]:
    """The models of the list, in its order."""
    package, module, form = "", "", "{}"
    for line in LIST.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            package, module, form = [*(part.strip() for part in line[1:-1].split("|")), "{}"][:3]
            continue
        expression, shapes, *rest = (part.strip() for part in line.split(" | "))
        cut, precision = (*rest, *("H", "double")[len(rest) :])
        named = re.match(r"([^=(]*)=(.*)", expression)
        name, expression = named.groups() if named else (expression.partition("(")[0], expression)
        if not named and "(" not in expression:
            expression = form.format(expression)
        yield Tried(package, module, name, expression, shapes, cut, precision)


def loss_of(y: Any) -> torch.Tensor:
    """A loss of all that a model returns, which no normalisation makes a constant."""
    from distdl_rma.layers.split.calls.signatures import tensors_in

    real = [each for each in tensors_in(y) if each.is_floating_point()]
    return sum((each.square().mean() + each.sin().mean() for each in real), torch.zeros(()))


def compared(model: Tried) -> Found:
    """What a step of the model says in its precision, collective over all ranks."""
    before = torch.get_default_dtype()
    torch.set_default_dtype({"double": torch.float64, "single": torch.float32}[model.precision])
    try:
        return _compared(model)
    finally:
        torch.set_default_dtype(before)


def _compared(model: Tried) -> Found:
    from mpi4py import MPI

    from distdl_rma import MPIPartition, SplitTensor, compare, distribute
    from distdl_rma.errors import DistdlError

    try:
        alone, x = model.made(), model.inputs()
        loss_of(alone(*x)).backward()
    except Exception as error:
        return Found("fails alone", _words(error))
    try:
        P_world = MPIPartition(MPI.COMM_WORLD)
        # A grid of letters is of images; words are samples by places.
        words = P_world.create_cartesian_topology_partition((P_world.size, 1)) if x[0].dim() == 2 else None
        split = distribute(model.made(), words or {model.cut: -1})
        if not any(isinstance(each, SplitTensor) for each in split.distributed.cut(x)):
            return Found("fails", "nothing is cut")
        found = compare(alone, split, x, loss_fn=loss_of)
        split.distributed.close()
    except DistdlError as error:
        return Found("refused", _words(error))
    except Exception as error:
        return Found("fails", f"{_words(error)} at {_place(error)}")
    apart = [each for each in found.differences if not each.equal]
    changes = _sensitivity(model) if apart else {}
    if found.drifted or not all(
        each.error <= ROUNDINGS * changes.get((each.what, each.name), 0.0) for each in apart
    ):
        return Found("differs", f"{found.first or 'not alike on the ranks: ' + ', '.join(found.drifted)}")
    # What ``compare`` tolerates, beside the largest elements.
    tolerated = torch.finfo(torch.get_default_dtype()).eps ** 0.6
    largest = max(each.error / each.tolerance for each in found.differences if each.tolerance)
    return Found("exact", f"{largest * tolerated:.0e}")


def _sensitivity(model: Tried) -> dict[tuple[str, str], float]:
    """By how much tensors of the model alone change, by name, if its inputs change by a rounding."""
    first, *others = (_results(model, seed) for seed in range(ROUNDINGS))
    return {
        key: max(
            (
                float((run[key][at] - x).abs().max())
                for run in others
                for at, x in enumerate(each)
                if x.numel()
            ),
            default=0.0,
        )
        for key, each in first.items()
    }


def _results(model: Tried, seed: int) -> dict[tuple[str, str], list[torch.Tensor]]:
    # All that ``compare`` looks at; inputs are rounded where the seed is not 0.
    from distdl_rma.layers.split.calls.signatures import tensors_in

    found: dict[tuple[str, str], list[torch.Tensor]] = defaultdict(list)
    generator, alone, given = torch.Generator().manual_seed(seed), model.made(), model.inputs()
    for at, x in enumerate(given):
        if x.is_floating_point():
            noise = 2 * torch.rand(x.shape, dtype=x.dtype, generator=generator) - 1
            x.mul_(1 + torch.finfo(x.dtype).eps * noise * bool(seed)).requires_grad_()
            x.register_hook(found["input gradient", f"input {at}"].append)
    for path, module in alone.named_modules():
        keep = found["output", path or "model"]
        module.register_forward_hook(
            lambda _module, _args, y, keep=keep: keep.extend(each.detach().clone() for each in tensors_in(y))
        )
    loss_of(alone(*given)).backward()
    for name, p in alone.named_parameters():
        if p.grad is not None:
            found["gradient", name].append(p.grad)
    return found


def one_line(text: str) -> str:
    """A text as a cell of a table has it: short, and without folders."""
    text = re.sub(r"\S*/([\w.]+\.py)", r"\1", " ".join(text.split())).partition(". Give it a rule")[0]
    return (text if len(text) <= 300 else f"{text[:300]} ...").replace("|", "/")


def _words(error: BaseException) -> str:
    return one_line(f"{type(error).__name__}: {error}")


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "distdl_rma/" in frame.filename] or list(frames)
    return f"{Path(ours[-1].filename).name} ({ours[-1].name})"
