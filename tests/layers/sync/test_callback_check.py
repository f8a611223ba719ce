"""Callbacks of several ranks compared, in one process."""

import copy
import re

import pytest
import torch
from torch import nn

from distdl_rma import ConfigurationError
from distdl_rma.layers.sync.callback_check import problems, statement
from distdl_rma.layers.sync.gradient_groups import GradientGroup, ParameterEntry


def weight(*shape, learns=True):
    return {"parameters": {"head.weight": [[*shape], "float32", learns]}}


HEAD = {"name": "head", "ranks": None, "placed": False, "sharing": None, "complaint": "", "new": True}
HEAD |= weight(4, 3)
BOTH = {"head.weight": [[4], "float32", True], "tail.weight": [[4], "float32", True]}


def statements(*changes):
    """What so many ranks say: the same, but for the given changes; None for a rank without the cover."""
    return {
        rank: [] if change is None else [copy.deepcopy(HEAD) | change] for rank, change in enumerate(changes)
    }


def first(words):
    try:
        return next(problems(words), None)
    except ConfigurationError as error:
        return str(error)


@pytest.mark.parametrize(
    "changes",
    [
        ({}, {}, {}),
        ({"ranks": [0, 1]}, {"ranks": [0, 1]}, None),
        ({"ranks": [0, 2]}, {"ranks": [1]}, {"ranks": [0, 2]}),
        ({"ranks": [2, 0]}, None, {"ranks": [2, 0]}),
        ({"ranks": []}, None, None),
        ({"parameters": BOTH}, {"parameters": BOTH}),
    ],
)
def test_what_fits_together_is_no_problem(changes):
    assert first(statements(*changes)) is None


# What is said of a contradiction, and the changes of the ranks that make it.
CONTRADICTIONS = {
    r"gave \[0, 1\] on rank 1 but \[0\] on rank 0": ({"ranks": [0]}, {}),
    r"gave \[1, 0\] on rank 0 but \[0, 1\] on rank 1": ({"ranks": [1, 0]}, {}),
    r"'head' \(head.weight\): .* over ranks \[0, 1\], but rank 1 does not hold it": ({}, None),
    r"no callback covers it, but ranks \[0, 1\] hold it": ({"ranks": []}, {"ranks": []}),
    r"'head': on rank 1, it raised": ({}, {"complaint": "on rank 1, it raised"}),
    r"is \(4, 3\) float32 on rank 0 but \(3, 4\) float32 on rank 1": ({}, weight(3, 4)),
    r"'head': get_ranks_synch_norm\(\) gave \[0, 7\] on rank 0, but .* say the same are \[0\]: ranks": (
        {"sharing": [[0, 7], [0, 1]]},
        {},
    ),
    r"rank 1 shares .* \[0, 1\], as its user does not say otherwise, but .* say the same are \[1\]": (
        {"sharing": [[0], [0, 1]]},
        {},
    ),
    # What learns on one rank only, or is registered anew on some of its ranks.
    r"\(4, 3\) float32 on rank 0 but \(4, 3\) float32, frozen on rank 1$": ({}, weight(4, 3, learns=False)),
    r"on rank 0 but \(4, 3\) float32, registered earlier on rank 1$": ({}, {"new": False}),
    # The order of what travels together.
    "^'head.weight' on rank 0 comes where 'tail.weight' does on rank 1": (
        {"parameters": BOTH},
        {"parameters": dict(reversed(BOTH.items()))},
    ),
}


@pytest.mark.parametrize(("message", "changes"), CONTRADICTIONS.items())
def test_what_does_not_fit_is_named_with_both_sides(changes, message):
    assert re.search(message, first(statements(*changes)))


def test_a_name_belongs_to_one_module_of_a_rank():
    words = statements({}, {})
    words[1].append(dict(words[1][0], name="other"))
    assert first(words).startswith("two modules on rank 1 have a parameter 'head.weight'")


def test_thousand_ranks_are_compared_at_once():
    words = statements(*({"ranks": [rank - rank % 4 + i for i in range(4)]} for rank in range(1024)))
    assert first(words) is None
    words[1000][0]["ranks"] = [1000]
    assert "on rank 1001 but [1000] on rank 1000" in " ".join(problems(words))


def group_of(module, ranks=(0, 1), **callbacks):
    for name, callback in callbacks.items():
        setattr(module, name, callback)
    entries = [ParameterEntry(p, f"head.{key}", [(module, key)]) for key, p in module.named_parameters()]
    return GradientGroup(module, "head", (0, 1), entries, ranks=ranks)


def test_a_statement_has_what_the_ranks_compare():
    assert statement(group_of(nn.Linear(3, 4, bias=False)), 0) == HEAD
    given = {"get_sizeof_gradients": lambda: 48, "get_ranks_synch_norm": lambda: [1]}
    stated = statement(group_of(nn.Linear(3, 4, bias=False), ranks=(1,), **given), 1)
    assert stated == HEAD | {"ranks": (1,), "sharing": [(1,), []]}


COMPLAINTS = {
    r"gave \[0, 7\] on rank 0, the copies are on \[0, 1\]: each rank once, the caller": {"ranks": (0, 7)},
    r"gave \[1\] on rank 0, the copies are on \[0, 1\]: .* the caller among them": {"ranks": (1,)},
    r"gave \[0, 0\] on rank 0, the copies are on \[0, 1\]: each rank once": {"ranks": (0, 0)},
    "gave 40 on rank 0, it is 64 bytes": {"get_sizeof_gradients": lambda: 40},
    "get_sizeof_gradients.* neither a number nor ranks: Zero": {"get_sizeof_gradients": lambda: 1 / 0},
    r"get_sizeof_norm\(\) gave 2 on rank 0, it is 0 bytes": {"get_sizeof_norm": lambda: 2},
    "get_sizeof_norm.* neither a number nor ranks: Zero": {"get_sizeof_norm": lambda: 1 / 0},
    r"gave \[1\] on rank 0: a list of different ranks": {"get_ranks_synch_norm": lambda: [1]},
}


@pytest.mark.parametrize(("complaint", "given"), COMPLAINTS.items())
def test_what_is_wrong_on_a_rank_is_its_complaint(given, complaint):
    assert re.search(complaint, statement(group_of(nn.Linear(3, 4), **given), 0)["complaint"])


class Placed(GradientGroup):
    holders = (0,)


def test_layers_are_summed_over_holders_of_copies_alone():
    wrong = statement(Placed(None, "head", (0, 1), ranks=(0, 1)), 0)
    assert wrong["placed"] and "the copies are on [0]" in wrong["complaint"]
    group = Placed(None, "head", (0, 1))
    assert not statement(group, 0)["complaint"]
    Placed.holders = (0, 1)
    assert "weights are held by [0, 1] and would drift apart" in statement(group, 0)["complaint"]


def test_shared_parameters_that_part_are_complaints():
    owner = GradientGroup(None, "trunk", (0, 1), ranks=(0, 1))
    sharing = GradientGroup(None, "head", (0, 1), ranks=(1,))
    sharing.shared.append((owner, ParameterEntry(nn.Parameter(torch.zeros(2)), "trunk.weight", [])))
    assert statement(sharing, 1)["complaint"] == (
        "on rank 1, 'trunk.weight' is shared with 'trunk' and summed over [0, 1] there but over [1] here"
    )
