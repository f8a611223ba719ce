"""Small networks, their batches, and the loop that trains them."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812

FEATURES, WIDTH, CLASSES = 6, 11, 3
BATCH = 4


def network(dtype=torch.float64):
    """Sizes that ranks do not divide; the same weights on all ranks."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES)
    ).to(dtype)


def batch(rank, step=0, dtype=torch.float64, count=BATCH):
    """One rank's samples of a step, and their labels."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(count, FEATURES, dtype=dtype, generator=generator)
    return x, torch.randint(CLASSES, (count,), generator=generator)


def steps(model, batches, optimizer=None):
    """Train on each of the batches; the losses."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for x, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def sharded(mesh=None, **options):
    """The network, whose layers FSDP shards over a mesh, or over all ranks."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    model = network()
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh, **options)
    return model


def whole(model):
    """Its parameters, of all ranks."""
    weights = [weight.detach() for weight in model.parameters()]
    return [weight.full_tensor() if hasattr(weight, "full_tensor") else weight for weight in weights]


def alone(size, count=3, optimizer=None):
    """Parameters of the network after steps on the samples of all ranks at once."""
    model = network()
    drawn = [[batch(rank, step) for rank in range(size)] for step in range(count)]
    batches = [(torch.cat([x for x, _ in all_]), torch.cat([y for _, y in all_])) for all_ in drawn]
    steps(model, batches, optimizer and optimizer(model.parameters()))
    return whole(model)
