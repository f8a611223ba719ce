"""Random search over the arguments of the normalisation layers, against the sequential ones."""

import random
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, Partition, ShapeError
from distdl_rma import layers as distributed
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.intervals import Listed
from distdl_rma.ops.norm import statistics

DTYPE = torch.float64
# The gradient of two values that almost agree is known to |x| / eps roundings only, in torch and here alike.
EPS = (1e-3, 1e-2)


@dataclass
class Case:
    """One configuration, the same on all ranks."""

    kind: str
    arguments: tuple
    options: dict
    fixed: dict[int, int]
    dim: int
    grid: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    steps: list[dict] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.kind}{self.arguments} {self.options} grid {self.grid} of ranks {self.ranks}: {self.steps}"
        )


def channel_case(rng: random.Random) -> Case:
    """Batch or instance norm."""
    kind, space = rng.choice(["BatchNorm", "InstanceNorm"]), rng.choice([1, 1, 2, 2, 3])
    lead = 2
    if kind == "BatchNorm" and space == 1 and rng.random() < 0.3:
        lead = 1
    if kind == "InstanceNorm" and rng.random() < 0.15:
        lead = 1
    channels, dim = rng.randint(1, 5), space + lead
    options = {
        "eps": rng.choice(EPS),
        "momentum": rng.choice([0.1, 0.7, 1.0, None]),
        "affine": rng.random() < 0.6,
        "track_running_stats": rng.random() < 0.6,
    }
    at = lead - 1 if kind == "InstanceNorm" else 1
    return Case(f"{kind}{space}d", (channels,), options, {at: channels}, dim)


def group_case(rng: random.Random) -> Case:
    groups, dim = rng.randint(1, 4), rng.randint(2, 5)
    channels = groups * rng.randint(1, 4)
    options = {"eps": rng.choice(EPS), "affine": rng.random() < 0.7}
    return Case("GroupNorm", (groups, channels), options, {1: channels}, dim)


def layer_case(rng: random.Random) -> Case:
    kind, dim = rng.choice(["LayerNorm", "LayerNorm", "RMSNorm"]), rng.randint(1, 4)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, dim)))
    options = {"eps": rng.choice(EPS), "elementwise_affine": rng.random() < 0.7}
    if kind == "LayerNorm":
        options["bias"] = rng.random() < 0.7
    fixed = {dim - len(shape) + d: n for d, n in enumerate(shape)}
    return Case(kind, (shape[0] if len(shape) == 1 and rng.random() < 0.5 else shape,), options, fixed, dim)


def random_case(rng: random.Random, size: int) -> Case:
    case = rng.choice([channel_case, channel_case, group_case, layer_case])(rng)
    case.ranks = tuple(rng.sample(range(size), rng.randint(1, size)))
    grid, rest = [1] * case.dim, len(case.ranks)
    while rest > 1:
        factor = next(n for n in range(2, rest + 1) if rest % n == 0)
        grid[rng.randrange(case.dim)] *= factor
        rest //= factor
    case.grid = tuple(grid)
    case.steps = [random_step(rng, case) for _ in range(rng.randint(1, 4))]
    return case


def random_step(rng: random.Random, case: Case) -> dict:
    smallest = 0 if "Instance" not in case.kind and rng.random() < 0.05 else 1
    shape = [case.fixed.get(d, rng.randint(1, 7)) for d in range(case.dim)]
    if 0 not in case.fixed:
        shape[0] = rng.randint(smallest, 4)
    return {
        "shape": tuple(shape),
        "parts": tuple(random_parts(rng, n, p) for n, p in zip(shape, case.grid, strict=True)),
        "train": rng.random() < 0.7,
        "needs": tuple(rng.random() < 0.8 for _ in case.ranks),
        "scale": rng.choice([1.0, 10.0]),
        "shift": rng.choice([0.0, 5.0]),
        "calls": rng.choice([1, 1, 2]),
        "strided": rng.random() < 0.3,
    }


def random_parts(rng: random.Random, extent: int, parts: int) -> tuple[int, ...]:
    """Lengths of the parts of a dimension, balanced or not, some of them 0."""
    if rng.random() < 0.5:
        quotient, longer = divmod(extent, parts)
        return tuple(quotient + (i < longer) for i in range(parts))
    cuts = sorted(rng.randint(0, extent) for _ in range(parts - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, extent], strict=True))


def check(P_world: Partition, comm: object, seed: int) -> None:
    """Compare one random configuration with the sequential layer; raises on a difference."""
    del comm
    rng = random.Random(seed)
    case = random_case(rng, P_world.size)
    limit = statistics._ROUND_NBYTES
    with pytest.MonkeyPatch.context() as patch:
        # Some as if their messages were large.
        patch.setattr(statistics, "_ROUND_NBYTES", rng.choice([limit, limit, 64, 0]))
        compare(P_world, rng, case, seed)


def compare(P_world: Partition, rng: random.Random, case: Case, seed: int) -> None:
    P_x = P_world.create_partition_inclusive(case.ranks).create_cartesian_topology_partition(case.grid)
    generator = torch.Generator().manual_seed(seed)
    layer = getattr(distributed, f"Distributed{case.kind}")(P_x, *case.arguments, **case.options, dtype=DTYPE)
    twin = getattr(nn, case.kind)(*case.arguments, **case.options, dtype=DTYPE)
    for key, parameter in twin.named_parameters():
        parameter.data = torch.rand(parameter.shape, generator=generator, dtype=DTYPE) + 0.5
        getattr(layer, key).data.copy_(kept(layer.placed.placements[key].store, parameter.data))
    assert layer.state_dict().keys() == twin.state_dict().keys()
    sync = GradientSync(layer, P_world) if rng.random() < 0.3 else None
    clears = rng.random() < 0.5
    try:
        for number, step in enumerate(case.steps):
            if clears:
                layer.zero_grad()
                twin.zero_grad()
            run(step, layer, twin, P_x, generator)
            compare_state(layer, twin, f"step {number}")
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {case}: {error}") from error
    except Exception as error:
        error.add_note(f"seed {seed}, {case}")
        raise
    if sync is not None:
        sync.close()


def run(step: dict, layer: nn.Module, twin: nn.Module, P_x: Partition, generator: torch.Generator) -> None:
    layer.train(step["train"])
    twin.train(step["train"])
    shards = Decomposition(P_x, tuple(Listed(p) for p in step["parts"]), tuple(range(P_x.dim)))
    pairs = []
    for _ in range(step["calls"]):
        x = torch.randn(step["shape"], generator=generator, dtype=DTYPE) * step["scale"] + step["shift"]
        x.requires_grad_(any(step["needs"]))
        gradient = torch.randn(step["shape"], generator=generator, dtype=DTYPE)
        local = kept(shards, x.detach())
        if step["strided"] and P_x.active:
            local = local.transpose(0, -1).contiguous().transpose(0, -1)
        local.requires_grad_(P_x.active and step["needs"][P_x.rank])
        try:
            y = twin(x)
        except (ValueError, IndexError):
            # torch counts the batches that it refuses, too.
            if getattr(twin, "num_batches_tracked", None) is not None:
                twin.num_batches_tracked.copy_(layer.num_batches_tracked)
            refused(layer, local, P_x)
            return
        out = layer(local)
        close(out, kept(shards, y.detach()), "output")
        pairs.append((x, y, local, out, gradient))
    if any(step["needs"]) or any(True for _ in twin.parameters()):
        torch.autograd.backward([y for _, y, *_ in pairs], [g for *_, g in pairs])
    if pairs[0][3].requires_grad:
        cotangents = [kept(shards, g) for *_, g in pairs]
        torch.autograd.backward([out for *_, out, _ in pairs], cotangents)
    for x, _, local, _, _ in pairs:
        if local.requires_grad:
            close(local.grad, kept(shards, x.grad), "input gradient")
        elif local.grad is not None:
            raise AssertionError("a gradient that nobody asked for")


def refused(layer: nn.Module, local: torch.Tensor, P_x: Partition) -> None:
    """What torch refuses is refused; group norm cannot always know."""
    if type(layer).__name__ == "DistributedGroupNorm" and P_x.shape[0] > 1:
        return
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    try:
        layer(local)
    except ShapeError:
        for key, value in layer.state_dict().items():
            torch.testing.assert_close(value, before[key])
        return
    if P_x.active or getattr(layer, "track_running_stats", False):
        raise AssertionError("torch refuses it")


def kept(where: Decomposition, tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a global tensor."""
    if not where.partition.active:
        return tensor.new_empty(0)
    return tensor[where.slices()].clone()


def close(actual: torch.Tensor | None, expected: torch.Tensor, what: str) -> None:
    assert actual is not None, f"{what} is missing"
    torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-11, msg=lambda text: f"{what}: {text}")


def compare_state(layer: nn.Module, twin: nn.Module, what: str) -> None:
    for key, parameter in twin.named_parameters():
        mine = getattr(layer, key)
        if parameter.grad is None:
            assert mine.grad is None or not mine.grad.any(), key
        elif mine.numel():
            store = layer.placed.placements[key].store
            close(mine.grad, kept(store, parameter.grad), f"{what}, gradient of {key}")
    for key, buffer in twin.named_buffers():
        expected = kept(layer.layouts[key], buffer) if key in layer.layouts else buffer
        close(getattr(layer, key), expected, f"{what}, {key}")
