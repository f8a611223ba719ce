"""Random programs of torch's functions on split tensors, against the same programs on whole ones."""

from __future__ import annotations

import random
import re
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI
from torch.nn import functional as F  # noqa: N812

from distdl_rma import Partition
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.split import SplitTensor
from distdl_rma.split import layout as lay
from tests.fuzz.functions import call
from tests.fuzz.scope import Scope

# Numbers beyond this, and nan, say nothing of programs that differ by rounding.
LARGEST = 1e4
MOST_ELEMENTS = 4000
GRIDS = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (2, 1, 2)]}
# Functions that were refused, by the names that their errors give them.
REFUSED: Counter[str] = Counter()


@dataclass
class Program:
    """Lines, each of which gives a tensor its name, and what they begin with."""

    lines: list[str]
    split: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    # What some of its tensors are multiplied with to make its result, by name.
    ends: dict[str, torch.Tensor]
    # What torch raises in the last line.
    error: Exception | None = None

    def __str__(self) -> str:
        shapes = {name: tuple(x.shape) for name, x in (*self.split.items(), *self.plain.items())}
        needs = [n for n, x in (*self.split.items(), *self.plain.items()) if x.requires_grad]
        return "\n    ".join([f"shapes {shapes}, gradients of {', '.join(needs)}", *self.lines])

    def compiled(self) -> Callable[..., dict[str, Any]]:
        """The program as a function, so that every call in it has a place."""
        arguments = ", ".join((*self.split, *self.plain))
        body = "".join(f"    {line}\n" for line in self.lines)
        found: dict[str, Any] = {}
        code = f"def program({arguments}):\n{body}    return locals()\n"
        exec(compile(code, "program.py", "exec"), NAMES, found)
        program: Callable[..., dict[str, Any]] = found["program"]
        return program


def wrote(x: torch.Tensor, change: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """A tensor that was changed in place."""
    change(x)
    return x


def moved(x: torch.Tensor, axes: list[int | None]) -> torch.Tensor:
    """The same tensor, cut otherwise if it is split."""
    return x.redistribute(*axes[: x.partition.dim]) if isinstance(x, SplitTensor) else x


NAMES = {
    "torch": torch,
    "F": F,
    "wrote": wrote,
    "moved": moved,
    "seeded": lambda n: torch.manual_seed(n) and None,
}


def random_program(seed: int) -> Program:
    """Program of a seed, alike on all ranks."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    scope = Scope(rng)
    least = 0 if rng.random() < 0.1 else 1
    dims = rng.choice([1, 2, 3, 3, 4, 4, 4, 5])
    first = scope.input(*(rng.randint(least, 9 if dims < 4 else 5) for _ in range(dims)))
    scope.of_split.append(first)
    lines: list[str] = []
    wanted, error = rng.randint(2, 8), None
    for _ in range(60):
        if len(lines) == wanted or error is not None:
            break
        names = scope.of_split
        v = names[-1] if rng.random() < 0.8 else rng.choice(names)
        before = dict(scope.tensors), dict(scope.split), dict(scope.plain)
        text, state = call(scope, v), torch.get_rng_state()
        if text is None:
            continue
        name = f"v{len(lines)}"
        try:
            y = eval(text, NAMES, dict(scope.tensors))
        except Exception as caught:
            if rng.random() < 0.04 and lines:
                error = caught
                lines.append(f"{name} = {text}")
                break
            y = None
        torch.set_rng_state(state)
        if isinstance(y, torch.Tensor) and _tame(y):
            lines.append(f"{name} = {text}")
            scope.tensors[name] = y
            if set(re.findall(r"\b[xv]\d+", text)) & set(scope.of_split + list(scope.split)):
                scope.of_split.append(name)
        else:
            scope.tensors, scope.split, scope.plain = before
    last, others = scope.of_split[-1:], [n for n in scope.of_split if rng.random() < 0.15]
    ends = {n: torch.randn(scope.tensors[n].shape, dtype=torch.float64) for n in dict.fromkeys(last + others)}
    return Program(lines, scope.split, scope.plain, ends, error)


def _tame(y: torch.Tensor) -> bool:
    if y.dtype != torch.float64 or y.numel() > MOST_ELEMENTS or y.dim() > 5:
        return False
    return bool(y.isfinite().all() and (y.abs() < LARGEST).all())


def random_layout(rng: random.Random, P: Partition, shape: tuple[int, ...]) -> Decomposition:
    """Any dimensions cut by any grid dimensions, in balanced or any blocks."""
    dims = rng.sample(range(len(shape)), min(len(shape), P.dim))
    axes: list[int | None] = [*dims, *[None] * (P.dim - len(dims))]
    rng.shuffle(axes)
    axes = [None if rng.random() < 0.2 else axis for axis in axes]
    splits: list[Split] = [Balanced(n, 1) for n in shape]
    for axis, places in zip(axes, P.shape, strict=True):
        if axis is None:
            continue
        splits[axis] = Balanced(shape[axis], places)
        if rng.random() < 0.3:
            ends = sorted(rng.randint(0, shape[axis]) for _ in range(places - 1))
            splits[axis] = Listed(tuple(b - a for a, b in zip([0, *ends], [*ends, shape[axis]], strict=True)))
    return lay.layout(P, splits, tuple(axes))


def _run(program: Program, function: Callable[..., Any], given: list[torch.Tensor]) -> dict[str, Any]:
    # All tensors of a program, and one number of them.
    torch.manual_seed(5)
    found = function(*given)
    total = sum(((found[name] * weight).sum() for name, weight in program.ends.items()), torch.zeros(()))
    found["total"] = total
    return found


def _outcome(act: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return act(), None
    except Exception as error:
        return None, error


def check(P_world: Partition, comm: MPI.Intracomm, seed: int) -> None:
    """Raise if the program of a seed has other numbers, gradients or errors on split tensors; collective."""
    program, rng = random_program(seed), random.Random(seed)
    compare(P_world, comm, program, rng)


def compare(P_world: Partition, comm: MPI.Intracomm, program: Program, rng: random.Random) -> None:
    """Raise if a program differs from itself on whole tensors; of inputs that are cut at random."""
    P = P_world.create_cartesian_topology_partition(rng.choice(GRIDS[comm.size]))
    layouts = {name: random_layout(rng, P, tuple(x.shape)) for name, x in program.split.items()}
    what = f"{program}\n    {[lay.described(each) for each in layouts.values()]} of {P.shape}"
    function = program.compiled()
    for time in range(rng.randint(1, 2)):
        wholes = [x.detach().clone().requires_grad_(x.requires_grad) for x in _inputs(program)]
        expected, theirs = _outcome(lambda wholes=wholes: _run(program, function, wholes))
        given: list[torch.Tensor] = []
        for name, x in (*program.split.items(), *program.plain.items()):
            layout = layouts.get(name)
            mine = x.detach() if layout is None else x.detach()[layout.slices()]
            mine = mine.clone().requires_grad_(x.requires_grad)
            given.append(mine if layout is None else SplitTensor(mine, layout))
        found, mine_error = _outcome(lambda given=given: _run(program, function, given))
        if not _same_end(comm, mine_error, theirs, what):
            return
        if expected["total"].requires_grad:
            _, theirs = _outcome(expected["total"].backward)
            _, mine_error = _outcome(found["total"].backward)
            # What torch refuses to differentiate, blocks may allow.
            if not _same_end(comm, mine_error, mine_error and theirs, what) or theirs is not None:
                return
        for name, y in expected.items():
            if isinstance(y, torch.Tensor):
                one = found[name].full_tensor() if isinstance(found[name], SplitTensor) else found[name]
                _agree(comm, one, y, f"{name}, time {time}, of {what}")
        for name, one, other in zip(expected, given, wholes, strict=False):
            if not other.requires_grad:
                continue
            gradient = torch.zeros_like(other) if other.grad is None else other.grad
            if isinstance(one, SplitTensor):
                got = one.grad.full_tensor() if one.grad is not None else torch.zeros_like(other)
            else:
                # Nobody's parameter: summed where it is used.
                got = torch.zeros_like(other) if one.grad is None else one.grad
            _agree(comm, got, gradient, f"gradient of {name}, time {time}, of {what}")


def _inputs(program: Program) -> list[torch.Tensor]:
    return [*program.split.values(), *program.plain.values()]


def _same_end(comm: MPI.Intracomm, mine: Exception | None, theirs: Exception | None, what: str) -> bool:
    # Whether there is something to compare: every rank, and torch alone, came to the end.
    told = comm.allgather(None if mine is None else (type(mine).__name__, str(mine)))
    kinds = {None if each is None else each[0] for each in told}
    if kinds == {"UnsupportedError"}:
        REFUSED[str(mine).split(" at ")[0].split(": ")[0]] += 1
        return False
    if len(kinds) > 1:
        raise AssertionError(f"ranks end otherwise: {told}: {what}") from mine
    if mine is not None and theirs is None:
        raise AssertionError(f"an error that torch has not: {mine!r}: {what}") from mine
    if theirs is not None and mine is None:
        raise AssertionError(f"torch alone raises {theirs!r}, split tensors nothing: {what}")
    return mine is None and theirs is None


def _agree(comm: MPI.Intracomm, found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    # Raised on all ranks where one sees a difference.
    problem = ""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        problem = f"{found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    elif found.numel():
        most = expected.detach().abs().nan_to_num(0, 0, 0).max().item()
        tolerance = 1e-8 * max(1.0, most)
        if not torch.allclose(found.detach(), expected.detach(), rtol=0, atol=tolerance, equal_nan=True):
            problem = f"differs by {(found - expected).detach().abs().max()}, largest {most}"
    problems = [each for each in comm.allgather(problem) if each]
    if problems:
        raise AssertionError(f"{problems[0]} ({len(problems)} ranks): {what}")
