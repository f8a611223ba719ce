"""What a rank says of its inputs, and what the ranks' inputs are parts of."""

import pytest
import torch

from distdl_rma import ShapeError
from distdl_rma.geometry import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.input_facts import InputFacts, common_dtype, source_of
from distdl_rma.ops.core.autograd import GradientNeeds
from distdl_rma.ops.core.tensors import DTYPES, MAX_DIMS


def about(*xs, weight=None, numbers=(), idle=None, problem=""):
    return InputFacts.about(xs, weight, numbers, idle or (False,) * len(xs), problem)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_facts_survive_the_way_as_numbers(dtype):
    weight = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    xs = torch.empty((2,) * MAX_DIMS, dtype=dtype), torch.ones(3, requires_grad=True), torch.empty(0, 2)
    for given in (xs, xs[1:], xs[:1]):
        facts = about(*given, weight=weight, numbers=(-1, 1 << 62), idle=(False, False, True)[-len(given) :])
        again = InputFacts.decode(facts.encode(len(given)).tolist())
        assert again == facts
        assert [again.of(at).inputs for at in range(len(given))] == [(one,) for one in facts.inputs]


def test_another_number_of_inputs_is_told():
    x = torch.ones(2)
    for given in range(4):
        facts = about(*[x] * given, idle=(False, False))
        assert (facts.given, len(facts.inputs)) == (given, 2)
        assert InputFacts.decode(facts.encode(2).tolist()).given == given


def test_a_problem_travels_as_an_input_of_no_type():
    numbers = (1,) * (MAX_DIMS + 1), (1 << 63,)
    wrong = [
        about(3),
        about(torch.ones(2), problem="odd"),
        *(about(torch.ones(2), numbers=n) for n in numbers),
    ]
    for facts in wrong:
        assert facts.problem
        assert not InputFacts.decode(facts.encode(1).tolist()).inputs


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
