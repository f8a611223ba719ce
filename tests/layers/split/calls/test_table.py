"""The table finds functions under all of their names."""

import inspect
import re

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.table import RULES, functions_named, name_of, rule


def test_a_name_stands_for_methods_and_functions():
    found = list(functions_named("add"))
    assert torch.add in found
    assert torch.Tensor.add in found
    assert len({id(each) for each in found}) == len(found)


def _schemas(name):
    # Arguments of an operator of ATen, in each of its forms, and what they are where nothing is given.
    return [
        {
            each.name: each.default_value if each.has_default_value() else ...
            for each in schema.arguments
            if not each.is_out
        }
        for schema in torch._C._jit_get_schemas_for_operator(f"aten::{name}")
        if schema.arguments and str(schema.arguments[0].type) == "Tensor"
    ]


def _sharing(name, entered):
    # Functions with a name that have the handler of a rule.
    return [
        each for each in functions_named(name) if each in RULES and RULES[each].handler is entered.handler
    ]


def test_functions_of_one_name_that_share_a_rule_have_the_same_defaults():
    # Of these the handler knows that they differ.
    known = {"linalg_diagonal", "linalg_cross"}
    differ = set()
    for function, entered in RULES.items():
        name = getattr(function, "__name__", "")
        base = re.sub("^(linalg|special|fft)_", "", name)
        shared = _sharing(base, entered)
        if base == name or not any(each.__name__ == base for each in shared):
            continue
        ours, theirs = (
            {key: n for form in _schemas(each) for key, n in form.items()} for each in (name, base)
        )
        both = [(ours[key], theirs[key]) for key in {*ours} & {*theirs}]
        if any(... not in pair and pair[0] != pair[1] for pair in both):
            differ.add(name)
    assert differ == known


def test_functions_of_c_take_their_arguments_in_the_order_of_those_of_their_names():
    # Of these the handler knows that they do not.
    known = {"batch_norm", "instance_norm", "embedding"}
    differ = set()
    for function in [each for each in RULES if inspect.isfunction(each)]:
        code = function.__code__
        names = [{"input": "self"}.get(name, name) for name in code.co_varnames[: code.co_argcount]]
        shared = _sharing(function.__name__, RULES[function])
        if names and any(inspect.isbuiltin(each) for each in shared):
            for schema in _schemas(function.__name__):
                theirs = [{"input": "self"}.get(name, name) for name in schema]
                both = [name for name in theirs if name in names]
                first = zip(names[:2], theirs[:2], strict=False)
                if both != [name for name in names if name in both] or any(a != b for a, b in first):
                    differ.add(function.__name__)
    assert differ == known


def test_names_for_messages():
    assert name_of(torch.Tensor.add) == "Tensor.add"
    assert name_of(torch.Tensor.shape.__get__) == "Tensor.shape"
    assert name_of(F.mse_loss) == "torch.nn.functional.mse_loss"


def test_a_rule_is_entered_for_functions_and_names():
    def mine(x):
        return x

    @rule("registered", mine, doc="as it is")
    def handler(func, args, kwargs):
        return args[0]

    try:
        assert RULES[mine].handler is handler
        assert RULES[mine].doc == "as it is"
    finally:
        del RULES[mine]
