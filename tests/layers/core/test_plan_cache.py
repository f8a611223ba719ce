"""Plans that the ranks of a call agree on."""

import gc
import weakref

import pytest
import torch

from distdl_rma import Machine, MismatchError, ProtocolError, ShapeError
from distdl_rma.layers.core.plan_cache import PlanCache
from distdl_rma.ops.core.movement import CallSite


class Plan:
    """A plan that remembers for what it was made, and whether it was given up."""

    def __init__(self, facts):
        self.shapes = {rank: fact.shape for rank, fact in facts.items()}
        self.inference, self.voided = torch.is_inference_mode_enabled(), 0

    def void(self):
        self.voided += 1


class Layer:
    """What plans know of a layer."""

    def __init__(self, machine, plan=Plan, name="it", built_with=""):
        self.site, self.plan, self.built_with = CallSite(machine, name), plan, lambda: built_with


def agree(plans, x, problem=""):
    plans.begin((x,), problem=problem)
    return plans.settle()


@pytest.mark.mpi
def test_a_plan_comes_back_and_a_wrong_guess_is_given_up(P_world, comm):
    layer = Layer(Machine.of(P_world))
    plans = PlanCache(layer, P_world.ranks)
    first = agree(plans, torch.ones(1))[0]
    assert first.shapes == dict.fromkeys(P_world.ranks, (1,))
    # One rank alone sees the change; the others start on what they had.
    x = torch.ones(2 if comm.rank == comm.size - 1 else 1)
    plans.begin((x,))
    assert plans.guess is (None if len(x) == 2 else first)
    second, needs = plans.settle()
    assert second is not first and not needs.any
    assert first.voided == 1
    plans.begin((torch.ones(1),))
    assert plans.settle()[0] is first
    assert second.voided == 1


@pytest.mark.mpi
def test_plans_are_made_outside_of_inference_mode(P_world):
    layer = Layer(Machine.of(P_world))
    plans = PlanCache(layer, P_world.ranks)
    with torch.inference_mode():
        assert not agree(plans, torch.ones(1))[0].inference


@pytest.mark.mpi
def test_the_least_recent_plan_goes_and_without_a_collector(P_world):
    layer = Layer(Machine.of(P_world))
    plans = PlanCache(layer, P_world.ranks)
    gc.disable()
    try:
        oldest = weakref.ref(agree(plans, torch.ones(1))[0])
        for rows in range(2, 18):
            agree(plans, torch.ones(rows))
        assert oldest() is None
        assert plans.last.shapes[P_world.ranks[0]] == (17,)
    finally:
        gc.enable()


@pytest.mark.mpi
def test_what_cannot_be_planned_is_refused_on_all_ranks_alike(P_world, comm):
    def refuse(facts):
        raise ShapeError(f"no plan for {[fact.shape for fact in facts.values()]}")

    layer = Layer(Machine.of(P_world), refuse)
    plans = PlanCache(layer, P_world.ranks)
    with pytest.raises(ShapeError, match=r"'it': no plan for \[\(1,\)"):
        agree(plans, torch.ones(1 + comm.rank))
    with pytest.raises(ShapeError, match="'it': rank 0: it is odd"):
        agree(plans, torch.ones(1), problem="" if comm.rank else "it is odd")
    with pytest.raises(ProtocolError, match="'other': settle without begin"):
        PlanCache(Layer(Machine.of(P_world), name="other"), P_world.ranks).settle()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_were_told_other_arguments_do_not_meet(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        layer = Layer(machine, built_with="ab"[comm.rank > 0])
        plans = PlanCache(layer, machine.ranks)
        with pytest.raises(MismatchError, match="it"):
            agree(plans, torch.ones(1))


@pytest.mark.mpi
def test_plans_do_not_keep_their_layer(P_world):
    layer = Layer(Machine.of(P_world))
    plans, gone = PlanCache(layer, P_world.ranks), weakref.ref(layer)
    agree(plans, torch.ones(1))
    del layer
    assert gone() is None
    with pytest.raises(ReferenceError, match="'it' is gone"):
        agree(plans, torch.ones(2))
