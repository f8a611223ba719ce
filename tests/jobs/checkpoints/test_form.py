"""What a state says in JSON is the same when it is read."""

import json
from collections import Counter, OrderedDict, defaultdict

import numpy as np
import pytest
import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.jobs.checkpoints.form import decode, encode, in_line, tensors_in


def there_and_back(value):
    taken = {}

    def take(name, tensor):
        taken[name] = tensor
        return {"tensor": name}

    form = encode(value, "x", take)
    assert set(tensors_in(form)) == taken.keys()
    return decode(json.loads(json.dumps(form)), taken.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -(10**30), 0.1, float("inf"), "text", [1, [2.5, None]], (1, (2, 3)), {1, 2},
        {"a": 1, 2: {"b": (1,)}, (1, 2): "tuple"}, Counter({3: 1, 5: 2}), b"\x00\xff", 1 + 2j, torch.float16,
        OrderedDict(b=1, a=2), {"dict": 1}, {"tensor": "name"}, {"tensor": {"tensor": "name"}},
        torch.Size([1, 2]), defaultdict(list, a=[1]), defaultdict(None, {1: 2}), {1, "a", (2, b"x")},
        np.float32(0.1), np.int64(7), np.str_("x"), np.bytes_(b""), np.bool_(True), np.longdouble(1) / 3,
        np.datetime64(1, "ns"), np.timedelta64(3, "D"), np.complex64(1j),
    ],
)  # fmt: skip
def test_plain_values_are_the_same(value):
    found = there_and_back(value)
    assert found == value
    assert type(found) is type(value)
    if isinstance(value, dict):
        assert list(found) == list(value)
    if isinstance(value, defaultdict):
        assert found.default_factory is value.default_factory


def test_not_a_number_and_numpys_scalars():
    assert np.isnan(there_and_back(float("nan")))
    assert there_and_back(np.float32(0.1)) == float(np.float32(0.1))


def test_tensors_and_arrays_keep_type_and_place():
    arrays = np.eye(2), np.array(3.0), np.arange(6).reshape(2, 3).T, np.zeros((0, 2), np.int8)
    found = there_and_back({"a": [torch.arange(3)], "b": arrays})
    assert torch.equal(found["a"][0], torch.arange(3))
    for array, wanted in zip(found["b"], arrays, strict=True):
        assert isinstance(array, np.ndarray) and array.dtype == wanted.dtype
        assert array.shape == wanted.shape and np.array_equal(array, wanted)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3).T, np.array(["a", "\u00b5m"]), np.arange(3).astype("M8[s]"),
        np.zeros((0, 2), ">f8"), np.array(0.1, np.longdouble),
        np.array([[None, "a"], [[1, 2], (3,)]], object),
        np.array([[1], [2]], object), np.ma.masked_less(np.arange(3.0), 1),
        np.ma.array([1, 2], mask=[True, False], fill_value=7, hard_mask=True),
    ],
)  # fmt: skip
def test_arrays_that_torch_has_no_elements_for_are_the_same(array):
    found = there_and_back([array])[0]
    assert (type(found), found.dtype, found.dtype.str) == (type(array), array.dtype, array.dtype.str)
    assert found.shape == array.shape and found.tolist() == array.tolist()
    if isinstance(array, np.ma.MaskedArray):
        assert np.array_equal(found.data, array.data)
        assert (found.fill_value, found.hardmask) == (array.fill_value, array.hardmask)


@pytest.mark.parametrize(
    "form",
    [
        {}, {"a": 1, "b": 2}, {"unknown": 1}, {"tuple": 5}, {"set": [[]]}, {"dict": [[[1], 2]]},
        {"dict": [[1]]}, {"scalar": ["float32", "x"]}, {"scalar": ["float31", 1]}, {"bytes": "###"},
        {"complex": ["a", 1]}, {"dtype": "load"}, {"dtype": "seed"}, {"dtype": 3}, {"tensor": "nowhere"},
        {"array": 3}, {"defaultdict": ["eval", []]}, {"objects": [[1 << 60], [1]]},
        {"number": ["O", "AAAAAAAAAAA="]},
        {"elements": ["|O", [1], {"tensor": "x"}]}, {"elements": ["<f8", [1 << 40], {"tensor": "x"}]},
        {"number": ["<f8", "AA=="]}, {"masked": [1]}, {"elements": ["f4,O", [1], {"tensor": "x"}]},
    ],
)  # fmt: skip
def test_what_is_no_form_is_an_error_and_names_no_function(form):
    with pytest.raises((ArithmeticError, AttributeError, LookupError, TypeError, ValueError)):
        decode(form, {"x": torch.zeros(8, dtype=torch.uint8)}.__getitem__)


def test_a_parameter_may_be_called_tensor():
    assert [*tensors_in({"tensor": {"tensor": "tensor"}, "x": {"tensor": "x"}})] == ["tensor", "x"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_a_tensor_of_one_number_is_exact_in_line(dtype):
    x = torch.tensor(0.1).to(dtype)
    found = decode(json.loads(json.dumps(in_line(x))), {}.__getitem__)
    assert found.dtype == dtype
    assert torch.equal(found, x)


@pytest.mark.parametrize(
    "value",
    [
        object(), lambda: 1, [torch.nn.Linear(1, 1)], np.zeros(1, "f4,i4"), np.zeros(1, "f4,O"),
        np.array([object()]), np.rec.array([1]), type("Mine", (dict,), {})(),
        defaultdict(lambda: 1), np.void(b"x"),
        torch.Generator(), np.random.default_rng(1), np.ma.array(["a"]),
    ],
)  # fmt: skip
def test_what_needs_pickle_is_refused_by_name(value):
    with pytest.raises(UnsupportedError, match=r"'loader/0.*has no form without pickle|'loader.*no form"):
        encode(value, "loader", lambda name, tensor: None)


def test_sparse_and_meta_tensors_are_refused():
    for x in (torch.eye(2).to_sparse(), torch.empty(2, device="meta")):
        with pytest.raises(UnsupportedError, match="dense tensors with memory"):
            encode(x, "x", lambda name, tensor: None)
