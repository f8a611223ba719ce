"""Arguments of torch's functions are those that torch has."""

import inspect

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

import distdl_rma.layers.split.functions  # noqa: F401 - fills the table
from distdl_rma.layers.split.calls.signatures import first_by_place, named, signature_of
from distdl_rma.layers.split.calls.table import RULES

# Forms of these have other arguments at a place than the longest one; their rules know both.
OTHERWISE = """
copy_ dsplit eq gru hsplit isin linalg_matrix_rank lstm max min ne randint_like random_ repeat_interleave
result_type rnn_relu rnn_tanh scatter scatter_ std std_mean tensor_split to var var_mean view vsplit
"""
# And these have another default.
DEFAULTS = {"conv1d padding", "conv2d padding", "conv3d padding"}
# Those of lists pass on what they are given.
FUNCTIONS = [each for each in RULES if not getattr(each, "__name__", "_foreach_").startswith("_foreach_")]


def forms(function):
    found = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(function, '__name__', '')}")
    for schema in found:
        tensors = any("Tensor" in str(each.type) for each in schema.arguments)
        writes = any(each.is_out for each in schema.arguments) or not schema.returns
        if tensors and not writes and "Dimname" not in str(schema):
            yield schema.arguments


def of_c(function):
    return inspect.isbuiltin(function) or inspect.ismethoddescriptor(function)


def called(argument):
    return "input" if argument.name == "self" else argument.name


def as_read(value):
    return tuple(value) if isinstance(value, list) else value


def test_names_order_and_defaults_are_those_of_every_form_in_c():
    otherwise, seen = set(), 0
    for function in filter(of_c, FUNCTIONS):
        first, places, most, defaults = signature_of(function)
        for begin, *others in forms(function):
            seen += 1
            by_place = [called(each) for each in others if not each.kwarg_only]
            if begin.kwarg_only or [first, *places][: 1 + len(by_place)] != [called(begin), *by_place]:
                otherwise.add(function.__name__)
                continue
            for each in others:
                wanted = as_read(each.default_value) if each.has_default_value() else None
                if wanted is not None and defaults[called(each)] != wanted:
                    otherwise.add(f"{function.__name__} {each.name}")
            assert most >= 1 + len(by_place)
    assert otherwise <= {*OTHERWISE.split(), *DEFAULTS} and seen > 1000


def test_names_order_and_defaults_are_those_of_functions_of_python():
    seen = 0
    for function in FUNCTIONS:
        try:
            parameters = [*inspect.signature(function).parameters.values()]
        except (TypeError, ValueError):
            continue
        if of_c(function) or any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            continue
        seen += 1
        first, places, most, defaults = signature_of(function)
        by_place = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
        assert [first, *places][: len(by_place)] == by_place and most == max(1, len(by_place))
        assert defaults == {
            p.name: None if p.default is p.empty else p.default for p in parameters if p.name != first
        }
    assert seen > 100


def test_names_that_torch_publishes_for_functions_that_choose_another_one():
    assert signature_of(F.adaptive_max_pool2d).places == ("output_size", "return_indices")
    assert signature_of(F.max_pool1d).defaults["ceil_mode"] is False
    # Which torch's function of Python passes on.
    assert named(torch.max_pool2d, ("x", 3), {"return_indices": False})["return_indices"] is False


def test_arguments_go_by_place_and_name_and_have_torchs_defaults():
    assert named(torch.sum, (1,), {"dim": 2}) == {"dim": 2, "keepdim": False, "dtype": None}
    assert named(torch.sum, (1, 0, True), {}) == {"dim": 0, "keepdim": True, "dtype": None}
    named_of_conv = named(torch.conv2d, ("x", "w"), {"groups": 2}).values()
    assert [*named_of_conv] == ["w", None, (1, 1), (0, 0), (1, 1), 2]
    # Torch takes a list apart, too.
    assert named(torch.Tensor.flip, ("x", 0, 1), {}) == {"dims": (0, 1)}


def test_numpys_names_are_torchs_and_others_are_errors():
    given = named(torch.sum, (1,), {"axis": 2, "keepdims": True, "out": None})
    assert given == {"dim": 2, "keepdim": True, "dtype": None}
    for name in ("dims", "out"):
        with pytest.raises(TypeError, match=f"unexpected argument '{name}'"):
            named(torch.sum, (1,), {name: 2})


def test_the_first_argument_gets_its_place():
    assert first_by_place(torch.sum, {"input": 1, "dim": 2}) == ((1,), {"dim": 2})
    assert first_by_place(torch.cat, {"dim": 1, "tensors": [0]}) == (([0],), {"dim": 1})
    assert first_by_place(torch.sum, {"x": 1}) == ((1,), {})
    assert first_by_place(F.normalize, {"p": 2}) == ((), {"p": 2})
