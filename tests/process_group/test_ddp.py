"""DistributedDataParallel on our group: the numbers of one process, and gloo's where hooks approximate."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from tests.process_group import nets
from tests.process_group.backends import BACKEND, ZeroRedundancyOptimizer, results, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def train(model, count=3, dtype=torch.float64, **options):
    me = dist.get_rank()
    return nets.steps(model, [nets.batch(me, step, dtype) for step in range(count)], **options)


def parameters(model):
    return [weight.detach().clone() for weight in model.parameters()]


@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4}, {"static_graph": True}], ids=str
)
def test_steps_are_those_of_one_process_on_all_samples(comm, options):
    def program():
        model = DistributedDataParallel(nets.network(), **options)
        train(model)
        return parameters(model)

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))


def test_construction_makes_parameters_and_buffers_those_of_the_first_rank(comm):
    def program():
        torch.manual_seed(dist.get_rank())
        model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5)))
        model.module[1].running_mean += dist.get_rank()
        # The buffers travel from the first rank in every forward.
        model(torch.ones(2, 3))
        return list(model.state_dict().values())

    found = same_on_both(comm, program)
    for value in found:
        everyone = comm.allgather(value.tolist())
        assert everyone == everyone[:1] * comm.size


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
    train(model, count=5, dtype=torch.float32)
    return parameters(model)


@pytest.mark.parametrize("hook", HOOKS)
def test_communication_hooks_give_the_numbers_of_gloo(comm, hook):
    same_on_both(comm, hooked, *HOOKS[hook], rtol=1e-3, atol=1e-4)


def as_bfloat16(state, bucket):
    # Under its own name torch refuses this hook to all backends but two.
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.skipif(BACKEND == "gloo", reason="gloo does not sum bfloat16")
def test_gradients_that_travel_as_bfloat16(comm):
    plain = results(comm, hooked, *HOOKS["allreduce"])
    found = results(comm, hooked, as_bfloat16, None)
    torch.testing.assert_close(found, plain, rtol=2e-2, atol=2e-3)
    for value in found:
        everyone = comm.allgather(value.tolist())
        assert everyone == everyone[:1] * comm.size


class Branches(nn.Module):
    """Ranks use different parts of it, and one part in two steps of three."""

    def __init__(self):
        super().__init__()
        self.trunk, self.even, self.odd = (nn.Linear(nets.FEATURES, nets.FEATURES).double() for _ in range(3))
        self.head = nn.Linear(nets.FEATURES, nets.CLASSES).double()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        branch = self.odd if (dist.get_rank() + self.calls // 3) % 2 else self.even
        return self.head(branch(self.trunk(x)))


def test_unused_parameters_are_found(comm):
    def program():
        torch.manual_seed(4)
        model = DistributedDataParallel(Branches(), find_unused_parameters=True)
        return train(model), parameters(model)

    same_on_both(comm, program)


@pytest.mark.parametrize("divide", [True, False], ids=["initial world", "those still there"])
def test_join_of_uneven_inputs(comm, divide):
    def program():
        model, me = DistributedDataParallel(nets.network(), bucket_cap_mb=1e-4), dist.get_rank()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=divide):
            losses = nets.steps(model, [nets.batch(me, step) for step in range(1 + 2 * me)], optimizer)
        return losses, parameters(model)

    same_on_both(comm, program)


def test_join_with_a_split_optimizer(comm):
    def program():
        model, me = DistributedDataParallel(nets.network()), dist.get_rank()
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with Join([model, optimizer]):
            nets.steps(model, [nets.batch(me, step) for step in range(1 + 2 * me)], optimizer)
        return parameters(model)

    same_on_both(comm, program)


@pytest.mark.parametrize("as_view", [False, True])
def test_zero_redundancy_optimizer(comm, as_view):
    def program():
        model = DistributedDataParallel(nets.network())
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, parameters_as_bucket_view=as_view, lr=0.01
        )
        train(model, optimizer=optimizer)
        optimizer.consolidate_state_dict(to=0)
        state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
        return parameters(model), state

    model = nets.network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    found, _ = same_on_both(comm, program)
    for step in range(3):
        everyone = [nets.batch(rank, step) for rank in range(comm.size)]
        whole = torch.cat([x for x, _ in everyone]), torch.cat([labels for _, labels in everyone])
        nets.steps(model, [whole], optimizer)
    torch.testing.assert_close(found, parameters(model))


def test_two_models_on_overlapping_groups(comm):
    def program():
        size, me = dist.get_world_size(), dist.get_rank()
        both = [dist.new_group(list(range(size))[::-1]), dist.new_group(list(range(max(1, size - 1))))]
        found = []
        for group in both:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                model = DistributedDataParallel(nets.network(), process_group=group)
                nets.steps(model, [nets.batch(me, step) for step in range(2)])
                found.append(parameters(model))
        return found

    same_on_both(comm, program)
