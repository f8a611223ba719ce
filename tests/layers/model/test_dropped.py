"""What a user lets go of without ``close()`` gives back what it had, whenever a rank collects garbage."""

import gc
import weakref

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, distribute
from distdl_rma.layers import DistributedConv1d, DistributedMSELoss
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN

pytestmark = pytest.mark.mpi


class Net(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.first, self.last = nn.Conv1d(1, width, 3, padding=1), nn.Conv1d(width, 1, 3, padding=1)

    def forward(self, x):
        return self.last(nn.functional.relu(self.first(x)))


@pytest.fixture
def used(P_world, comm):
    """Bytes of this rank's segment that are in use, once no peer writes to what was given back."""

    def used(collect=True):
        _ = collect and gc.collect()
        comm.Barrier()
        return P_world.home.segments.stats().used

    return used


@pytest.fixture
def uncollected(comm):
    """On odd ranks nothing but references frees memory."""
    if comm.rank % 2:
        gc.disable()
    yield
    gc.enable()


def step(model, x):
    model.zero_grad()
    nn.functional.mse_loss(model(x), x).backward()
    return model.first.weight.grad


def trained(expected=None):
    """A distributed model that has gone a step, with the gradients of the model alone."""
    torch.manual_seed(1)
    net, x = Net(), torch.ones(1, 1, 12)
    expected = step(net, x)
    model = distribute(net, {"W": -1})
    assert torch.allclose(step(model, x), expected)
    return model


def test_models_that_nobody_closes_leave_nothing_behind(used, uncollected):
    models = [weakref.ref(trained()) for _ in range(2)]
    before, followed = used(collect=False), [*LOSS_ORIGIN.on]
    models += [weakref.ref(trained()) for _ in range(30)]
    assert used(collect=False) <= before
    assert followed == LOSS_ORIGIN.on
    assert [model() for model in models] == [None] * 32


def test_a_sync_goes_with_its_model_and_not_before(P_world, used, uncollected):
    P_x = P_world.create_cartesian_topology_partition((1, 1, P_world.size))

    def built():
        model = nn.Sequential(DistributedConv1d(P_x, 1, 2, 3, padding=1), nn.PReLU())
        sync = weakref.ref(GradientSync(model, P_world))
        for _ in range(2):
            y = model(torch.ones(1, 1, 6))
            DistributedMSELoss(P_x)(y, torch.ones_like(y)).backward()
        return model, sync

    built()
    before = used(collect=False)
    for _ in range(10):
        model, sync = built()
        # Nobody has it but the model.
        assert sync() is not None
        parameter = model[1].weight
        del model
        assert sync() is not None
        del parameter
        assert sync() is None
    assert used(collect=False) <= before


def test_ranks_may_collect_at_different_times(comm, used, uncollected):
    trained()
    before = used()
    kept = []
    for number in range(6):
        model = trained()
        if comm.rank == number % comm.size:
            # A cycle, which only a collection frees; or what a notebook shows.
            model.itself = model
            kept.append(model if number % 2 else None)
    del model
    trained()
    kept.clear()
    assert used() <= before


def test_an_error_keeps_what_it_was_raised_in_as_long_as_it_is_kept(comm, used):
    class Broken(Net):
        def forward(self, x):
            super().forward(x)
            raise KeyError("the user's own")

    trained()
    before = used()
    errors = []
    for _ in range(3):
        try:
            distribute(Broken(), {"W": -1})(torch.ones(1, 1, 12))
        except KeyError as error:
            if comm.rank == 0:
                errors.append(error)
    trained()
    errors.clear()
    del _
    assert used() <= before


def test_what_a_cell_kept_goes_when_it_is_run_again(P_world, used):
    cell = """
class Net(nn.Module):
    def forward(self, x):
        return nn.functional.conv1d(x, torch.ones(1, 1, 3), padding=1)
distribute(Net(), {"W": -1}, reduction="none")(torch.ones(1, 1, 12)).square().full_tensor()
"""

    def run():
        exec(compile(cell, "cell", "exec"), {"nn": nn, "torch": torch, "distribute": distribute})

    run()
    before, places = used(), len(P_world.home.kept["sites"])
    for _ in range(5):
        run()
    assert used() <= before and len(P_world.home.kept["sites"]) <= places


def test_gradients_and_graphs_outlive_their_model(comm, used):
    gradient = trained().first.weight.grad
    kept = gradient.clone()
    for _ in range(4):
        model = distribute(Net(), {"W": -1})
        step(model, torch.full((1, 1, 12), 7.0))
        del model
    assert torch.equal(gradient, kept)
    before, x, seen = used(), torch.ones(1, 1, 12), []
    net = distribute(Net(), {"W": -1})
    net.first.weight.register_hook(seen.append)
    loss = nn.functional.mse_loss(net(x), x)
    del net
    gc.collect()
    loss.backward()
    assert len(seen) == 1
    del loss, seen
    assert used() <= before + 4096


def test_parts_that_some_ranks_let_go_of_stay_agreed_on(P_world, comm):
    sync = GradientSync(nn.Linear(2, 2), P_world)
    heads = [nn.Linear(2, 1)]
    sync.register(heads[0], name="head 0")
    if comm.rank % 2:
        heads.clear()
        gc.collect()
    head = nn.Linear(2, 1)
    sync.register(head, name="head 1")
    head(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
    assert head.weight.grad[0, 0] == sum(range(1, comm.size + 1))
    sync.close()
