"""Calls of torch's functions with wrong arguments: torch's own ones, and its samples with a change."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from tests.fuzz.samples import drawn_errors, drawn_samples, operations

# What torch itself survives only with right arguments, or has no samples for a processor.
EXCLUDED = {
    "native_batch_norm",
    "nn.functional.batch_norm",
    "nn.functional.embedding_bag",
    "nn.functional.ctc_loss",
}
_DTYPES = torch.int64, torch.bool, torch.complex128, torch.float32
_MOST_ELEMENTS = 2000
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def functions() -> list[tuple[str, list[Any], Any]]:
    """Name, forms and description of the functions that have a rule."""
    found = []
    for op in operations():
        forms = list(
            dict.fromkeys(f for f in (op.op, op.method_variant, op.inplace_variant) if f is not None)
        )
        if op.name not in EXCLUDED:
            found.append((op.name, forms, op))
    return found


def wrong_calls(op: Any, rng: random.Random, most: int) -> Iterator[tuple[str, Arguments]]:
    """Arguments that torch may refuse, alike on all ranks, and what is wrong with them."""
    for n, found in enumerate(taken(lambda: drawn_errors(op), 60)):
        sample = found.sample_input
        yield f"error input {n}", ((sample.input, *sample.args), dict(sample.kwargs))
    dtypes = [
        dtype for dtype in (torch.float64, torch.int64, torch.bool) if dtype in op.supported_dtypes("cpu")
    ]
    if dtypes:
        samples = taken(lambda: drawn_samples(op, dtypes[0], False), 12)
        changed = [
            (f"sample {n}, {what}", given)
            for n, sample in enumerate(samples)
            if is_usable(((sample.input, *sample.args), dict(sample.kwargs)))
            for what, given in _changed((sample.input, *sample.args), dict(sample.kwargs))
        ]
        yield from rng.sample(changed, min(most, len(changed)))


def taken(make: Any, most: int) -> list[Any]:
    """The first of torch's samples, the same in every process but for those that torch takes from sets."""
    torch.default_generator.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [*islice(make(), most)]
    except Exception:
        # Torch has none of them.
        return []


def is_usable(given: Arguments) -> bool:
    """Whether all tensors are small ones of the processor."""
    tensors = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor)]
    return all(
        x.device.type == "cpu" and x.layout == torch.strided and x.numel() <= _MOST_ELEMENTS for x in tensors
    )


def _changed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[str, Arguments]]:
    leaves, spec = tree_flatten((args, kwargs))
    places = [at for at, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

    def put(changes: dict[int, Any]) -> Arguments:
        found: Arguments = tree_unflatten([changes.get(at, x) for at, x in enumerate(leaves)], spec)
        return found

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
                yield (
                    f"{name} {what}",
                    (tuple(other if at == name else x for at, x in enumerate(args)), {**kwargs, **more}),
                )
    for name, wrong in {"reduction": "nope", "dim": 9, "nonsense": 1}.items():
        yield f"{name} is {wrong}", (args, {**kwargs, name: wrong})
