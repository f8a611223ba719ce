"""What the ranks of a call agree on: facts about its tensors as rows of words, and plans for them."""

import gc
import weakref

import pytest
import torch

from distdl_rma import Machine, MismatchError, PeerFailedError, ProtocolError, ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.dtypes import DTYPES
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.tensors import MAX_DIMS
from distdl_rma.layers.partitioned.core.agreement import ShapeAgreement
from distdl_rma.layers.partitioned.core.input_facts import InputFacts, common_dtype, source_of


class Plan:
    """A plan that remembers for what it was made, and whether it was given up."""

    def __init__(self, facts):
        self.shapes = {rank: fact.shape for rank, fact in facts.items()}
        self.inference, self.voided = torch.is_inference_mode_enabled(), 0

    def void(self):
        self.voided += 1


class Layer:
    """What plans know of a layer."""

    def __init__(self, machine, plan=Plan, name="it", arguments_text=""):
        self.site, self.plan, self.arguments_text = CallSite(machine, name), plan, lambda: arguments_text


def agree(plans, x, problem=""):
    plans.begin(InputFacts.about((x,), problem=problem))
    return plans.settle()


@pytest.mark.mpi
def test_a_plan_comes_back_and_a_wrong_guess_is_given_up(P_world, comm):
    layer = Layer(Machine.of(P_world))
    plans = ShapeAgreement(layer, P_world.ranks)
    first = agree(plans, torch.ones(1))[0]
    assert first.shapes == dict.fromkeys(P_world.ranks, (1,))
    # One rank alone sees the change; the others start on what they had.
    x = torch.ones(2 if comm.rank == comm.size - 1 else 1)
    plans.begin(InputFacts.about((x,)))
    assert plans.guess is (None if len(x) == 2 else first)
    second, needs = plans.settle()
    assert second is not first and not needs.any
    assert first.voided == 1
    plans.begin(InputFacts.about((torch.ones(1),)))
    assert plans.settle()[0] is first
    # Where all ranks expect the plan that comes, none has started on another.
    assert second.voided == (comm.size > 1)
    assert [agree(plans, each)[0] for each in (x, torch.ones(1)) * 3] == [second, first] * 3
    assert second.voided == (comm.size > 1)


@pytest.mark.mpi
def test_plans_are_made_outside_of_inference_mode(P_world):
    layer = Layer(Machine.of(P_world))
    plans = ShapeAgreement(layer, P_world.ranks)
    with torch.inference_mode():
        assert not agree(plans, torch.ones(1))[0].inference


@pytest.mark.mpi
def test_the_least_recent_plan_goes_and_without_a_collector(P_world):
    layer = Layer(Machine.of(P_world))
    plans = ShapeAgreement(layer, P_world.ranks)
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
    plans = ShapeAgreement(layer, P_world.ranks)
    with pytest.raises(ShapeError, match=r"'it': no plan for \[\(1,\)"):
        agree(plans, torch.ones(1 + comm.rank))
    with pytest.raises(ShapeError, match="'it': rank 0: it is odd"):
        agree(plans, torch.ones(1), problem="" if comm.rank else "it is odd")
    with pytest.raises(ProtocolError, match="'other': settle without begin"):
        ShapeAgreement(Layer(Machine.of(P_world), name="other"), P_world.ranks).settle()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_were_told_other_arguments_do_not_meet(comm):
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        layer = Layer(machine, arguments_text="ab"[comm.rank > 0])
        plans = ShapeAgreement(layer, machine.ranks)
        with pytest.raises(MismatchError, match="it"):
            agree(plans, torch.ones(1))


@pytest.mark.mpi(min_size=2)
def test_a_layer_that_others_were_not_in_is_not_called_again(comm):
    # What a rank sent on a guess would be the next call's.
    with Machine(comm, segment_size="4MiB", timeout=15) as machine:
        owners = [Layer(machine, name=name) for name in ("here", "there")]
        here, there = (ShapeAgreement(owner, machine.ranks) for owner in owners)
        for plans in (here, there):
            agree(plans, torch.ones(1))
        with pytest.raises(MismatchError, match=r"'here .*'there "):
            agree(there if comm.rank else here, torch.ones(1))
        # Who goes on before the others have heard of that fails, and they of it.
        comm.Barrier()
        with pytest.raises(PeerFailedError if comm.rank else ProtocolError, match="'here': rank 0 called it"):
            agree(here, torch.ones(1))


@pytest.mark.mpi
def test_plans_do_not_keep_their_layer(P_world):
    layer = Layer(Machine.of(P_world))
    plans, gone = ShapeAgreement(layer, P_world.ranks), weakref.ref(layer)
    agree(plans, torch.ones(1))
    del layer
    assert gone() is None
    with pytest.raises(ReferenceError, match="weakly-referenced object no longer exists"):
        agree(plans, torch.ones(2))


def about(*xs, weight=None, words=(), idle=None, problem=""):
    return InputFacts.about(xs, weight, words, idle or (False,) * len(xs), problem)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_facts_survive_the_way_as_words(dtype):
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    xs = torch.empty((2,) * MAX_DIMS, dtype=dtype), torch.ones(3, requires_grad=True), torch.empty(0, 2)
    for given in (xs, xs[1:], xs[:1]):
        words = -1, 1 << 62, None, 0.1, "it"
        facts = about(*given, weight=weight, words=words, idle=(False, False, True)[-len(given) :])
        again = InputFacts.decode(facts.encode())
        assert again == facts
        assert [again.of(at).inputs for at in range(len(given))] == [(one,) for one in facts.inputs]


def test_another_number_of_inputs_is_told():
    x = torch.ones(2)
    for given in range(4):
        facts = about(*[x] * given, idle=(False, False))
        assert facts.problem == ("" if given == 2 else f"takes 2 inputs, got {given}")


def test_a_problem_travels_in_one_line_and_without_inputs():
    for facts in (about(3), about(torch.ones(2), problem="odd\n  and " + "long " * 999)):
        assert facts.problem and "\n" not in facts.problem and len(facts.problem) <= 512
        again = InputFacts.decode(facts.encode())
        assert again == facts and not again.inputs


def test_where_a_rank_has_no_part_all_tensors_without_elements_are_the_same():
    one, other = (about(x, idle=(True,)) for x in (torch.empty(3, 0), torch.empty(0, dtype=torch.int8)))
    assert one == other
    assert about(torch.ones(1), idle=(True,)).shape == (1,)


def test_needs_of_any_rank_count_for_all():
    needs = GradientNeeds(True, False, (False, True)), GradientNeeds(False, True, (False, False))
    assert GradientNeeds.of_any(needs) == GradientNeeds(True, True, (False, True))
    assert GradientNeeds.of_any(needs).inputs == (True, False, True)
    assert GradientNeeds(False, False, (True,)).any and not GradientNeeds(False, False, (False,)).any


def test_types_of_two_ranks_are_the_same():
    facts = {4: about(torch.ones(1)), 7: about(torch.ones(1, dtype=torch.int8))}
    with pytest.raises(ShapeError, match=r"rank 4 passes torch\.float32 but rank 7 torch\.int8"):
        common_dtype(facts)


def test_shards_that_form_a_grid_are_parts_of_one_tensor():
    P_x = Partition((4, 7), (2, 1), None)
    facts = {4: about(torch.ones(3, 2)), 7: about(torch.ones(2, 2)), 9: about(torch.empty(5, 0))}
    assert source_of(P_x, facts) == (Decomposition.balanced(P_x, (5, 2)), torch.float32)
    with pytest.raises(ShapeError, match="rank 9 is not in P_x but passes a tensor of shape"):
        source_of(P_x, facts | {9: about(torch.ones(1))})
    with pytest.raises(ShapeError, match="do not form a grid"):
        source_of(P_x, facts | {7: about(torch.ones(2, 3))})
