"""Raises the errors that torch raises for a call, whatever the values of its split tensors, on every rank.

A rank with an empty block computes nothing, and a rule that sums over ranks may not call torch's function at
all. So torch's function is called here with stand-ins for the whole tensors, once per kind of arguments.

    x.sum(7) of a (6, 4) tensor   torch.zeros(6, 4).sum(7)   raises: the user sees torch's own error, on all
                                                             ranks, with the global shape
    x.sum(1)                      torch.zeros(6, 4).sum(1)   accepted, and remembered for this kind of call

Small stand-ins have elements, so that torch checks values too; large ones are on the meta device, which has
shapes only. Values of split tensors are not here: a call is refused only if torch refuses all stand-ins.
Plain tensors and copies are passed as they are: all ranks have their values, as of an index that is too
large.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from math import isnan, nan, prod
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from distdl_rma.layers.ops.core.autograd import RECORDINGS
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.table import rule
from distdl_rma.layers.staging import down

# Text and category of a warning of torch.
Warned = tuple[str, type[Warning]]
# Kinds of calls that torch accepts, each with torch's warnings. Refused ones are not kept: the next call may
# have other values, as of a mask.
_ACCEPTED: dict[Any, Sequence[Warned]] = {}
_MOST = 1 << 12
# Above so many elements in all tensors of a call, its stand-ins are on the meta device.
_FEW = 1 << 16
_INDICES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool})
_MASKS = frozenset({torch.bool, torch.uint8})
BLOCK_HINT = (
    "All shapes are those of whole tensors; is a plain one the part of this rank? Pass all of it, or make a"
    " split tensor of the ranks' parts by SplitTensor.from_local."
)
# Types of most arguments, for which a look at the type is enough.
_NUMBERS = frozenset({int, float, bool, str, type(None)})
# Text of kernels' errors about dtypes, which torch does not raise on the meta device.
_OF_DTYPES = "not implemented for"


def raise_as_torch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Warned]:
    """Raise torch's error for such arguments, if it does not depend on the values of split tensors; local.

    Returns torch's warnings for the whole tensors: those of a call on blocks would name the blocks' sizes.
    """
    if RECORDINGS and RECORDINGS[-1].notes:
        return _noted(RECORDINGS[-1], func, args, kwargs)
    key = func, torch.is_autocast_enabled("cpu"), torch.get_default_dtype(), _kind(args), _kind(kwargs)
    found = _ACCEPTED.get(key)
    if found is not None:
        return found
    # A user's function must run only once, and a user's generator must draw only once.
    given = (*args, *kwargs.values())
    if kwargs.get("out") is not None or any(callable(x) or isinstance(x, torch.Generator) for x in given):
        return ()
    warned: list[Warned] = []
    error = _error(func, args, kwargs, warned)
    # Stand-ins are on the CPU; kernels of devices compute in more dtypes.
    on_device = any(not x.is_cpu for x in tensors_in(args, kwargs))
    if error is not None and not (on_device and _OF_DTYPES in str(error)):
        if any(word in str(error) for word in ("size", "shape", "dimension")):
            error.add_note(BLOCK_HINT)
        raise error
    if len(_ACCEPTED) > _MOST:
        _ACCEPTED.clear()
    return _ACCEPTED.setdefault(key, warned)


def _noted(recorder: Any, func: Any, args: Any, kwargs: Any) -> Sequence[Warned]:
    # The check is no step, unless it depends on values: a replay then checks its own.
    with recorder.paused():
        warned = raise_as_torch(func, args, kwargs)
    if values := [_here(x) for x in tensors_in(args, kwargs) if not _is_split(x) and x.dtype in _INDICES]:
        recorder.called(_Again(func, args, kwargs), *values)
    return warned


class _Again:
    """The check of a call, with other values of indices that all ranks have."""

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        def without_values(x: Any) -> torch.Tensor:
            return type(x)(x._local.new_empty(0), x._layout) if _is_split(x) else _here(x)

        self._func, self._given = func, mapped(without_values, (args, kwargs))

    def __call__(self, *values: torch.Tensor) -> None:
        others = iter(values)
        args, kwargs = mapped(
            lambda x: next(others) if not _is_split(x) and x.dtype in _INDICES else x, self._given
        )
        raise_as_torch(self._func, args, kwargs)


# As :func:`rule`; the handler is only called if torch accepts the call.
checked_rule = partial(rule, errors="first")


def _kind(argument: Any) -> Any:
    # A hashable key. For an index that every rank has, it includes the smallest and the largest value; for a
    # mask, also the number of true ones. The type, since a number and a bool may be equal.
    if argument.__class__ in _NUMBERS:
        # One object for all NaNs, which equal no other one.
        is_nan = argument.__class__ is float and isnan(argument)
        return argument.__class__, nan if is_nan else argument
    if isinstance(argument, torch.Tensor):
        ends: tuple[float, ...] = ()
        split = _is_split(argument)
        if argument.dtype in _INDICES and not split and argument.numel() and argument.device.type == "cpu":
            known = _here(argument)
            ends = tuple(float(each) for each in known.aminmax())
            ends += (float(known.count_nonzero()),) if known.dtype in _MASKS else ()
        return tuple(argument.shape), argument.dtype, argument.is_cpu, split, ends
    if isinstance(argument, (list, tuple)):
        return type(argument), *map(_kind, argument)
    if isinstance(argument, dict):
        return tuple([(name, _kind(each)) for name, each in argument.items()])
    if isinstance(argument, slice):
        return "slice", _kind((argument.start, argument.stop, argument.step))
    return type(argument), argument if isinstance(argument, Hashable) else repr(argument)


def _is_split(x: torch.Tensor) -> bool:
    # Every rank has the values of copies.
    return hasattr(x, "_layout") and bool(x._layout.cut_dims)


def _here(x: Any) -> torch.Tensor:
    # A tensor that every rank has whole, as a plain tensor.
    return getattr(x, "_local", x)


def _shape(x: Any) -> tuple[int, ...]:
    return x._layout.shape if _is_split(x) else tuple(x.shape)


def _error(func: Any, args: Any, kwargs: dict[str, Any], warned: list[Warned]) -> Exception | None:
    tensors: list[torch.Tensor] = []
    mapped(tensors.append, (args, kwargs))

    def filled(value: int) -> Callable[[Any], torch.Tensor]:
        def of(x: Any) -> torch.Tensor:
            return torch.full(_shape(x), value, dtype=x.dtype) if _is_split(x) else down(_here(x)).clone()

        return of

    def regular(x: torch.Tensor) -> torch.Tensor:
        y = filled(1)(x)
        return y.triu().tril() if y.dim() > 1 and _is_split(x) else y

    tried = partial(_tried, func, args, kwargs, warned)
    if sum(prod(_shape(x)) for x in tensors) <= _FEW:
        # Torch may refuse some values only, as singular matrices. It refuses the call if all stand-ins fail.
        error = tried(filled(0)) and tried(filled(1))
        return error and tried(regular) and error
    found = tried(lambda x: torch.empty(_shape(x), dtype=x.dtype, device="meta"))
    # On the meta device torch knows no values and no autocast.
    unsure = (
        isinstance(found, NotImplementedError) or "meta" in str(found) or torch.is_autocast_enabled("cpu")
    )
    if found is None or unsure:
        found = _tried(func, args, kwargs, [], lambda x: torch.ones((1,) * x.dim(), dtype=x.dtype))
        return found if _OF_DTYPES in str(found) else None
    return found


def _tried(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    warned: list[Warned],
    stand_in: Callable[[Any], torch.Tensor],
) -> Exception | None:
    # The error of a call with stand-ins; restores the generator, so that other calls draw the same numbers.
    state = torch.default_generator.get_state()
    try:
        # A mode that counts memory would count that of stand-ins, in some calls and not in others.
        with _disable_current_modes(), torch.no_grad(), warnings.catch_warnings(record=True) as found:
            # Independent of the user's filters.
            warnings.simplefilter("always")
            func(*mapped(stand_in, args), **mapped(stand_in, kwargs))
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        # Depends on the values of a matrix.
        return None
    except Exception as error:  # noqa: BLE001
        return error.with_traceback(None)
    finally:
        torch.default_generator.set_state(state)
    warned[:] = [(str(each.message), each.category) for each in found]
    return None
