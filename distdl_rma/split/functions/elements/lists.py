"""Functions of lists of tensors, as optimizers call them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from distdl_rma.split.calls.table import rule
from distdl_rma.split.tensor import SplitTensor, composed, local_of, mapped, refused

_OF_EACH = "_foreach_"
_NAMES = dir(torch._C._VariableFunctions)
_FUSED = "sgd_", "adam_", "adamw_", "adagrad_"


def _of_products(name: str) -> Callable[..., Any]:
    def function(x: Any, first: Any, second: Any, value: Any = 1, *, scalars: Any = None) -> Any:
        value = value if scalars is None else scalars
        return getattr(x, name)(first, second, value=value)

    return function


# Where the function of one tensor is called otherwise, or with other arguments.
_OTHERWISE: dict[str, Callable[..., Any]] = {
    "norm": lambda x, order=2, dtype=None: torch.linalg.vector_norm(x, order, dtype=dtype),
    **{name: _of_products(name) for name in ("addcmul", "addcmul_", "addcdiv", "addcdiv_")},
    **{name: lambda x, other: x.clamp(min=other) for name in ("maximum", "clamp_min")},
    **{name: lambda x, other: x.clamp(max=other) for name in ("minimum", "clamp_max")},
    **{name: lambda x, other: x.clamp_(min=other) for name in ("maximum_", "clamp_min_")},
    **{name: lambda x, other: x.clamp_(max=other) for name in ("minimum_", "clamp_max_")},
}


@rule("pointwise", *(name for name in _NAMES if name.startswith(_OF_EACH)))
def of_each(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Of each tensor of a list, split or plain, the function of one tensor by its own rule."""
    name = func.__name__.removeprefix(_OF_EACH)
    in_place = name.endswith("_")
    function = _OTHERWISE.get(name) or getattr(torch.Tensor if in_place else torch, name, None)
    if function is None:
        raise refused(func, "there is no such function of one tensor")
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]

    def call(at: int) -> Any:
        given = [each[at] if isinstance(each, (list, tuple)) else each for each in args]
        named = {key: each[at] if isinstance(each, (list, tuple)) else each for key, each in kwargs.items()}
        return composed(function, *given, **named)

    found = tuple(call(at) for at in range(len(lists[0])))
    return [*lists[0]] if in_place else found


@rule("pointwise", *(name for name in _NAMES if name.startswith("_fused_") and name.endswith(_FUSED)))
def fused(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A step of an optimizer: each rank updates its blocks, of parameters, gradients and states cut alike."""
    lists = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple)) and each]
    for together in zip(*lists, strict=True):
        layouts = {x._layout for x in together if isinstance(x, SplitTensor)}
        plain = [x for x in together if not isinstance(x, SplitTensor) and x.dim()]
        if len(layouts) > 1 or (layouts and plain):
            raise refused(func, "a parameter, its gradient and its state are not cut alike")
    func(*mapped(_block, args), **mapped(_block, kwargs))


def _block(x: torch.Tensor) -> torch.Tensor:
    return local_of(x) if isinstance(x, SplitTensor) else x
