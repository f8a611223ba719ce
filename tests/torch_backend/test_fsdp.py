"""fully_shard on our group: parameters in parts, numbers those of one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from tests.torch_backend import nets
from tests.torch_backend.backends import results, same_on_both

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(1, 2, 3, 4)]


def sharded(mesh, **options):
    model = nets.network()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def train(model, count=3, **options):
    me = dist.get_rank()
    nets.steps(model, [nets.batch(me, step) for step in range(count)], **options)
    return [weight.full_tensor().detach() for weight in model.parameters()]


@pytest.mark.parametrize("reshard", [True, False], ids=["freed", "kept"])
def test_steps_are_those_of_one_process_on_all_samples(comm, reshard):
    def program():
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        return train(sharded(mesh, reshard_after_forward=reshard))

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))


def test_adam_and_clipped_gradients(comm):
    def program():
        model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def clip(*_):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

        optimizer.register_step_pre_hook(clip)
        return train(model, optimizer=optimizer), [weight.to_local() for weight in model.parameters()]

    same_on_both(comm, program)


def test_mixed_precision_and_accumulation(comm):
    def program():
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)), mp_policy=policy)
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
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        return train(sharded(mesh))

    torch.testing.assert_close(results(comm, program), nets.alone(4))


@pytest.mark.filterwarnings("ignore")
def test_the_older_wrapper_steps_as_one_process(comm):
    # Which frees and restores the memory of what it gathered.
    def program():
        model = FullyShardedDataParallel(nets.network(), use_orig_params=True, device_id=torch.device("cpu"))
        nets.steps(model, [nets.batch(dist.get_rank(), step) for step in range(3)])
        with FullyShardedDataParallel.summon_full_params(model):
            return [weight.detach().clone() for weight in model.parameters()]

    torch.testing.assert_close(results(comm, program), nets.alone(comm.size))
