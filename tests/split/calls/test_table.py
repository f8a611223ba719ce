"""The table finds functions under all of their names."""

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.split.calls.table import RULES, functions_named, name_of, rule


def test_a_name_stands_for_methods_and_functions():
    found = list(functions_named("add"))
    assert torch.add in found
    assert torch.Tensor.add in found
    assert len({id(each) for each in found}) == len(found)


def test_names_for_messages():
    assert name_of(torch.Tensor.add) == "Tensor.add"
    assert name_of(torch.Tensor.shape.__get__) == "Tensor.shape"
    assert name_of(F.mse_loss) == "torch.nn.functional.mse_loss"


def test_a_rule_is_entered_for_functions_and_names():
    def mine(x):
        return x

    @rule("registered", mine, says="as it is")
    def handler(func, args, kwargs):
        return args[0]

    try:
        assert RULES[mine].handler is handler
        assert RULES[mine].says == "as it is"
    finally:
        del RULES[mine]
