"""Random search: every loss, over its arguments, partitions and shards, against the sequential one."""

import itertools
import random
import warnings
from dataclasses import dataclass, field
from math import prod

import torch
from torch import nn

from distdl_rma import ShapeError, layers

ELEMENTWISE = (
    "L1Loss",
    "MSELoss",
    "SmoothL1Loss",
    "HuberLoss",
    "BCELoss",
    "BCEWithLogitsLoss",
    "KLDivLoss",
    "PoissonNLLLoss",
)
CLASSES = ("CrossEntropyLoss", "NLLLoss")
KINDS = ELEMENTWISE + CLASSES * 3


@dataclass
class Case:
    """Arguments of one loss, global tensors, and which part of them each position of the grid holds."""

    kind: str
    members: tuple[int, ...]
    grid: tuple[int, ...]
    lengths: list[list[int]]
    reduction: str
    arguments: dict = field(default_factory=dict)
    ragged: list[tuple[int, ...]] = field(default_factory=list)
    input: torch.Tensor = None
    target: torch.Tensor = None

    @property
    def classes(self):
        """Dimension of the classes, None if there is none."""
        return min(1, len(self.grid) - 1) if self.kind in CLASSES else None

    @property
    def splits_classes(self):
        return self.kind in CLASSES and self.grid[self.classes] > 1

    def cut(self, tensor, P_x):
        """This rank's part of a global tensor, which may lack the dimension of classes."""
        if not P_x.active:
            return tensor.new_empty(0)
        if self.ragged:
            start = sum(prod(shape) for shape in self.ragged[: P_x.rank])
            shape = self.ragged[P_x.rank]
            return tensor[start : start + prod(shape)].reshape(shape).detach().clone()
        slices = []
        for parts, at in zip(self.lengths, P_x.index, strict=True):
            start = sum(parts[:at])
            slices.append(slice(start, start + parts[at]))
        if tensor.dim() < len(slices):
            del slices[self.classes]
        return tensor[tuple(slices)].detach().clone()


def random_case(rng: random.Random, size: int) -> Case:
    """A loss with legal arguments on a partition of some of the ranks, in some order."""
    kind = rng.choice(KINDS)
    members = tuple(rng.sample(range(size), rng.randint(1, size)))
    dims = rng.randint(1, 4)
    grid = rng.choice([g for g in itertools.product(*[range(1, size + 1)] * dims) if prod(g) == len(members)])
    split_classes = kind in CLASSES and grid[min(1, dims - 1)] > 1
    reductions = (
        ["mean", "mean", "sum"] + ["none"] * (not split_classes) + ["batchmean"] * (kind == "KLDivLoss")
    )
    case = Case(kind, members, grid, [], rng.choice(reductions))
    weighted = kind.startswith("BCE") and rng.random() < 0.6
    case.lengths = [random_lengths(rng, parts, even=weighted) for parts in grid]
    if kind in CLASSES and sum(case.lengths[case.classes]) < 2:
        case.lengths[case.classes][-1] += 2
    if kind in ELEMENTWISE and not weighted and case.reduction != "batchmean" and rng.random() < 0.2:
        case.ragged = [tuple(rng.randint(0, 3) for _ in grid) for _ in members]
        shape = (sum(prod(local) for local in case.ragged),)
    else:
        shape = tuple(sum(parts) for parts in case.lengths)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    fill = fill_classes if kind in CLASSES else fill_elements
    fill(case, rng, shape, generator, weighted)
    return case


def random_lengths(rng, parts, even):
    if even or rng.random() < 0.3:
        quotient, longer = divmod(rng.randint(0 if rng.random() < 0.1 else 1, 5), parts)
        return [quotient + (at < longer) for at in range(parts)]
    lengths = [rng.randint(0, 4) for _ in range(parts)]
    if not sum(lengths) and rng.random() < 0.9:
        lengths[rng.randrange(parts)] = rng.randint(1, 3)
    return lengths


def fill_elements(case, rng, shape, generator, weighted):
    """Tensors and arguments of a loss that has a term per element."""

    def normal(*extents, dtype=torch.float64):
        return torch.randn(*extents, generator=generator, dtype=dtype)

    dtype = torch.complex128 if case.kind == "L1Loss" and rng.random() < 0.3 else torch.float64
    case.input, case.target = normal(shape, dtype=dtype), normal(shape, dtype=dtype)
    if rng.random() < 0.2:
        case.target = case.input.clone()
    match case.kind:
        case "SmoothL1Loss":
            case.arguments["beta"] = rng.choice([0.0, 0.3, 1.0, 2.5])
        case "HuberLoss":
            case.arguments["delta"] = rng.choice([0.3, 1.0, 2.5])
        case "KLDivLoss":
            logged = case.arguments["log_target"] = rng.random() < 0.5
            case.input, scores = (torch.log_softmax(x, dim=-1) for x in (case.input, case.target))
            case.target = scores if logged else scores.exp()
        case "PoissonNLLLoss":
            logged = case.arguments["log_input"] = rng.random() < 0.5
            case.arguments |= {"full": rng.random() < 0.5, "eps": rng.choice([1e-8, 1e-3])}
            case.input = case.input if logged else case.input.abs()
            case.target = (3 * case.target).abs().round()
        case "BCELoss" | "BCEWithLogitsLoss":
            case.input = case.input.sigmoid() if case.kind == "BCELoss" else case.input
            case.target = case.target.sigmoid() if rng.random() < 0.5 else (case.target > 0).double()
            names = ["weight"] + ["pos_weight"] * (case.kind == "BCEWithLogitsLoss")
            for name in names if weighted else []:
                extents = [n if rng.random() < 0.7 else 1 for n in shape]
                case.arguments[name] = normal(extents[rng.randint(0, len(shape)) :]).abs()


def fill_classes(case, rng, shape, generator, weighted):
    """Tensors and arguments of a loss over classes."""
    classes = shape[case.classes]
    case.input = torch.randn(shape, generator=generator, dtype=torch.float64)
    if case.kind == "NLLLoss":
        case.input = torch.log_softmax(case.input, dim=case.classes)
    else:
        case.arguments["label_smoothing"] = rng.choice([0.0, 0.0, 0.1, 1.0])
    if rng.random() < 0.5:
        case.arguments["weight"] = torch.rand(classes, generator=generator, dtype=torch.float64)
    if case.kind == "CrossEntropyLoss" and rng.random() < 0.4:
        scores = torch.randn(shape, generator=generator, dtype=torch.float64)
        case.target = torch.softmax(scores, dim=case.classes)
        return
    ignored = case.arguments["ignore_index"] = rng.choice([-100, -1, 0, classes - 1, 255])
    extents = shape[: case.classes] + shape[case.classes + 1 :]
    case.target = torch.randint(0, classes, extents, generator=generator)
    some = torch.rand(extents, generator=generator) < rng.choice([0.0, 0.3, 0.3, 0.3, 1.0])
    case.target[some] = ignored


def check(P_world, comm, seed: int) -> None:
    """Compare value and gradients of one random case with the sequential ones; collective.

    Before that, some cases are broken on one rank, which all have to refuse in the same words. Raises on
    every rank if something is wrong on one.
    """
    case, results, refusal = run(P_world, comm.size, seed)
    problems = []
    for what, actual, expected in results:
        try:
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, equal_nan=True)
        except AssertionError as error:
            problems.append(f"{what}: {error}")
    value = results[0][1].detach()
    values = comm.allgather(value if case.reduction != "none" and comm.rank in case.members else None)
    if len({v.numpy().tobytes() for v in values if v is not None}) > 1:
        problems.append(f"ranks differ: {values}")
    refusals = set(comm.allgather(refusal)) - {None}
    if "not at all" in refusals or len(refusals) > 1:
        problems.append(f"refused on one rank, on all: {refusals}")
    everyones = comm.allgather(problems)
    assert not any(everyones), f"seed {seed}: {everyones}\n{case}"


def run(P_world, size, seed):
    """One case, and its results: what, that of this rank, and its part of the sequential one."""
    rng = random.Random(f"{seed} on {size}")
    case = random_case(rng, size)
    generator = torch.Generator().manual_seed(seed)
    P_x = P_world.create_partition_inclusive(case.members).create_cartesian_topology_partition(case.grid)
    whole, factor = case.reduction != "none", rng.choice([1.0, -3.0])
    twice = rng.random() < 0.4 and not case.splits_classes
    differentiable = case.target.is_floating_point() and case.kind not in ("BCELoss", "NLLLoss")
    target_too = (differentiable or case.target.is_complex()) and rng.random() < 0.5

    x, target = case.input.requires_grad_(), case.target.requires_grad_(target_too)
    with warnings.catch_warnings():
        # Of the mean of KLDivLoss.
        warnings.simplefilter("ignore")
        expected = getattr(nn, case.kind)(reduction=case.reduction, **case.arguments)(x, target)
    loss = getattr(layers, f"Distributed{case.kind}")(P_x, reduction=case.reduction, **case.arguments)
    local = case.cut(x, P_x).requires_grad_(), case.cut(target, P_x).requires_grad_(target_too)
    refusal = refused(loss, rng, case, *local) if rng.random() < 0.4 else None
    value = loss(*local)
    zero = torch.zeros_like(expected)
    results = [("value", value, (expected if P_x.active else zero) if whole else case.cut(expected, P_x))]

    def gradients(y, inputs, seeds):
        return torch.autograd.grad(factor * y, inputs[: 1 + target_too], seeds, create_graph=twice)

    seeds = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    wanted = gradients(expected, (x, target), seeds)
    mine = gradients(value, local, seeds if whole else case.cut(seeds, P_x))
    for what, actual, gradient in zip(("input", "target"), mine, wanted, strict=False):
        results.append((f"gradient of the {what}", actual, case.cut(gradient, P_x)))
    if twice and P_x.active and wanted[0].requires_grad:
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        sides = (wanted[0], x, direction), (mine[0], local[0], case.cut(direction, P_x))
        again, mine_again = (
            torch.autograd.grad(g, at, v, allow_unused=True, materialize_grads=True)[0] for g, at, v in sides
        )
        results.append(("second derivative", mine_again, case.cut(again, P_x)))
    return case, results, refusal


def refused(loss, rng, case, input, target):
    """Words in which the loss refuses what one rank passes; the rank is one of P_x, and random."""
    broken = [
        (input.unsqueeze(0), target),
        (input.detach().real.long(), target),
        (input, target.new_zeros((*target.shape, 2))),
    ]
    if len(case.members) > 1 or case.kind in ELEMENTWISE:
        broken.append((input.real.float(), target))
    one, choice = rng.choice(case.members), rng.choice(broken)
    if not loss.P_x.active:
        return None
    try:
        loss(*choice if loss.machine.rank == one else (input, target))
    except ShapeError as error:
        return str(error)
    return "not at all"
