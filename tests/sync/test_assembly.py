"""A GradientSync that cannot be made leaves everything as it was, on all ranks."""

from functools import partial

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError, GradientSync, Machine, SegmentError
from distdl_rma.layers import DistributedConv1d
from distdl_rma.segments.collectives.allreduce import Allreduce
from distdl_rma.sync.registry import ModuleWatch

pytestmark = pytest.mark.mpi


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("on", ["all ranks", "one rank"])
@pytest.mark.parametrize("way", ["model", "register"])
def test_gradients_that_do_not_fit_into_the_segment_are_refused_on_all_ranks(comm, on, way):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        P_x = machine.partition((1, 1, comm.size))
        segments = machine.segments
        small, wide = DistributedConv1d(P_x, 1, 1, 3, padding=1), nn.Linear(256, 256, bias=False)
        # So much is left that the first bucket fits, and the second does not.
        short = on == "all ranks" or comm.rank == 1
        taken = segments.get_segment_buffer(segments.stats().largest_free - (200 << 10)) if short else None
        model = nn.Sequential(small, wide)
        before = [parameter.clone() for parameter in model.parameters()]
        sync = GradientSync(small if way == "register" else None, machine, bucket_nbytes=0)
        used = segments.stats().used
        act = partial(GradientSync, model, machine, bucket_nbytes=0)
        if way == "register":
            act = partial(sync.register, model, get_ranks_synch_norm=list)
        with pytest.raises(SegmentError, match=r"GradientSync: on rank \d: segment exhausted") as refusal:
            act()
        assert len(set(comm.allgather(str(refusal.value)))) == 1
        assert segments.stats().used == used
        assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
        assert "get_ranks_synch_norm" not in vars(model)
        if taken is not None:
            taken.free()
        if way == "register":
            # What was synchronised still is.
            assert [row["parameters"] for row in sync.describe()] == [
                [f"{small.label}.weight", f"{small.label}.bias"]
            ]
            small(torch.ones(1, 1, 4)).sum().backward()
            assert small.bias.grad == 4 * comm.size
        sync.close()
        # Nobody has the parameters, and the layer sums its own.
        small.zero_grad()
        small(torch.ones(1, 1, 4)).sum().backward()
        assert small.bias.grad == 4 * comm.size
        with GradientSync(model, machine):
            small.zero_grad()
            small(torch.ones(1, 1, 4)).sum().backward()
            assert small.bias.grad == 4 * comm.size


def test_a_failure_after_memory_was_agreed_on_gives_the_parameters_back(P_world, monkeypatch):
    layer = nn.Linear(2, 2)

    def connect(_allreduce):
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr(Allreduce, "connect", connect)
        if P_world.size > 1:
            with pytest.raises(ZeroDivisionError):
                GradientSync(layer, P_world)
    with GradientSync(layer, P_world):
        layer(torch.ones(1, 2)).sum().backward()
        assert layer.weight.grad[0, 0] == P_world.size


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
        model[0].requires_grad_(True)
        assert [walked() for _ in range(2)] == [1, 0]
        model[2].weight.requires_grad_(True)
        with pytest.raises(RuntimeError, match=r"'2\.weight' was unfrozen"):
            walked()
        model[2].weight.requires_grad_(False)
        assert [walked() for _ in range(2)] == [1, 0]
        kept = model[0]._parameters["bias"]
        model[0]._parameters["bias"] = nn.Parameter(torch.zeros(2))
        with pytest.raises(RuntimeError, match=r"'0\.bias' was replaced"):
            walked()
        model[0]._parameters["bias"] = kept
        assert [walked() for _ in range(2)] == [1, 0]
