"""Weights, buffers and inputs that are no longer alike on all ranks: found at the beginning of a call."""

import copy

import pytest
import torch
from torch import nn

from distdl_rma import MismatchError, distribute, shard
from distdl_rma.layers import DistributedLinear
from distdl_rma.layers.model import replica_check
from distdl_rma.layers.model.replica_check import ReplicaSampler

pytestmark = pytest.mark.mpi(min_size=2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 1, 3, padding=1)
        self.last.bias.requires_grad_(False)
        self.register_buffer("mask", torch.rand(7, 5)[:, ::2])

    def forward(self, x, time=None):
        y = self.last(self.norm(self.first(x)).relu())
        return y if time is None else y * time[0]


def step(model, x, optimizer=None):
    model(x).square().mean().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def repaired(model):
    # By those of one seed, on all ranks.
    torch.manual_seed(5)
    model.load_state_dict(Net().state_dict())


def test_what_one_rank_does_alone_is_found_in_the_next_call(model, x, odd, monkeypatch):
    # So few that no call reads the one element that is changed.
    monkeypatch.setattr(replica_check, "_LEAST_NBYTES", 16)
    for before in (0, 1, 2):
        for change in (
            lambda: model.load_state_dict(Net().state_dict()),
            lambda: nn.init.zeros_(model.last.bias),
            lambda: model.first.weight.detach()[3, 0, 1, 0].mul_(2),
        ):
            repaired(model)
            for _ in range(before):
                step(model, x)
            if odd:
                change()
            with pytest.raises(MismatchError, match=r"'(first|last)\.\w+' is not alike.*rank 1: .*norm"):
                model(x)
    repaired(model)
    step(model, x)


def test_before_the_first_call_all_of_everything_is_compared(model, x, odd):
    model.norm.running_mean.data[3] += odd
    with pytest.raises(MismatchError, match=r"'norm\.running_mean' is not alike"):
        model(x)
    model.norm.running_mean.zero_()
    step(model, x)


def test_a_parameter_that_is_frozen_on_one_rank(model, x, odd):
    for before in (0, 1):
        for _ in range(before):
            step(model, x)
        model.norm.bias.requires_grad_(not odd)
        with pytest.raises(MismatchError, match=r"'norm\.bias' is not alike.*norm 0, frozen[;)]"):
            model(x)
        model.norm.bias.requires_grad_(True)
    step(model, x)


def test_optimizers_that_differ(model, x, odd):
    heads = [{"params": model.last.weight, "lr": 0.1 * (1 + odd)}, {"params": model.first.parameters()}]
    optimizer = torch.optim.SGD(heads, lr=0.1)
    step(model, x)
    step(model, x, optimizer)
    with pytest.raises(MismatchError, match=r"'last\.weight' is not alike.*did one of them"):
        step(model, x, optimizer)


def test_changes_past_the_count_of_torch_are_found(model, x, odd):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, x, optimizer)
    for p in model.parameters():
        # Past torch's count of changes.
        p.data.mul_(1 + odd)
    with pytest.raises(MismatchError, match="nor are"):
        model(x)


def _until(kind, act):
    for calls in range(100):
        try:
            act()
        except kind:
            return calls
    return -1


@pytest.mark.parametrize(("name", "at"), [("first.weight", 17), ("one", 777), ("other", 777)])
def test_every_byte_has_its_turn(model, x, odd, monkeypatch, name, at):
    monkeypatch.setattr(replica_check, "_LEAST_NBYTES", 256)
    twin = copy.deepcopy(model).eval()
    # Not so much of each is sampled.
    twin.register_buffer("one", torch.zeros(1 << 10))
    twin.register_buffer("other", torch.zeros(1 << 10))
    with torch.no_grad():
        twin(x)
        if odd:
            twin.state_dict()[name].data.view(-1)[at] += 1
        calls = _until(MismatchError, lambda: twin(x))
    assert 0 <= calls < 60
    twin.distributed.close()


def test_the_same_words_written_by_one_rank_alone_are_no_difference(model, x, odd):
    step(model, x)
    for _ in range(6):
        if odd:
            nn.init._no_grad_fill_(model.last.bias, 1.0)
            model.last.bias.data.copy_(torch.ones(1))
        else:
            model.last.bias.data.fill_(1.0)
        step(model, x)
    with torch.no_grad():
        model(x)


def test_inputs_that_differ_later(model, x, odd):
    step(model, x)
    with pytest.raises(MismatchError, match="an input of a distributed model differs"):
        model(x + odd)
    time = torch.tensor([3.0])
    model(x, time)
    with pytest.raises(MismatchError, match="an input of a distributed model differs"):
        model(x, time + odd)
    model(x, time)


def test_every_element_of_an_input_has_its_turn(model, x, odd):
    time = torch.ones(1 << 10)
    with torch.no_grad():
        model(x, time)
        # As a loader does that fills the same memory again.
        time[3] += odd
        assert 0 <= _until(MismatchError, lambda: model(x, time)) < 4


def test_inputs_beside_split_ones_on_fewer_ranks(P_world, split_of, x, comm):
    grid = P_world.create_cartesian_topology_partition((1, 1, P_world.size, 1))
    first = P_world.create_partition_inclusive([0]).create_cartesian_topology_partition((1, 1, 1, 1))
    model, time = split_of(Net().eval()), torch.ones(3)
    with torch.no_grad():
        if comm.rank == 0:
            model(shard(first, x), time)
        for _ in range(2):
            model(shard(grid, x), time)


def test_parameters_may_be_replaced_and_moved(model, x):
    model.eval()
    with torch.no_grad():
        model(x)
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        model(x)
        model.first.weight.data = model.first.weight.data.clone()
        model(x)
        model.to(memory_format=torch.channels_last)
        model(x)
        model.double()
        model(x.double())


def test_parts_of_weights_are_nobody_elses(P_world):
    P_f = P_world.create_cartesian_topology_partition((1, P_world.size))
    P_w = P_world.create_cartesian_topology_partition((P_world.size, 1))
    net = distribute(nn.Sequential(nn.PReLU(), DistributedLinear(P_f, P_f, P_w, 6, 6)), P_f)
    for _ in range(3):
        net(torch.ones(3, 6)).square().sum().backward()
        torch.optim.SGD(net.parameters(), lr=0.1).step()
    found = ReplicaSampler(lambda: net, net.distributed.machine, P_f.ranks)
    found.number()
    assert [each.name for each in found._held] == ["0.weight"]
    net.distributed.close()


def test_it_can_be_left_out(split_of, x, odd):
    net = split_of(Net(), check_copies=False)
    net.last.bias.data.add_(int(odd))
    net(x)
