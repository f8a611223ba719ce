"""Functions on torch's own samples of their arguments, on two grids each, against whole tensors."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from distdl_rma import Partition, SplitTensor, UnsupportedError
from distdl_rma.layers.ops.core.autograd import mark_summed_later
from distdl_rma.layers.split.calls.table import RULES, functions_named
from distdl_rma.testing import grids
from tests.fuzz.samples import drawn_samples, operations
from tests.layers.split.against_whole import check

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
# So many samples of the first type that a function takes, and one of each other; of the first that torch has.
MOST, FIRST, MOST_ELEMENTS = 4, 48, 2000
# What torch computes of whole numbers in float32 is rounded otherwise in another order.
ROUNDING = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.int64: 1e-5, torch.bool: 1e-5}
# Every sample of these is refused, and some samples of others, for one of these reasons.
REFUSED = {"item", "sparse.mm"}
REASONS = (
    "only floating point numbers are",
    "the indices are split",
    "use the form without the underscore",
    "an argument beside the input is split",
    "it is given coordinates",
)
EXCLUDED = {
    "broadcast_tensors": "returns plain tensors for plain ones, whose gradients are no contributions",
    "nn.functional.batch_norm": "torch has no samples for a processor",
    "nn.functional.multi_head_attention_forward": "draws numbers",
}
# Of complex numbers torch differentiates no loss of these that knows the phase of an eigenvector.
WITHOUT_GRADIENT = {"linalg.eig", "linalg.eigh"}


def samples_of(file: str, parts: int = 1) -> Callable[..., None]:
    """Test that compares the functions whose handlers a file of ``split`` has, in so many parts."""

    @pytest.mark.sizes(2, 3, 4)
    @pytest.mark.parametrize("part", range(parts))
    def test(P_world: Partition, part: int) -> None:
        functions = [op for op in operations() if any(home.endswith(f".{file}") for home in _homes(op))]
        assert len(functions) >= parts
        for op in functions[part::parts]:
            if op.name not in EXCLUDED:
                # Torch takes some samples from sets, whose order is that of the hashes of a process.
                some = MPI.COMM_WORLD.bcast([*_samples(op)] if MPI.COMM_WORLD.rank == 0 else None)
                compared = sum(_check_sample(P_world, op, at, *sample) for at, sample in enumerate(some))
                assert bool(compared) == (op.name not in REFUSED), f"{op.name}: {compared} of {len(some)}"

    return test


def on_device(
    check: Callable[..., None],
    device: torch.device,
    P_world: Partition,
    function: Callable[..., Any],
    *tensors: Sequence[torch.Tensor],
    **how: Any,
) -> None:
    """``check`` with a function that computes on a device, where all tensors are copied, on one grid."""

    def moved(*given: Any) -> Any:
        if not isinstance(given[0], SplitTensor):
            return function(*given)
        there = [x.to(device) for x in given]
        for x in there:
            if not isinstance(x, SplitTensor):
                mark_summed_later(x, True)
        return tree_map(lambda y: y.cpu() if isinstance(y, torch.Tensor) else y, function(*there))

    check(P_world, moved, *tensors, **how | {"only": how["only"][:1]})


def taken(make: Callable[[], Iterator[Any]], most: int) -> list[Arguments]:
    """The first of torch's samples, the same in every process but for those that torch takes from sets."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = [getattr(each, "sample_input", each) for each in islice(make(), most)]
    except Exception:
        # Torch has none of them.
        return []
    return [((each.input, *each.args), dict(each.kwargs)) for each in found]


def is_usable(given: Arguments) -> bool:
    """Whether all tensors are small ones of the processor."""
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
    return all(
        x.device.type == "cpu" and x.layout == torch.strided and x.numel() <= MOST_ELEMENTS for x in tensors
    )


def forms_of(op: Any) -> list[Callable[..., Any]]:
    """The function, its method and its method in place, as far as there are any."""
    forms = op.op, op.method_variant, op.inplace_variant
    return [*dict.fromkeys(form for form in forms if form is not None)]


def _homes(op: Any) -> set[str]:
    names = [op.name, *(alias.name for alias in op.aliases)]
    functions = [each for name in names for each in functions_named(name.rpartition(".")[2])]
    return {RULES[each].handler.__module__ for each in functions if each in RULES}


def _samples(op: Any) -> Iterator[tuple[Arguments, float]]:
    count = MOST
    for dtype, rounding in ROUNDING.items():
        if dtype not in op.supported_dtypes("cpu"):
            continue
        needs = op.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
        found = taken(lambda dtype=dtype, needs=needs: drawn_samples(op, dtype, needs), FIRST)
        some = [tree_map(_leaf, each) for each in found]
        some = [given for given in some if is_usable(given) and _first(given).dim() and _travels(given)]
        for given in some[:: max(1, len(some) // count)][:count]:
            yield given, rounding
        count = 1


def _leaf(x: Any) -> Any:
    return x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor) else x


def _first(given: Arguments) -> torch.Tensor:
    """The first tensor, or a number."""
    return next((x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)), torch.tensor(0))


def _travels(given: Arguments) -> bool:
    with suppress(Exception):
        return bool(pickle.dumps(given))
    return False


def _check_sample(P_world: Partition, op: Any, at: int, given: Arguments, rounding: float) -> int:
    # In how many ways it was compared: the first tensor is split, with and without those that look like it.
    leaves, spec = tree_flatten(given)
    places = [place for place, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
    first, *others = places
    like_it = [place for place in others if leaves[place].dim() == leaves[first].dim()]
    forms = forms_of(op)
    if leaves[first].is_complex():
        # Torch does not differentiate all forms in place.
        forms = forms[:1]
    call, compared = forms[at % len(forms)], 0
    every = [*grids(leaves[first].dim(), P_world.size)]
    # One sample after the other is cut along other dimensions.
    chosen = [*dict.fromkeys(every[(2 * at + n) % len(every)] for n in range(2))]

    def called_with(order: Sequence[int]) -> Callable[..., Any]:
        def called(*tensors: torch.Tensor) -> Any:
            named = dict(zip(order, tensors, strict=True))
            args, kwargs = tree_unflatten([named.get(place, x) for place, x in enumerate(leaves)], spec)
            if call is op.inplace_variant:
                args = args[0].clone(), *args[1:]
            return call(*args, **kwargs)

        return called

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            called_with([])()
        except Exception:
            # Torch has no such form of this sample.
            call = op.op
        for order in ([first, *like_it], [first])[0 if like_it else 1 :]:
            rest = [place for place in places if place not in order]
            try:
                check(
                    P_world,
                    called_with([*order, *rest]),
                    [leaves[place] for place in order],
                    [leaves[place] for place in rest],
                    only=chosen,
                    atol=rounding,
                    rtol=rounding,
                    gradients=leaves[first].requires_grad and op.name not in WITHOUT_GRADIENT,
                )
                compared += 1
            except UnsupportedError as refusal:
                if op.name not in REFUSED and not any(reason in str(refusal) for reason in REASONS):
                    raise AssertionError(f"sample {at} of {op.name} by {call}: {refusal}") from refusal
            except BaseException as error:
                error.add_note(f"sample {at} of {op.name} by {call}: {given}")
                raise
    return compared
