"""What torch refuses whatever the values are is refused on every rank, in an error that its users catch."""

from __future__ import annotations

import random
import warnings

import pytest
import torch
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from distdl_rma import SplitTensor, UnsupportedError
from distdl_rma.geometry.intervals import Listed
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls import torch_errors
from distdl_rma.layers.split.calls.torch_errors import raise_as_torch
from distdl_rma.segments.machine import Machine
from tests.fuzz.samples import drawn_errors, drawn_samples, operations
from tests.layers.split.samples import forms_of, is_usable, taken
from tests.matrix import check_each, over_seeds

D = {"dtype": torch.float64}
# What torch itself survives only with right arguments, or has no samples for a processor.
_EXCLUDED = """
native_batch_norm nn.functional.batch_norm nn.functional.embedding_bag nn.functional.ctc_loss
"""
_DTYPES = torch.int64, torch.bool, torch.complex128, torch.float32
_SEEDS = 60
# Another number draws other arguments.
_DRAW = 2


def cut(P_world, whole, dim, uneven=False):
    """A whole tensor in blocks along a dimension, all of it on the first rank if uneven."""
    if not whole.dim():
        return SplitTensor(whole.clone(), lay.replicated(P_world, ()))
    dim %= whole.dim()
    layout = lay.balanced(P_world, whole.shape, (dim,))
    if uneven and layout.cut_dims:
        parts = Listed((whole.shape[dim], *(0,) * (P_world.size - 1)))
        layout = lay.with_splits(layout, {dim: parts})
    return SplitTensor(whole[layout.slices()].clone(), layout)


def wrong_calls(op, rng, most):
    """Arguments that torch may refuse, alike on all ranks, and what is wrong with them."""
    for n, given in enumerate(taken(lambda: drawn_errors(op), 60)):
        yield f"error input {n}", given
    known = op.supported_dtypes("cpu")
    dtype = next((each for each in (torch.float64, torch.int64, torch.bool) if each in known), None)
    if dtype is not None:
        changed = [
            (f"sample {n}, {what}", given)
            for n, sample in enumerate(taken(lambda: drawn_samples(op, dtype, False), 12))
            if is_usable(sample)
            for what, given in _changed(*sample)
        ]
        yield from rng.sample(changed, min(most, len(changed)))


def _changed(args, kwargs):
    leaves, spec = tree_flatten((args, kwargs))
    places = [at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def put(changes):
        return tree_unflatten([changes.get(at, x) for at, x in enumerate(leaves)], spec)

    for dtype in _DTYPES:
        yield f"all of {dtype}", put({at: leaves[at].to(dtype) for at in places})
    for at in places:
        x = leaves[at]
        if len(places) > 1:
            for dtype in _DTYPES:
                yield f"tensor {at} of {dtype}", put({at: x.to(dtype)})
            if x.dim():
                yield f"tensor {at} longer", put({at: torch.cat([x, x, x], -1)})
                yield f"tensor {at} longer ahead", put({at: torch.cat([x, x, x], 0)})
        yield f"tensor {at} with more dimensions", put({at: x.expand(1, 1, 1, *x.shape).clone()})
        if x.dim() and x.shape[0]:
            yield f"tensor {at} with fewer dimensions", put({at: x[0].clone()})
    for at, x in enumerate(leaves):
        if isinstance(x, str):
            yield f"{x} is nope", put({at: "nope"})
        elif type(x) is int:
            yield f"{x} is 99", put({at: 99})
            yield f"{x} is -99", put({at: -99})
    for name, one in (*enumerate(args), *kwargs.items()):
        if isinstance(one, (tuple, list)) and one and all(type(n) is int for n in one):
            for what, other in (("longer", (*one, 1)), ("shorter", tuple(one[:-1]))):
                more = {name: other} if isinstance(name, str) else {}
                places = tuple(other if at == name else x for at, x in enumerate(args))
                yield f"{name} {what}", (places, {**kwargs, **more})
    for name, wrong in {"reduction": "nope", "dim": 9, "nonsense": 1}.items():
        yield f"{name} is {wrong}", (args, {**kwargs, name: wrong})


def refusal(call, args, kwargs):
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call(*args, **kwargs)
    except Exception as error:
        return error
    return None


def check_function(P_world, comm, seed):
    known = [op for op in operations() if op.name not in _EXCLUDED.split()]
    for op in known[seed::_SEEDS]:
        name, forms, rng = op.name, forms_of(op), random.Random(f"{op.name} {_DRAW}")
        found, calls = [], [*wrong_calls(op, rng, 4)]
        shapes = [
            (what, [x.shape if isinstance(x, torch.Tensor) else str(x) for x in tree_flatten(given)[0]])
            for what, given in calls
        ]
        if len({*comm.allgather(str(shapes))}) > 1:
            # Torch goes through a set of texts, whose order differs between processes.
            continue
        for what, given in calls:
            call, dim, which = rng.choice(forms), rng.randrange(4), rng.randrange(3)
            uneven = rng.random() < 0.6
            if not is_usable(given):
                continue
            wrong = refusal(call, *tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, given))
            # A divisor, or an index that is split, is known to the rank that has it.
            values = "ZeroDivision" in str(wrong) or ("out of bounds" in str(wrong) and which)
            if wrong is None or values:
                continue
            leaves, spec = tree_flatten(given)
            places = [at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
            if not places:
                continue
            for at in places[:1] if which == 0 else places:
                leaves[at] = cut(P_world, leaves[at], dim if which < 2 else rng.randrange(4), uneven)
            args, kwargs = tree_unflatten(leaves, spec)
            mine = refusal(call, args, kwargs)
            if not isinstance(mine, (type(wrong), UnsupportedError)):
                found.append(f"{what}: {type(wrong).__name__} {wrong}, but here {mine!r}")
        assert not any(everywhere := comm.allgather(found)), f"{name}: {everywhere}"
        whole = torch.arange(6.0, **D)
        assert float(cut(P_world, whole, 0).sum().full_tensor()) == float(whole.sum()), name


@pytest.mark.mpi
@over_seeds(_SEEDS, each=6)
def test_what_torch_refuses_is_refused_on_every_rank(P_world, comm, seeds):
    check_each(check_function, P_world, comm, seeds)


_ALIKE = {
    "softmax of integers": lambda x: F.softmax((x * 5).long(), 2),
    "softmax of integers along another dimension": lambda x: F.softmax((x * 5).long(), 1),
    "a reduction that is none": lambda x: F.mse_loss(x, x * 2, reduction="nope"),
    "a bias too long": lambda x: F.conv2d(x, torch.ones(2, 4, 1, 1, **D), torch.ones(3, **D)),
    "a bias of one": lambda x: F.conv2d(x, torch.ones(2, 4, 1, 1, **D), torch.ones(1, **D)),
    "a bias of another type": lambda x: F.conv2d(x, torch.ones(2, 4, 1, 1, **D), torch.ones(2)),
    "three sizes for two dimensions": lambda x: F.adaptive_avg_pool2d(x, (2, 2, 2)),
    "a product of other types": lambda x: x @ torch.rand(3, 2),
    "a linear map of another type": lambda x: F.linear(x, torch.rand(2, 3)),
    "a contraction of other types": lambda x: torch.einsum("nchw,wo->ncho", x, torch.rand(3, 2)),
    "largest complex numbers": lambda x: torch.complex(x, x).amax(1),
    "sums over too many dimensions": lambda x: torch.tensordot(x, x, dims=9),
    "an index out of range": lambda x: x[:, [0, 9]],
    "a plain index out of range": lambda x: x.gather(1, torch.full((1, 1, 1, 3), 9)),
    "complex numbers in order": lambda x: torch.complex(x, x).sort(1)[0],
    "bits of numbers": lambda x: x & 1,
    "a mean of integers": lambda x: (x * 5).long().mean(),
    "a variance of integers": lambda x: (x * 5).long().var(0),
}


@pytest.mark.mpi
@pytest.mark.parametrize("name", _ALIKE)
def test_the_same_error_comes_to_ranks_with_and_without_elements(P_world, comm, name):
    call = _ALIKE[name]
    whole = torch.linspace(0, 1, 24, **D).view(2, 4, 1, 3)
    wrong = refusal(call, (whole,), {})
    for dim in range(4):
        for uneven in (False, True):
            x = cut(P_world, whole, dim, uneven)
            with pytest.raises(type(wrong)):
                call(x)
            assert float(x.sum().full_tensor()) == pytest.approx(float(whole.sum()))
    assert not Machine.of(P_world).segments.notices.failed


@pytest.mark.mpi
@pytest.mark.parametrize(
    "call",
    [
        F.instance_norm,
        lambda x: F.layer_norm(x, x.shape[2:]),
        lambda x: F.conv2d(x, torch.ones(3, 3, 3, 3, **D), padding=1),
        lambda x: F.softmax(x, 2),
    ],
    ids=["instance_norm", "layer_norm", "conv2d", "softmax"],
)
def test_an_error_of_a_backward_on_all_ranks_leaves_the_machine_usable(P_world, comm, call):
    x = cut(P_world, torch.linspace(0, 1, 216, **D).view(2, 3, 6, 6), 2)
    x.to_local().requires_grad_()
    y = call(x)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert float(x.detach().sum().full_tensor()) == pytest.approx(108)


@pytest.mark.mpi
@pytest.mark.parametrize("call", [torch.any, torch.all, torch.Tensor.any])
def test_any_and_all_over_no_dimension_are_the_truth_of_each_element(P_world, comm, call):
    whole = torch.arange(8).view(2, 4) % 3
    for given in ((), []):
        found = call(cut(P_world, whole, 0), given)
        assert torch.equal(found.full_tensor(), call(whole, given))


def test_a_kind_that_torch_takes_is_asked_once_and_one_that_it_refuses_each_time(monkeypatch):
    monkeypatch.setattr(torch_errors, "_ACCEPTED", {})
    calls = []

    def function(x, n):
        calls.append(n)
        if n > 2:
            raise RuntimeError("too many")

    x = torch.rand(3)
    for n in (1, True, 1, 3):
        if n > 2:
            with pytest.raises(RuntimeError, match="too many"):
                raise_as_torch(function, (x, n), {})
        else:
            raise_as_torch(function, (x, n), {})
    assert calls == [1, True, *[3] * 3]
    with pytest.raises(RuntimeError, match="too many"):
        raise_as_torch(function, (x + 1, 3), {})
    raise_as_torch(function, (x + 1, 1), {})
    assert calls == [1, True, *[3] * 6]


def test_asking_torch_draws_no_random_number():
    x, state = torch.rand(3), torch.get_rng_state()
    raise_as_torch(F.dropout, (x, 0.5), {})
    assert torch.equal(state, torch.get_rng_state())


def test_what_torch_refuses_of_some_values_only_is_not_refused(monkeypatch):
    monkeypatch.setattr(torch_errors, "_ACCEPTED", {})

    def function(x):
        if not x.sum():
            raise RuntimeError("zeros")

    class Split(torch.Tensor):
        pass

    x = torch.rand(3).as_subclass(Split)
    x._layout = type("Layout", (), {"shape": (3,), "cut_dims": (0,)})
    raise_as_torch(function, (x,), {})
    matrix = torch.rand(3, 3).as_subclass(Split)
    matrix._layout = type("Layout", (), {"shape": (3, 3), "cut_dims": (0,)})
    # Which raises a plain RuntimeError of singular matrices.
    raise_as_torch(torch.linalg.lu_factor, (matrix,), {"pivot": True})
