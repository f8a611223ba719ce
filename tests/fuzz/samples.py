"""Programs of one function of torch, by torch's own samples of its arguments."""

from __future__ import annotations

import inspect
import math
import pickle
import random
import re
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from typing import Any

import torch

from distdl_rma.layers.split.calls.table import RULES, functions_named
from tests.fuzz.nonfinite import SAMPLED

# What cannot be compared, and why.
EXCLUDED = {
    **dict.fromkeys(("empty_like", "new_empty", "new_empty_strided"), "its elements are what memory holds"),
    **dict.fromkeys(("median", "nanmedian"), "torch reads garbage of an expanded tensor"),
    "cov": "torch changes its input",
}
DTYPES = {
    torch.float64: 8, torch.float32: 6, torch.bfloat16: 5, torch.float16: 1, torch.complex128: 3,
    torch.complex64: 1, torch.int64: 2, torch.int16: 2, torch.uint8: 1, torch.bool: 2,
}  # fmt: skip
MOST_ELEMENTS = 4000


class NoSample(Exception):
    """A seed has no program: what it drew has no text, or torch alone fails."""


def plain_name(function: Any) -> str:
    """Name of a function without its module, which those of C have in front."""
    return re.sub("^(linalg|special|fft)_", "", getattr(function, "__name__", ""))


@cache
def operations() -> list[Any]:
    """Torch's descriptions of the functions that have a rule."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    # The import takes the right to switch kernels off, which the library does around some of torch's.
    torch.backends.flags_frozen.__globals__["__allow_nonbracketed_mutation_flag"] = True
    named = {plain_name(function) for function in RULES}
    found = []
    for op in op_db:
        names = {name.rpartition(".")[2] for name in _names(op)}
        if names & named and not names & set(EXCLUDED):
            found.append(op)
    return found


def drawn_samples(op: Any, dtype: torch.dtype, needs_grad: bool) -> Iterator[Any]:
    """Torch's samples of a function's arguments; without its look at the stack for each, which takes long."""
    return iter(op.sample_inputs_func(op, "cpu", dtype, needs_grad))


def drawn_errors(op: Any) -> Iterator[Any]:
    """Torch's samples of arguments that a function refuses."""
    return iter(op.error_inputs_func(op, "cpu"))


def _names(op: Any) -> list[str]:
    return [op.name, *(alias.name for alias in op.aliases)]


def _sample(rng: random.Random, op: Any, dtype: torch.dtype, wrong: bool) -> Any:
    # One of the first few or of the first many: torch has hundreds for some functions.
    torch.default_generator.manual_seed(rng.randrange(100))
    random.seed(0)
    last = rng.randrange(rng.choice([8, 64, 512]))
    needs = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            makes = drawn_errors(op) if wrong else drawn_samples(op, dtype, needs)
            (found,) = deque(islice(makes, last + 1), maxlen=1)
    except Exception:
        raise NoSample from None
    return found.sample_input if wrong else found


class Text:
    """A call as text, with the tensors and the other values that it names."""

    def __init__(self, rng: random.Random, names: dict[str, Any]) -> None:
        self.rng, self.names = rng, names
        self.tensors: dict[str, torch.Tensor] = {}
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        # Whether its elements may be infinite or NaN.
        self.takes_any = False

    def tensor(self, x: torch.Tensor) -> str:
        """A name for a tensor, which may be what is left of another one."""
        if x.layout != torch.strided or x.is_nested or x.numel() > MOST_ELEMENTS or x.dim() > 6:
            raise NoSample
        name, more = f"x{len(self.tensors)}", x.detach().clone()
        way = self.rng.random()
        if way < 0.1 and x.dim() and x.shape[0]:
            more = torch.cat([more, more[:1]])
            self.lines.append(f"i{name} = {name}[:{x.shape[0]}]")
        elif way < 0.2 and x.dim() > 1:
            more = more.mT.clone()
            self.lines.append(f"i{name} = {name}.mT")
        self.tensors[name] = more.contiguous().requires_grad_(x.requires_grad)
        return f"i{name}" if self.lines and self.lines[-1].startswith(f"i{name} ") else name

    def of(self, value: Any) -> str:
        """Any argument."""
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if type(value) in (list, tuple):
            inner = ", ".join(map(self.of, value))
            return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' * (len(value) == 1)})"
        if isinstance(value, float) and not math.isfinite(value):
            return f"float('{value}')"
        text = repr(value)
        try:
            if type(eval(text, dict(self.names))) is type(value):
                return text
        except Exception:
            pass
        if callable(value):
            raise NoSample
        try:
            pickle.dumps(value)
        except Exception:
            raise NoSample from None
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name


@cache
def _signatures() -> dict[Any, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.overrides.get_testing_overrides()


def _parameters(name: str) -> list[str]:
    # What torch calls the arguments of a function.
    for function in functions_named(name):
        stub = _signatures().get(function)
        if stub is not None:
            return [*inspect.signature(stub).parameters]
    return []


def _forms(op: Any) -> Iterator[tuple[str, bool]]:
    # How a function may be called: its text up to the arguments, with the place of the first; in place?
    for name in _names(op):
        short = name.rpartition(".")[2]
        if short in EXCLUDED:
            continue
        if resolved(f"torch.{name}") is not None:
            yield f"torch.{name}(", False
        if "." not in name and hasattr(torch.Tensor, short):
            yield f".{short}(", False
        if hasattr(torch.Tensor, f"{short}_"):
            yield f".{short}_(", True
        elif resolved(f"torch.{name}_") is not None:
            yield f"torch.{name}_(", True


def resolved(path: str) -> Any:
    """What a dotted name means, if anything that is called."""
    found: Any = torch
    for part in path.split(".")[1:]:
        found = getattr(found, part, None)
    return found if callable(found) else None


def drawn(rng: random.Random, names: dict[str, Any]) -> tuple[Text, bool]:
    """A call of a function on one of its samples, and whether torch is to refuse it."""
    op = rng.choice(operations())
    dtypes = [dtype for dtype in DTYPES if dtype in op.supported_dtypes("cpu")]
    if not dtypes:
        raise NoSample
    (dtype,) = rng.choices(dtypes, [DTYPES[each] for each in dtypes])
    wrong = rng.random() < 0.06 and op.error_inputs_func is not None
    sample, forms = _sample(rng, op, dtype, wrong), [*_forms(op)]
    if not forms:
        raise NoSample
    form, in_place = rng.choice(forms)
    text = Text(rng, names)
    text.takes_any = op.name in SAMPLED.split()
    given, named = [sample.input, *sample.args], dict(sample.kwargs)
    _said_otherwise(rng, op, given, named, 1 if in_place or form.startswith(".") else 0)
    arguments = [text.of(each) for each in given]
    if in_place:
        # Not what a leaf is, but a copy, or a part of one.
        text.lines.append(f"y = {arguments[0]}.clone()")
        arguments[0] = "y"
    by_name = [f"{key}={text.of(value)}" for key, value in named.items()]
    rng.shuffle(by_name)
    arguments += by_name
    if form.startswith("."):
        if not isinstance(sample.input, torch.Tensor):
            raise NoSample
        call = f"{arguments[0]}{form}{', '.join(arguments[1:])})"
    else:
        call = f"{form}{', '.join(arguments)})"
    text.lines.append(f"v0 = {call}")
    return text, wrong


def _said_otherwise(rng: random.Random, op: Any, given: list[Any], named: dict[str, Any], least: int) -> None:
    # Arguments by name in place of by order, all but the ``least`` first, and dimensions from the end.
    names, first = _parameters(op.name.rpartition(".")[2]), given[0]
    if len(names) >= len(given) and rng.random() < 0.3:
        keep = rng.randint(least, len(given))
        moved = dict(zip(names[keep:], given[keep : len(given)], strict=False))
        if not moved.keys() & named.keys():
            named.update(moved)
            del given[keep:]
    if isinstance(first, torch.Tensor) and first.dim() and rng.random() < 0.3:
        change: Callable[[int], int] = lambda d: d - first.dim() if 0 <= d < first.dim() else d  # noqa: E731
        for key in named.keys() & {"dim", "axis", "dims"}:
            value = named[key]
            if type(value) is int:
                named[key] = change(value)
            elif isinstance(value, (tuple, list)) and all(type(d) is int for d in value):
                named[key] = type(value)(map(change, value))
