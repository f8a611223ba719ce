"""All-reduces whose memory is known: the same as all others, whatever lies there next."""

import random
import time

import pytest
import torch
from torch.distributed import AllreduceOptions, ReduceOp

from distdl_rma.torch_backend import collectives

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def options(op, waits):
    made = AllreduceOptions()
    made.reduceOp, made.asyncOp = op, not waits
    return made


def test_any_tensor_at_a_known_address_is_what_it_is_now(group, monkeypatch):
    monkeypatch.setattr(collectives, "_KEPT", 5)
    size, rng, late = group.size(), random.Random(3), random.Random(group.rank())
    memory = torch.empty(100_000, dtype=torch.float64)
    looks = {
        "whole": lambda: memory,
        "long": lambda: memory[:60_000],
        "of one round in shares": lambda: memory[:10_000],
        "short": lambda: memory[:100],
        "a number": lambda: memory[0],
        "of another type": lambda: memory.view(torch.int32)[:100],
        "with holes": lambda: memory[:200:2],
        "transposed": lambda: memory[:600].view(20, 30).t(),
        "wanting a gradient": lambda: memory[:100].detach().requires_grad_(),
    }
    for step in range(60):
        x = looks[rng.choice(list(looks))]()
        op, waits = rng.choice([ReduceOp.SUM, ReduceOp.MAX, ReduceOp.AVG]), rng.random() < 0.5
        if op == ReduceOp.AVG and not x.is_floating_point():
            op = ReduceOp.SUM
        memory.zero_()
        with torch.no_grad():
            x.add_(step + group.rank())
        if late.random() < 0.2:
            time.sleep(1e-3)
        work = group.allreduce([x], options(op, waits))
        assert work.wait()
        last = step + size - 1
        total = {ReduceOp.SUM: step * size + size * (size - 1) // 2, ReduceOp.MAX: last}
        assert (x == total.get(op, step + (size - 1) / 2)).all(), (step, op)
        assert memory.count_nonzero() <= x.numel()


def test_what_was_begun_keeps_its_memory_and_its_order(group):
    begun = []
    for step in range(40):
        x = torch.full((1 + 40 * (step % 7) ** 4,), float(group.rank() + step))
        begun.append((group.allreduce([x], options(ReduceOp.SUM, False)), step))
        # Nobody but the work has it from here on.
        del x
    for work, step in reversed(begun):
        work.wait()
        (x,) = work.result()
        assert (x == sum(range(group.size())) + step * group.size()).all()
