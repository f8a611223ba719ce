"""DistributedDataParallel on our group: the numbers of one process, and gloo's where hooks approximate."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests.torch_backend import nets
from tests.torch_backend.backends import ZeroRedundancyOptimizer, results, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def train(model, count=3, dtype=torch.float64, **options):
    """Steps on this rank's samples; the parameters after them."""
    nets.steps(model, [nets.batch(dist.get_rank(), step, dtype) for step in range(count)], **options)
    return nets.whole(model)


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}, {"static_graph": True}], ids=str
)
def test_steps_are_those_of_one_process_on_all_samples(comm, options):
    def program():
        model = nets.network()
        with torch.no_grad():
            # All begin with those of the first rank.
            model[0].weight += dist.get_rank()
        return train(DistributedDataParallel(model, **options))

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, None),
    "float16": (default_hooks.fp16_compress_hook, None),
    "PowerSGD": (powerSGD_hook.powerSGD_hook, 2),
}


# gloo ends the process if a thread of its own drops a group last, as it may where a hook has a future.
KEPT = []


def hooked(hook, rank_of_matrices):
    KEPT.append(dist.group.WORLD)
    model = DistributedDataParallel(nets.network(torch.float32))
    power = rank_of_matrices and powerSGD_hook.PowerSGDState(
        None, rank_of_matrices, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(power, hook)
    return train(model, count=5, dtype=torch.float32)


@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks_give_the_numbers_of_gloo(comm, hook):
    same_on_both(comm, hooked, *HOOKS[hook], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("divide", [True, False], ids=["initial world", "those still there"])
def test_join_of_uneven_inputs(comm, divide):
    def program():
        model, me = DistributedDataParallel(nets.network(), bucket_cap_mb=1e-4), dist.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divide):
            losses = nets.steps(model, [nets.batch(me, step) for step in range(1 + 2 * me)], optimizer)
        return losses, nets.whole(model)

    same_on_both(comm, program)


def test_zero_redundancy_optimizer(comm):
    def program():
        model = DistributedDataParallel(nets.network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        found = train(model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=0)
        return found, optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}

    found, _ = same_on_both(comm, program)
    torch.testing.assert_close(found, nets.alone(comm.size, optimizer=partial(torch.optim.Adam, lr=0.01)))
