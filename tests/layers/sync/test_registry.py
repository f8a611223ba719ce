"""Ranks of gradients as users state them."""

import gc

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, GradientSync, Machine, ProtocolError
from distdl_rma.layers import DistributedConv1d
from distdl_rma.layers.sync.registry import ModuleWatch
from tests.layers.partitioned.same_error import same_error

pytestmark = pytest.mark.mpi


def halves(comm):
    """The ranks in two halves, and that of this rank."""
    middle = (comm.size + 1) // 2
    return [r for r in range(comm.size) if (r < middle) == (comm.rank < middle)]


def ones(*shape):
    return torch.ones(*shape, dtype=torch.float64)


def linear():
    return nn.Linear(2, 2, bias=False, dtype=torch.float64)


def test_parts_of_a_model_are_summed_over_the_ranks_of_their_callback(P_world, comm):
    model = nn.ModuleDict({"trunk": linear(), "head": nn.Sequential(nn.ReLU(), linear())})
    sync = GradientSync(model, P_world)
    mine = halves(comm)
    nn.init.constant_(model["head"][1].weight, float(comm.rank))
    sync.register(model["head"], get_ranks_synch_weights=lambda: mine)
    assert (model["head"][1].weight == mine[0]).all(), "the values of its first rank"
    for _ in range(2):
        model.zero_grad()
        (model["trunk"](ones(1, 2)) * (comm.rank + 1)).sum().backward()
        (model["head"][1](ones(1, 2)) * (comm.rank + 1)).sum().backward()
        assert model["trunk"].weight.grad[0, 0] == sum(rank + 1 for rank in range(comm.size))
        assert model["head"][1].weight.grad[0, 0] == sum(rank + 1 for rank in mine)
    if comm.size > 1:
        ranks = [row["ranks"] for row in sync.describe()]
        assert ranks == [P_world.ranks] + [tuple(mine)] * (len(mine) > 1)
    sync.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.processes
def test_a_layer_that_only_some_ranks_have_collected_does_not_part_them(P_world, comm):
    model = nn.ModuleDict({name: linear() for name in ("trunk", "dropped", "head")})
    # A cycle, which stays until Python looks for it.
    model["dropped"].of = [model["dropped"]]
    sync = GradientSync(model, P_world)
    with sync.no_sync():
        model["dropped"](ones(1, 2)).sum().backward()
    gc.disable()
    try:
        del model["dropped"]
        if comm.rank == 0:
            gc.collect()
        with pytest.raises(ProtocolError, match=r"those from no_sync\(\) are summed in the next"):
            sync.grad_norm()
        with pytest.raises(ProtocolError, match="summed in the next backward"):
            sync.grad_norm(float("inf"))
        gc.collect()
        assert sync.grad_norm() == 0
    finally:
        gc.enable()
    everyone = [*range(comm.size)]
    sync.register(model["head"], get_ranks_synch_weights=lambda: everyone)
    (model["head"](model["trunk"](ones(1, 2))) * (comm.rank + 1)).sum().backward()
    alone = model["trunk"].weight.grad / sum(rank + 1 for rank in everyone)
    model.zero_grad()
    with sync.no_sync():
        model["head"](model["trunk"](ones(1, 2))).sum().backward()
    assert torch.equal(model["trunk"].weight.grad, alone)
    sync.release()


@pytest.mark.mpi(min_size=2)
def test_modules_of_some_ranks_only(P_world, comm):
    pair = [comm.size - 1, 0]
    part = linear() if comm.rank in pair else None
    sync = GradientSync(None, P_world)
    sync.register(part, name="tail", get_ranks_synch_weights=lambda: pair)
    for _ in range(3):
        if part is not None:
            part.zero_grad()
            part(ones(1, 2)).sum().backward()
            assert part.weight.grad[0, 0] == 2
    sync.close()


def test_a_distributed_layer_takes_its_users_ranks(P_world, comm):
    # Data-parallel: everyone has its own samples; but the halves are models of their own.
    P_x = P_world.create_cartesian_topology_partition((comm.size, 1, 1))
    mine = halves(comm)
    layer = DistributedConv1d(
        P_x, 1, 1, 1, bias=False, dtype=torch.float64, get_ranks_synch_weights=lambda: mine
    )
    assert layer.get_ranks_synch_weights() == mine
    expected = sum(rank + 1 for rank in mine)

    def gradient():
        layer.zero_grad()
        (layer(ones(1, 1, 3)) * (comm.rank + 1)).sum().backward()
        return layer.weight.grad.item() / 3

    assert gradient() == expected, "without the line"
    with GradientSync(layer, P_world):
        assert gradient() == expected
    with GradientSync(layer, P_world, reduction="mean"):
        assert gradient() == pytest.approx(expected / len(mine))
    alone = [comm.rank]
    with GradientSync(None, P_world) as sync:
        sync.register(layer, get_ranks_synch_weights=lambda: alone)
        assert gradient() == comm.rank + 1
    assert gradient() == comm.rank + 1, "it stays with the layer"


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        (
            lambda r, n: {"get_ranks_synch_weights": lambda: [0, n]},
            r"gave \[0, \d\] on rank \d, the copies are on",
        ),
        (lambda r, n: {"get_ranks_synch_weights": list}, "would drift apart"),
        (lambda r, n: {"get_ranks_synch_weights": lambda: 1 / 0}, "ZeroDivisionError"),
        # What has no statistics.
        (lambda r, n: {"get_ranks_synch_norm": lambda: [17]}, r"synch_norm\(\) gave \[17\] on rank 0"),
        (lambda r, n: {"get_sizeof_norm": lambda: 3}, r"sizeof_norm\(\) gave 3 on rank 0, it is 0 bytes"),
        (
            lambda r, n: {"get_sizeof_gradients": lambda: 7} if r == n - 1 else {},
            r"gave 7 on rank \d, it is \d+ bytes",
        ),
        (lambda r, n: {"get_ranks_synch_weights": 3} if r == 0 else {}, "is a function without arguments"),
    ],
)
@pytest.mark.parametrize("kind", ["plain", "distributed"])
def test_callbacks_that_do_not_fit_are_refused_on_every_rank(P_world, comm, callbacks, message, kind):
    P_x = P_world.create_cartesian_topology_partition((1, 1, comm.size))
    part = linear() if kind == "plain" else DistributedConv1d(P_x, 1, 1, 3, name="first")
    sync = GradientSync(None, P_world)
    before = dict(vars(part))
    given = callbacks(comm.rank, comm.size)
    text = same_error(comm, lambda: sync.register(part, name="part", **given), ConfigurationError, message)
    assert "part" in text or "first" in text
    assert vars(part).keys() == before.keys(), "nothing has changed"
    # The machine goes on.
    sync.register(part, name="part")
    assert len(sync.describe()) == 1
    sync.close()


def test_registering_needs_summed_gradients_and_an_open_sync(P_world, comm):
    part = linear()
    sync = GradientSync(part, P_world)
    with sync.no_sync():
        part(ones(1, 2)).sum().backward()
    if comm.size > 1:
        with pytest.raises(ConfigurationError, match="no gradients from no_sync left"):
            sync.register(linear())
    part.zero_grad(set_to_none=False)
    sync.register(linear(), name="another")
    sync.close()
    with pytest.raises(RuntimeError, match="already closed"):
        sync.register(None)


def test_a_machine_in_another_order_and_with_others_beside_it(comm):
    members = list(reversed(range(max(1, comm.size - 1))))
    if comm.rank not in members:
        return
    with Machine(comm, ranks=members, segment_size="4MiB") as machine:
        part = linear()
        sync = GradientSync(part, machine)
        (part(ones(1, 2)) * (comm.rank + 1)).sum().backward()
        assert part.weight.grad[0, 0] == sum(rank + 1 for rank in members)
        sync.close()


def test_a_type_whose_gradients_cannot_be_summed_is_refused_by_name(P_world):
    layer = nn.Linear(2, 2)
    layer.scale = nn.Parameter(torch.zeros(2).to(torch.float8_e5m2))
    model = nn.Sequential(layer)
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match=r"the scale of '0' is torch.float8_e5m2, whose gradients"
        ):
            GradientSync(model, P_world)
    layer.scale.requires_grad_(False)
    GradientSync(model, P_world).close()


def test_modules_are_walked_again_only_if_something_changed(P_world, monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.PReLU())
    model[2].requires_grad_(False)
    walks = []
    walk = ModuleWatch.walk
    monkeypatch.setattr(ModuleWatch, "walk", lambda *given: walks.append(1) or walk(*given))
    with GradientSync(model, P_world):

        def walked():
            walks.clear()
            model[0](torch.ones(1, 2)).sum().backward()
            return len(walks)

        assert [walked() for _ in range(3)] == [1, 0, 0]
        # What changes nothing for the sync is looked at once.
        model[1].insert(0, nn.ReLU())
        with pytest.raises(RuntimeError, match=r"'1\.0' was added"):
            walked()
        del model[1][0]
        # As it was when it was walked last.
        assert [walked() for _ in range(2)] == [0, 0]
        for learns in (False, True):
            model[0].weight.requires_grad_(learns)
            assert [walked() for _ in range(2)] == [1, 0]
        model[2].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'2\.weight' was unfrozen"):
            walked()
        model[2].weight.requires_grad_(False)
        assert [walked() for _ in range(2)] == [0, 0]
        kept = model[0]._parameters["bias"]
        model[0]._parameters["bias"] = nn.Parameter(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"'0\.bias' was replaced"):
            walked()
        model[0]._parameters["bias"] = kept
        assert [walked() for _ in range(2)] == [0, 0]
