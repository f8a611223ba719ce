"""What torch.compile leaves alone: functions that talk to other ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import CodeType
from typing import Any, ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

Q = ParamSpec("Q")
R = TypeVar("R")

_REASON = "distributed layers exchange data with other ranks, which is no part of a graph"
# What looks at the functions that are called: part of torch itself, unlike the compiler.
_frames: Any = torch._C._dynamo.eval_frame
_compiles: Callable[[], object] = _frames.get_eval_frame_callback


def uncompiled(function: Callable[Q, R]) -> Callable[Q, R]:
    """Function at which ``torch.compile`` breaks its graph, and inside of which it compiles nothing.

    As ``torch.compiler.disable``, which imports the compiler, and that takes as long as torch itself: this
    leaves it to those who compile.
    """

    @wraps(function)
    def entry(*args: Q.args, **kwargs: Q.kwargs) -> R:
        if _compiles() is None:
            return function(*args, **kwargs)
        return _apart(function, *args, **kwargs)

    marked: Any = entry
    marked._torchdynamo_disable, marked._torchdynamo_disable_msg = True, _REASON
    _leave_alone(marked.__code__)
    return entry


@_disable_dynamo
def _apart(function: Callable[Q, R], *args: Q.args, **kwargs: Q.kwargs) -> R:
    return function(*args, **kwargs)


def _leave_alone(code: CodeType) -> None:
    # Where a graph is broken, the function called there would be the next to be compiled.
    if hasattr(_frames, "skip_code"):
        _frames.skip_code(code)
    else:
        action = _frames._FrameAction
        _frames.set_code_exec_strategy(code, _frames._FrameExecStrategy(action.SKIP, action.DEFAULT))
