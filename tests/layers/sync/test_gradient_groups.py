"""Who decides which ranks sum a gradient, on one rank."""

from types import SimpleNamespace

import torch
from torch import nn

from distdl_rma.layers.sync.gradient_groups import gradient_groups_of

MACHINE = SimpleNamespace(ranks=(0, 1, 2))


class Stating(nn.Module):
    """A module that names the ranks of all plain modules in it."""

    def __init__(self, *parts, ranks=(0, 2)):
        super().__init__()
        self.parts, self.ranks = nn.ModuleList(parts), ranks

    def get_ranks_synch_weights(self):
        return self.ranks


def linear():
    return nn.Linear(2, 1, bias=False)


def decided(module, name="", known=None):
    """Names and ranks of each group."""
    groups = gradient_groups_of(module, name, MACHINE, known or {})
    return [([entry.name for entry in group.entries], group.ranks) for group in groups]


def test_what_nobody_decides_for_is_summed_over_all_ranks():
    assert decided(nn.Sequential(linear(), nn.Sequential(linear()))) == [
        (["0.weight"], (0, 1, 2)),
        (["1.0.weight"], (0, 1, 2)),
    ]
    assert decided(linear(), "head") == [(["head.weight"], (0, 1, 2))]


def test_the_nearest_module_with_a_callback_decides():
    inner = Stating(linear(), ranks=[1, 2])
    model = nn.Sequential(linear(), Stating(linear(), inner), linear())
    assert decided(model) == [
        (["0.weight"], (0, 1, 2)),
        (["1.parts.0.weight"], (0, 2)),
        (["1.parts.1.parts.0.weight"], (1, 2)),
        (["2.weight"], (0, 1, 2)),
    ]


def test_a_shared_parameter_belongs_to_the_first_module_and_keeps_its_name():
    first, second = linear(), linear()
    second.weight = first.weight
    model = nn.Sequential(first, Stating(second))
    plain, stating = gradient_groups_of(model, "", MACHINE, {id(first.weight): "earlier"})
    (entry,) = plain.entries
    assert entry.name == "earlier" and entry.uses == [(first, "weight"), (second, "weight")]
    assert stating.entries == [] and stating.shared == [(plain, entry)]
    assert plain.nbytes == stating.nbytes == 8


def test_what_is_no_list_of_ranks_is_a_complaint():
    for ranks in (3, ["a"], None):
        (group,) = gradient_groups_of(Stating(linear(), ranks=ranks), "", MACHINE, {})
        assert group.complaint.startswith("get_ranks_synch_weights() gives no list of ranks")
        assert group.ranks == ()


def test_parameters_of_one_module_and_type_are_one_group():
    model = Stating(nn.Linear(2, 2), nn.Linear(2, 2))
    model.parts[1].bias = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    (group,) = gradient_groups_of(model, "", MACHINE, {})
    assert [[entry.name for entry in entries] for entries in group.by_module()] == [
        ["parts.0.weight", "parts.0.bias"],
        ["parts.1.weight"],
        ["parts.1.bias"],
    ]
