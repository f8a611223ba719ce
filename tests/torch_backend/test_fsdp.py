"""fully_shard on our group: parameters in parts, numbers those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy

from tests.torch_backend import nets
from tests.torch_backend.backends import results, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def train(model, **options):
    nets.steps(model, [nets.batch(dist.get_rank(), step) for step in range(3)], **options)
    return nets.whole(model)


@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
def test_steps_are_those_of_one_process_on_all_samples(comm, reshard):
    def program():
        return train(nets.sharded(reshard_after_forward=reshard))

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))


def test_adam_and_clipped_gradients(comm):
    def program():
        model = nets.sharded()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        return train(model, optimizer=optimizer), [weight.to_local() for weight in model.parameters()]

    same_on_both(comm, program)


def test_mixed_precision_and_accumulation(comm):
    def program():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = nets.sharded(mp_policy=policy)
        model.set_requires_gradient_sync(False)
        for step in range(3):
            model.set_requires_gradient_sync(step == 2)
            x, labels = nets.batch(dist.get_rank(), step)
            torch.nn.functional.cross_entropy(model(x).float(), labels).backward()
        return [weight.grad.full_tensor() for weight in model.parameters()]

    same_on_both(comm, program)


@pytest.mark.sizes(4)
@pytest.mark.mpi(min_size=4)
def test_replicas_of_shards(comm):
    def program():
        return train(nets.sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))))

    torch.testing.assert_close(results(comm, program), nets.alone(4))


@pytest.mark.filterwarnings("ignore")
def test_the_older_wrapper_steps_as_one_process(comm):
    # Which frees and restores the memory of what it gathered.
    def program():
        model = FullyShardedDataParallel(nets.network(), use_orig_params=True, device_id=torch.device("cpu"))
        train(model)
        with FullyShardedDataParallel.summon_full_params(model):
            return [weight.clone() for weight in nets.whole(model)]

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))
