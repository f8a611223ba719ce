"""What ranks of a layer expect of its next call: numbers that all of them give, keep and forget alike."""

import pytest

from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.layers.ops.core.autograd import GradientNeeds
from distdl_rma.segments.plan_cache import UNKNOWN, PlanCache, digest

NEEDS = GradientNeeds(True, True)


def call(memory, plan, said=None, row=None):
    """A call whose ranks say this, on the plan of that name; its number."""
    said, row = (text or plan for text in (said, row))
    number = memory.add(plan, NEEDS, digest(plan.encode()), digest(said.encode()), len(row))
    memory.switch_to(number, row.encode())
    return number


def test_what_all_ranks_say_has_one_number_which_gives_the_plan():
    memory = PlanCache()
    assert memory.number == UNKNOWN == memory.compared(b"a")[0] and memory.plan(digest(b"a")) is None
    first, second = call(memory, "a"), call(memory, "b")
    assert UNKNOWN not in (first, second) and first != second
    assert call(memory, "a") == first == memory.number
    assert memory[first].plan == "a" and memory[first].needs == NEEDS and memory.plan(digest(b"b")) == "b"
    # States of one plan have numbers of their own.
    training, evaluation = call(memory, "a", "training"), call(memory, "a", "evaluation")
    assert training != evaluation and memory[training].plan == memory[evaluation].plan == "a"


def test_ranks_that_expect_the_same_compare_the_same_whatever_rows_they_have():
    here, there = PlanCache(), PlanCache()
    assert here.compared(b"mine") == (UNKNOWN, fingerprint(b"mine"), 4)
    for memory, row in (here, b"mine"), (there, b"another one"):
        memory.switch_to(memory.add("a", NEEDS, digest(b"a"), digest(b"all"), 11), row)
    assert here.compared(b"mine") == there.compared(b"another one") == (here.number, 0, 11)


def test_the_call_before_tells_apart_what_this_rank_says_alike():
    # The rank says "mine" in both: which of the two comes next depends on what was.
    memory = PlanCache()
    for _ in range(2):
        one = call(memory, "a", "one", "mine")
        other = call(memory, "a", "other", "mine")
    assert memory.number == other and memory.compared(b"mine")[0] == one
    call(memory, "a", "one", "mine")
    assert memory.compared(b"mine")[0] == other
    # After what was never followed by it, the last that was said with it.
    call(memory, "b")
    assert memory.compared(b"mine")[0] == one


@pytest.mark.parametrize("used_again", [False, True])
def test_of_many_plans_the_ones_used_last_are_kept(used_again):
    memory = PlanCache()
    first = call(memory, "0")
    for other in range(1, 16):
        call(memory, str(other))
    if used_again:
        call(memory, "0")
    last = call(memory, "16")
    gone = digest(b"1" if used_again else b"0")
    assert memory.plan(gone) is None and memory.plan(digest(b"16")) == "16" == memory[last].plan
    assert (memory.compared(b"0")[0] == first) is used_again
    # Whoever comes back is new, and nobody expects what it was.
    again = call(memory, "1" if used_again else "0")
    assert again == last + 1


def test_of_many_states_of_a_plan_the_ones_used_last_are_kept_and_the_plan_with_them():
    memory = PlanCache()
    numbers = [call(memory, "a", f"said {step}", f"row {step}") for step in range(40)]
    assert memory.compared(b"row 0")[0] == UNKNOWN and memory.plan(digest(b"a")) == "a"
    with pytest.raises(KeyError):
        memory[numbers[0]]
    assert all(memory[number].plan == "a" for number in numbers[-32:])


def test_ranks_that_say_other_things_number_and_forget_alike():
    memories = [PlanCache() for _ in range(3)]
    for step in range(100):
        case = step * step % 37
        numbers = {
            call(each, f"plan {case % 20}", f"said {case}", f"{rank} in {case % (rank + 1)}")
            for rank, each in enumerate(memories)
        }
        assert len(numbers) == 1
    assert (
        len({tuple(each._states) for each in memories}) == len({tuple(each._plans) for each in memories}) == 1
    )
