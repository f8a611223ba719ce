"""Random search: every loss, over its arguments, partitions and shards, against the sequential one."""

import random
import warnings
from dataclasses import dataclass, field

import torch
from torch import nn

from distdl_rma import Partition, ShapeError, layers
from distdl_rma.geometry import Decomposition
from tests.layers.partitioned.random_shards import random_blocks, random_partition

OF_DIFFERENCES = "L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss"
ELEMENTWISE = (*OF_DIFFERENCES, "BCELoss", "BCEWithLogitsLoss", "KLDivLoss", "PoissonNLLLoss")
CLASSES = ("CrossEntropyLoss", "NLLLoss")
KINDS = ELEMENTWISE + CLASSES * 3


@dataclass
class Case:
    """Arguments of one loss, global tensors, and which part of them each position of the grid holds."""

    kind: str
    P_x: Partition
    reduction: str
    arguments: dict = field(default_factory=dict)
    blocks: Decomposition | None = None
    input: torch.Tensor = None
    target: torch.Tensor = None

    @property
    def classes(self):
        """Dimension of the classes, None if there is none."""
        return min(1, self.P_x.dim - 1) if self.kind in CLASSES else None

    @property
    def splits_classes(self):
        return self.kind in CLASSES and self.P_x.shape[self.classes] > 1

    def cut(self, tensor):
        """This rank's part of a global tensor, which may lack the dimension of classes."""
        if not self.P_x.active:
            return tensor.new_empty(0)
        slices = list(self.blocks.slices())
        if tensor.dim() < len(slices):
            del slices[self.classes]
        return tensor[tuple(slices)].detach().clone()


def random_case(rng: random.Random, P_world: Partition) -> Case:
    """A loss with legal arguments on a partition of some of the ranks, in some order."""
    case = Case(rng.choice(KINDS), random_partition(rng, P_world, rng.randint(1, 4)), "mean")
    case.reduction = rng.choice(["mean", "mean", "sum", "none"] + ["batchmean"] * (case.kind == "KLDivLoss"))
    weighted = case.kind.startswith("BCE") and rng.random() < 0.6
    shape = [0 if rng.random() < 0.05 else rng.randint(1, 7) for _ in case.P_x.shape]
    if case.kind in CLASSES:
        shape[case.classes] = rng.randint(2, 7)
    case.blocks = random_blocks(rng, case.P_x, shape)
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    fill = fill_classes if case.kind in CLASSES else fill_elements
    fill(case, rng, tuple(shape), generator, weighted)
    return case


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
    case, results, refusal = run(P_world, seed)
    problems = []
    for what, actual, expected in results:
        try:
            torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12, equal_nan=True)
        except AssertionError as error:
            problems.append(f"{what}: {error}")
    value = results[0][1].detach()
    values = comm.allgather(value if case.reduction != "none" and case.P_x.active else None)
    if len({v.numpy().tobytes() for v in values if v is not None}) > 1:
        problems.append(f"ranks differ: {values}")
    refusals = set(comm.allgather(refusal)) - {None}
    if "not at all" in refusals or len(refusals) > 1:
        problems.append(f"refused on one rank, on all: {refusals}")
    everyones = comm.allgather(problems)
    assert not any(everyones), f"seed {seed}: {everyones}\n{case}"


def run(P_world, seed):
    """One case, and its results: what, that of this rank, and its part of the sequential one."""
    rng = random.Random(f"{seed} on {P_world.size}")
    case, generator = random_case(rng, P_world), torch.Generator().manual_seed(seed)
    P_x = case.P_x
    whole, factor = case.reduction != "none", rng.choice([1.0, -3.0])
    # Sums over classes have no second derivatives across ranks, and weights of classes none in a mean.
    twice = rng.random() < 0.4 and not case.splits_classes
    differentiable = case.target.is_floating_point() and case.kind not in ("BCELoss", "NLLLoss")
    target_too = (differentiable or case.target.is_complex()) and rng.random() < 0.5

    x, target = case.input.requires_grad_(), case.target.requires_grad_(target_too)
    with warnings.catch_warnings():
        # Of the mean of KLDivLoss.
        warnings.simplefilter("ignore")
        expected = getattr(nn, case.kind)(reduction=case.reduction, **case.arguments)(x, target)
    loss = getattr(layers, f"Distributed{case.kind}")(P_x, reduction=case.reduction, **case.arguments)
    local = case.cut(x).requires_grad_(), case.cut(target).requires_grad_(target_too)
    refusal = refused(loss, rng, case, *local) if rng.random() < 0.4 else None
    value = loss(*local)
    zero = torch.zeros_like(expected)
    results = [("value", value, (expected if P_x.active else zero) if whole else case.cut(expected))]

    def gradients(y, inputs, seeds):
        return torch.autograd.grad(factor * y, inputs[: 1 + target_too], seeds, create_graph=twice)

    seeds = torch.randn(expected.shape, generator=generator, dtype=expected.dtype)
    wanted = gradients(expected, (x, target), seeds)
    mine = gradients(value, local, seeds if whole else case.cut(seeds))
    for what, actual, gradient in zip(("input", "target"), mine, wanted, strict=False):
        results.append((f"gradient of the {what}", actual, case.cut(gradient)))
    if twice and P_x.active and wanted[0].requires_grad:
        direction = torch.randn(x.shape, generator=generator, dtype=x.dtype)
        sides = (wanted[0], x, direction), (mine[0], local[0], case.cut(direction))
        again, mine_again = (
            torch.autograd.grad(g, at, v, allow_unused=True, materialize_grads=True)[0] for g, at, v in sides
        )
        results.append(("second derivative", mine_again, case.cut(again)))
    return case, results, refusal


def refused(loss, rng, case, input, target):
    """Words in which the loss refuses what one rank passes; the rank is one of P_x, and random."""
    broken = [
        (input.unsqueeze(0), target),
        (input.detach().real.long(), target),
        (input, target.new_zeros((*target.shape, 2))),
    ]
    if case.P_x.size > 1:
        broken.append((input.real.float(), target))
    one, choice = rng.choice(case.P_x.ranks), rng.choice(broken)
    if not loss.P_x.active:
        return None
    try:
        loss(*choice if loss.machine.rank == one else (input, target))
    except ShapeError as error:
        return str(error)
    return "not at all"
