"""Random programs of torch's functions on split tensors, against the same programs on whole ones.

A program is either a few lines that follow each other, or one function on a sample of torch's own. It runs
in a type, under autocast or not, in checkpoints or not; of tensors that are cut in any blocks.
"""

from __future__ import annotations

import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import torch
from mpi4py import MPI
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import Partition
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.intervals import Balanced, Listed, Split
from distdl_rma.layers.split import SplitTensor
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.table import RULES
from tests.fuzz import nonfinite, samples
from tests.fuzz.functions import call
from tests.fuzz.outcomes import no_problem, outcome, same_end
from tests.fuzz.scope import Scope

# All ranks see what one of them sees: a search goes on behind a finding.
COLLECTIVE = True
# Numbers beyond this, and nan, say nothing of programs that differ by rounding.
LARGEST = 1e4
MOST_ELEMENTS = 4000
GRIDS = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,), (3, 1)], 4: [(4,), (2, 2), (2, 1, 2)]}
# Functions that were refused, by the names that their errors give them.
REFUSED: Counter[str] = Counter()
# How often each function was in a program that was compared to the end, and how, by its name.
CALLED: defaultdict[str, Counter[str]] = defaultdict(Counter)
WAYS = "at all", "with a gradient", "with an empty block", "under autocast", "in a checkpoint"
# What is no function of elements, or refused.
NOT_COMPARED = {"query", "value", "gradient", "creation", "refused", "registered"}
# Inputs are changed so often by a rounding, to see how much a result changes by it.
CHANGES = 8
# So much rounding, in parts of the largest number of a result. Whole numbers are equal.
ROUNDING = dict.fromkeys((torch.float64, torch.complex128), 1e-8)
ROUNDING |= dict.fromkeys((torch.float32, torch.complex64), 1e-4)
ROUNDING |= {torch.bfloat16: 4e-2, torch.float16: 5e-3}


@dataclass
class Program:
    """Lines, each of which gives a tensor its name, and what they begin with."""

    lines: list[str]
    split: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]
    # Names of what its result is made of.
    ends: list[str]
    # What torch raises in the last line.
    error: Exception | None = None
    constants: dict[str, Any] = field(default_factory=dict)
    autocast: bool = False
    checkpoints: int = 0  # one within another
    # Random numbers of elements are others than torch's of the whole: types and shapes are compared.
    drawn: bool = False

    def __str__(self) -> str:
        given = {**self.split, **self.plain}
        shapes = {name: (tuple(x.shape), str(x.dtype)) for name, x in given.items()}
        modes = ", autocast" * self.autocast + ", checkpoint" * self.checkpoints
        needs = [name for name, x in given.items() if x.requires_grad]
        first = f"shapes {shapes}, gradients of {', '.join(needs)}{modes}"
        return "\n    ".join([first, *(f"{name} = {c!r}" for name, c in self.constants.items()), *self.lines])

    def compiled(self) -> Callable[..., dict[str, Any]]:
        """The program as a function, so that every call in it has a place."""
        arguments = ", ".join((*self.split, *self.plain))
        body = "".join(f"    {line}\n" for line in self.lines)
        found: dict[str, Any] = {}
        code = f"def program({arguments}):\n{body}    return locals()\n"
        exec(compile(code, "program.py", "exec"), {**NAMES, **self.constants}, found)
        program: Callable[..., dict[str, Any]] = found["program"]
        return program

    def run(
        self, function: Callable[..., Any], given: Sequence[torch.Tensor], seed: int = 5
    ) -> dict[str, Any]:
        """All tensors of the program, and one number of them."""
        torch.default_generator.manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            run: Any = function
            for _ in range(self.checkpoints):
                run = partial(checkpoint, run, use_reentrant=False)
            found = run(*given)
        total = torch.zeros((), dtype=torch.float64)
        for name in self.ends:
            for at, y in enumerate(_tensors(found[name])):
                if y.requires_grad and (y.is_floating_point() or y.is_complex()):
                    wide = torch.complex128 if y.is_complex() else torch.float64
                    weight = torch.randn(y.shape, dtype=wide, generator=torch.Generator().manual_seed(at))
                    sum_of_it = (y.to(wide) * weight).sum()
                    total = total + (sum_of_it.real if sum_of_it.is_complex() else sum_of_it)
        return {**found, "total": total}


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple, dict)):
        for each in found.values() if isinstance(found, dict) else found:
            yield from _tensors(each)


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


def program_of(seed: int) -> Program:
    """Program of a seed."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.35:
        return random_program(seed)
    if kind < 0.55:
        return nonfinite_program(seed)
    while True:
        try:
            return sampled_program(rng, seed)
        except samples.NoSample:
            continue


def sampled_program(rng: random.Random, seed: int) -> Program:
    """One function on a sample of torch's."""
    text, wrong = samples.drawn(rng, NAMES)
    given = text.tensors
    short = any(x.dtype in (torch.float32, torch.bfloat16) for x in given.values())
    kept = {name for name, x in given.items() if rng.random() < (0.5 if x.dim() else 0.1)}
    first = next((name for name, x in given.items() if x.dim()), None)
    if not given:
        raise samples.NoSample
    if not kept or rng.random() < 0.7:
        kept.add(first or next(iter(given)))
    if text.takes_any and rng.random() < 0.3:
        given[first or next(iter(given))] = nonfinite.values_in(rng, given[first or next(iter(given))])
    split = {name: x for name, x in given.items() if name in kept}
    plain = {name: x for name, x in given.items() if name not in kept}
    ends = ["v0", *(["y"] if text.lines[-1].startswith("v0 = y.") else [])]
    found = Program(text.lines, split, plain, ends, None, text.constants)
    found.autocast = short and rng.random() < 0.35
    found.checkpoints = _checkpoints(rng)
    function = found.compiled()
    alone = replace(found, checkpoints=0)

    def ran(seed: int) -> tuple[Any, Exception | None]:
        return outcome(lambda: alone.run(function, [x.detach().clone() for x in _inputs(found)], seed))

    y, found.error = ran(5)
    if found.error is not None:
        if wrong or rng.random() < 0.2:
            return found
        raise samples.NoSample
    if not isinstance(y["v0"], (torch.Tensor, list, tuple, bool, int, float, type(None))):
        raise samples.NoSample
    if any(x.numel() > MOST_ELEMENTS for x in _tensors(y["v0"])) or _differences(ran(5)[0], y, 0):
        # Too much, or whatever is in the memory.
        raise samples.NoSample
    # What is drawn of few elements is often the same by another seed.
    ran(5)
    found.drawn = not torch.default_generator.get_state().equal(_state_of(5))
    return found


def nonfinite_program(seed: int) -> Program:
    """A line that makes infinite elements or NaN, and one that calls a function of them."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    scope = Scope(rng, rng.choice([torch.float64] * 3 + [torch.float32, torch.bfloat16]))
    kind = rng.choice(["masked", "masked", "values", "values", "nothing", "large"])
    if kind == "large":
        scope.dtype = torch.float64
    dims = rng.choice([1, 2, 2, 3, 4, 4])
    name = scope.input(*(rng.randint(1, 7 if dims < 4 else 5) for _ in range(dims)))
    if kind == "values":
        scope.split[name] = nonfinite.values_in(rng, scope.split[name])
    lines = nonfinite.lines_of(scope, name, scope.split[name], kind)
    return Program(lines, scope.split, scope.plain, ["v1"], checkpoints=_checkpoints(rng))


def _state_of(seed: int) -> torch.Tensor:
    torch.default_generator.manual_seed(seed)
    return torch.default_generator.get_state()


def random_program(seed: int) -> Program:
    """A few lines that follow each other."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    kind = rng.random()
    dtype = torch.float64 if kind < 0.7 else torch.float32
    autocast = kind > 0.85
    scope = Scope(rng, dtype)
    least = 0 if rng.random() < 0.1 else 1
    dims = rng.choice([1, 2, 3, 3, 4, 4, 4, 5])
    first = scope.input(*(rng.randint(least, 9 if dims < 4 else 5) for _ in range(dims)))
    scope.of_split.append(first)
    lines: list[str] = []
    # What is rounded much differs more with every line.
    wanted, error = rng.randint(1, 2) if autocast else rng.randint(2, 8), None
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
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = eval(text, NAMES, dict(scope.tensors))
        except Exception as caught:
            if rng.random() < 0.04 and lines:
                error = caught
                lines.append(f"{name} = {text}")
                break
            y = None
        torch.set_rng_state(state)
        if isinstance(y, torch.Tensor) and _tame(y, {dtype, torch.bfloat16} if autocast else {dtype}):
            lines.append(f"{name} = {text}")
            scope.tensors[name] = y
            if set(re.findall(r"\b[xv]\d+", text)) & set(scope.of_split + list(scope.split)):
                scope.of_split.append(name)
        else:
            scope.tensors, scope.split, scope.plain = before
    last, others = scope.of_split[-1:], [n for n in scope.of_split if rng.random() < 0.15]
    ends, checkpoints = [*dict.fromkeys(last + others)], _checkpoints(rng)
    return Program(lines, scope.split, scope.plain, ends, error, {}, autocast, checkpoints)


def _checkpoints(rng: random.Random) -> int:
    return rng.choice((1, 1, 2)) if rng.random() < 0.15 else 0


def _tame(y: torch.Tensor, dtypes: set[torch.dtype]) -> bool:
    if y.dtype not in dtypes or y.numel() > MOST_ELEMENTS or y.dim() > 5:
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


def check(P_world: Partition, comm: MPI.Intracomm, seed: int) -> None:
    """Raise if the program of a seed has other numbers, gradients or errors on split tensors; collective."""
    # Torch draws some samples from sets, whose order is that of the hashes of a process.
    program = comm.bcast(program_of(seed) if comm.rank == 0 else None)
    compare(P_world, comm, program, random.Random(seed))


def compare(P_world: Partition, comm: MPI.Intracomm, program: Program, rng: random.Random) -> None:
    """Raise if a program differs from itself on whole tensors; of inputs that are cut at random."""
    P = P_world.create_cartesian_topology_partition(rng.choice(GRIDS[comm.size]))
    layouts = {name: random_layout(rng, P, tuple(x.shape)) for name, x in program.split.items()}
    cuts = {name: (lay.described(each), each.splits) for name, each in layouts.items()}
    what = f"{program}\n    {cuts} of {P.shape}"
    text = "\n".join(program.lines)
    # Torch changes running statistics that a checkpoint was given, without an error.
    if _FAULT_OF_TORCH.search(text) or (program.checkpoints and re.search("(batch|instance)_norm", text)):
        return
    function = program.compiled()
    modes = program.autocast, program.checkpoints
    changes = cache(partial(sensitivity, program, function))
    for time in range(rng.randint(1, 2)):
        wholes = [x.detach().clone().requires_grad_(x.requires_grad) for x in _inputs(program)]
        expected, theirs = outcome(lambda wholes=wholes: program.run(function, wholes))
        given: list[torch.Tensor] = []
        for name, x in (*program.split.items(), *program.plain.items()):
            layout = layouts.get(name)
            mine = x.detach() if layout is None else x.detach()[layout.slices()]
            mine = mine.clone().requires_grad_(x.requires_grad)
            given.append(mine if layout is None else SplitTensor(mine, layout))
        found, mine_error = outcome(lambda given=given: program.run(function, given))
        if not same_end(comm, mine_error, theirs, what, REFUSED):
            return
        if expected["total"].requires_grad:
            _, theirs = outcome(expected["total"].backward)
            if "ill-defined" in str(theirs):
                # Only ranks with the values that torch refuses raise it themselves.
                return
            _, mine_error = outcome(found["total"].backward)
            # What torch refuses to differentiate, blocks may allow.
            if not same_end(comm, mine_error, mine_error and theirs, what, REFUSED) or theirs is not None:
                return
        ways = (True, expected["total"].requires_grad, any(each.leaves_out for each in layouts.values()))
        for called in set(re.findall(r"\.(\w+)\(", " ".join(program.lines))):
            CALLED[called].update(way for way, is_so in zip(WAYS, (*ways, *modes), strict=True) if is_so)
        rounding = torch.inf if program.drawn or _tells_zeros(program, expected) else _rounding(program)
        for name, y in expected.items():
            if name == "total" and program.drawn:
                continue
            _agree(comm, found[name], y, rounding, f"{name}, time {time}, of {what}", name, changes)
        for name, one, other in zip(expected, given, wholes, strict=False):
            if not other.requires_grad:
                continue
            # Of a plain tensor, nobody's parameter, gradients are summed where it is used.
            got, wanted = (torch.zeros_like(x) if x.grad is None else x.grad for x in (one, other))
            grad = f"gradient of {name}"
            _agree(comm, got, wanted, rounding, f"{grad}, time {time}, of {what}", grad, changes)


# By name the numbers of a program in double, and by how much they change.
Exact = dict[str, tuple[list[torch.Tensor], float]]


def sensitivity(program: Program, function: Callable[..., dict[str, Any]]) -> Exact:
    """Numbers of a program, by name, and how much they change where its inputs do by a rounding.

    Computed in double, a rounding being that of the shortest type: of sums that cancel the rounding of terms
    is more than a part of the result.
    """
    dtypes = {x.dtype for x in _inputs(program)} & ROUNDING.keys()
    dtypes |= {torch.bfloat16} if program.autocast else set()
    eps = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    alone, runs = replace(program, autocast=False, checkpoints=0), []
    for seed in range(1 + CHANGES):
        generator = torch.Generator().manual_seed(seed)
        given = []
        for x in _inputs(program):
            y = x.detach().clone()
            if y.dtype in ROUNDING:
                change = 2 * torch.rand(y.shape, dtype=torch.float64, generator=generator) - 1
                wide = torch.complex128 if y.is_complex() else torch.float64
                y = y.to(wide) * (1 + bool(seed) * eps * change)
            given.append(y.requires_grad_(x.requires_grad))
        found, error = outcome(partial(alone.run, function, given))
        if error is None and found["total"].requires_grad:
            _, error = outcome(found["total"].backward)
        if error is not None:
            return {}
        names = (*program.split, *program.plain)
        grads = {f"gradient of {name}": x.grad for name, x in zip(names, given, strict=True)}
        runs.append({name: [*_tensors(y)] for name, y in {**found, **grads}.items()})
    return {name: (ys, max(_distance(run[name], ys) for run in runs)) for name, ys in runs[0].items()}


def _distance(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    found = 0.0
    for x, y in zip(ones, others, strict=False):
        if x.shape == y.shape and x.numel() and x.dtype in ROUNDING:
            found = max(found, (x - y).detach().abs().nan_to_num(0, 0, 0).max().item())
    return found


def coverage() -> Iterator[str]:
    """Which functions that have a rule no program had so far, or not in some way."""
    known = (function for function, rule in RULES.items() if rule.kind not in NOT_COMPARED)
    # The lists of an optimizer are no programs.
    names = {name for name in map(samples.plain_name, known) if not name.startswith("_")} - {""}
    for way in WAYS:
        missing = sorted(name for name in names if not CALLED[name][way])
        yield f"{len(missing)} of {len(names)} functions never {way}: {', '.join(missing)}"


# What gives another result for -0.0 than for 0.0, which sums over ranks do not tell apart.
_OF_SIGN = re.compile(r"a(rc)?tan2|copysign|signbit|angle")


def _tells_zeros(program: Program, found: dict[str, Any]) -> bool:
    zeros = any(bool((y == 0).any()) for each in found.values() for y in _tensors(each))
    return zeros and bool(_OF_SIGN.search("\n".join(program.lines)))


# The median of a tensor that is expanded, for which torch takes other elements.
_FAULT_OF_TORCH = re.compile(r"expand.*(median|kthvalue)", re.DOTALL)


def _inputs(program: Program) -> list[torch.Tensor]:
    return [*program.split.values(), *program.plain.values()]


def _rounding(program: Program) -> float:
    # That of its shortest type: what is computed in a longer one was rounded to it before.
    dtypes = {x.dtype for x in _inputs(program)} | ({torch.bfloat16} if program.autocast else set())
    written = set(re.findall(r"torch\.(bfloat16|float16|float32)", " ".join(program.lines)))
    dtypes |= {getattr(torch, name) for name in written}
    return max((ROUNDING.get(dtype, 0.0) for dtype in dtypes), default=0.0)


def _agree(
    comm: MPI.Intracomm,
    found: Any,
    expected: Any,
    rounding: float,
    what: str,
    name: str,
    changes: Callable[[], Exact],
) -> None:
    # Raised on all ranks where one sees a difference, larger than what a rounding of the inputs changes.
    error = None
    try:
        found = [x.full_tensor() if isinstance(x, SplitTensor) else x for x in _tensors(found)] or found
        problem = _differences(found, expected, rounding)
        if problem and rounding:
            exact, change = changes().get(name, ([], 0.0))
            problem = _differences(found, expected, rounding, 4 * change)
            if problem and [x.shape for x in exact] == [x.shape for x in _tensors(expected)]:
                # Torch may round worse: no farther from the exact numbers than torch is right as well.
                torchs = _distance([*_tensors(expected)], exact)
                nearest = [x.to(y.dtype) for x, y in zip(exact, _tensors(expected), strict=True)]
                problem = _differences(found, nearest, rounding, torchs)
    except Exception as caught:
        error, problem = caught, repr(caught)
    no_problem(comm, problem, what, error)


def _differences(found: Any, expected: Any, rounding: float, more: float = 0.0) -> str:
    ones, others = [*_tensors(found)], [*_tensors(expected)]
    if len(ones) != len(others) or (not others and found != expected and found == found):
        return f"{found}, not {expected}"
    pairs = zip(ones, others, strict=True)
    return next(filter(None, (_difference(*pair, rounding, more) for pair in pairs)), "")


def _difference(found: torch.Tensor, expected: torch.Tensor, rounding: float, more: float) -> str:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return f"{found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
    if not found.numel() or rounding == torch.inf:
        return ""
    found, expected = found.detach(), expected.detach()
    if not (found.is_floating_point() or found.is_complex()):
        return "" if found.equal(expected) else f"{found.tolist()}, not {expected.tolist()}"
    wide = torch.complex128 if found.is_complex() else torch.float64
    rounding = max(rounding, ROUNDING.get(expected.dtype, 0.0))
    found, expected = found.to(wide), expected.to(wide)
    most = expected.abs().nan_to_num(0, 0, 0).max().item()
    atol = rounding * max(1.0, most) + more
    if torch.allclose(found, expected, rtol=0, atol=atol, equal_nan=True):
        return ""
    return f"differs by {(found - expected).abs().max()}, largest {most}"
