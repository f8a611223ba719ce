"""Callbacks of several ranks compared, in one process."""

import copy
import re

import pytest
import torch
from torch import nn

from distdl_rma.layers.sync.callback_check import problems, statement
from distdl_rma.layers.sync.gradient_groups import GradientGroup, ParameterEntry

HEAD = {
    "name": "head",
    "ranks": None,
    "holders": [],
    "nbytes": [48, 48],
    "answers": {},
    "complaint": "",
    "new": True,
    "parameters": {"head.weight": [[4, 3], "float32", True]},
}
BOTH = {"head.weight": [[4], "float32", True], "tail.weight": [[4], "float32", True]}


def statements(*changes):
    """What so many ranks say: the same, but for the given changes; None for a rank without the cover."""
    return {
        rank: [] if change is None else [copy.deepcopy(HEAD) | change] for rank, change in enumerate(changes)
    }


def first(words):
    return next(problems(words), None)


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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (({"ranks": [0, 7]}, {}), r"'head': .* gave \[0, 7\] on rank 0; rank 7 is not in M = \(0, 1\)"),
        (({"ranks": [1]}, {}), r"'head': .* gave \[1\] on rank 0; the rank itself is missing"),
        (({"ranks": [0, 0]}, {}), r"gave \[0, 0\] on rank 0; a rank is listed more than once"),
        (({"ranks": [0]}, {}), r"gave \[0, 1\] on rank 1 but \[0\] on rank 0"),
        (({"ranks": [1, 0]}, {}), r"gave \[1, 0\] on rank 0 but \[0, 1\] on rank 1"),
        (({}, None), r"'head' \(head.weight\): .* over ranks \[0, 1\], but rank 1 does not hold it"),
        (({"ranks": []}, {"ranks": []}), r"no callback covers it, but ranks \[0, 1\] hold it"),
        (({"nbytes": [40, 48]}, {}), r"gave 40 bytes on rank 0, its gradients are 48 bytes"),
        (({"nbytes": [56, 48]}, {}), r"gave 56 bytes on rank 0, its gradients are 48 bytes"),
        (({}, {"complaint": "it raised"}), r"'head': on rank 1, it raised"),
        (
            ({}, {"parameters": {"head.weight": [[3, 4], "float32", True]}}),
            r"is \(4, 3\) float32 on rank 0 but \(3, 4\) float32 on rank 1",
        ),
        (({"ranks": [0, 1], "holders": [0]}, {}), r"copies of this rank's weights are on \[0\]"),
        (({"ranks": [], "holders": None}, {}), r"weights are held by \[0, 1\] and would drift apart"),
        (
            ({"answers": {"get_ranks_synch_norm": [[0, 7], [0, 1]]}}, {}),
            r"get_ranks_synch_norm\(\) gave \[0, 7\] on rank 0, the ranks that share .* are \[0, 1\]",
        ),
        (
            ({"answers": {"get_ranks_synch_norm": [[0], [0, 1]]}}, {}),
            r"get_ranks_synch_norm\(\) gave \[0\] on rank 0 but \[0, 1\] on rank 1: ranks that share",
        ),
        (
            ({"answers": {"get_sizeof_norm": [8, 32]}}, {}),
            r"get_sizeof_norm\(\) gave 8 on rank 0, it is 32 bytes",
        ),
        # What learns on one rank only, or is registered anew on some of its ranks.
        (
            ({}, {"parameters": {"head.weight": [[4, 3], "float32", False]}}),
            r"is \(4, 3\) float32 on rank 0 but \(4, 3\) float32, frozen on rank 1$",
        ),
        (({}, {"new": False}), r"on rank 0 but \(4, 3\) float32, registered earlier on rank 1$"),
        # The order of what travels together.
        (
            ({"parameters": BOTH}, {"parameters": dict(reversed(BOTH.items()))}),
            "^'head.weight' on rank 0 comes where 'tail.weight' does on rank 1",
        ),
    ],
)
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
    assert statement(group_of(nn.Linear(3, 4, bias=False))) == HEAD | {"holders": ()}
    stated = statement(group_of(nn.Linear(3, 4, bias=False), ranks=(1,), get_sizeof_gradients=lambda: 7))
    assert stated["ranks"] == (1,) and stated["nbytes"] == [7, 48]
    stated = statement(group_of(nn.Linear(3, 4), get_ranks_synch_norm=lambda: [1], get_sizeof_norm=lambda: 2))
    assert stated["answers"] == {"get_ranks_synch_norm": [[1], []], "get_sizeof_norm": [2, 0]}


def test_callbacks_that_raise_and_shared_parameters_that_part_are_complaints():
    stated = statement(group_of(nn.Linear(3, 4), get_sizeof_gradients=lambda: 1 / 0))
    words = "raised, or returned neither a number nor ranks: Zero"
    assert stated["complaint"].startswith(f"get_sizeof_gradients() {words}")
    stated = statement(group_of(nn.Linear(3, 4), get_sizeof_norm=lambda: 1 / 0))
    assert stated["complaint"].startswith(f"get_sizeof_norm() {words}")
    owner = GradientGroup(None, "trunk", (0, 1), ranks=(0, 1))
    sharing = GradientGroup(None, "head", (0, 1), ranks=(1,))
    sharing.shared.append((owner, ParameterEntry(nn.Parameter(torch.zeros(2)), "trunk.weight", [])))
    assert statement(sharing)["complaint"] == (
        "'trunk.weight' is shared with 'trunk' and summed over [0, 1] there but over [1] here"
    )
