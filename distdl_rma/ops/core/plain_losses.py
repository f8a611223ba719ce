"""Backwards from plain losses: what of a gradient all ranks have alike, and what is a contribution of each.

A plain tensor is alike on all ranks, so each of them has the whole gradient of what is computed of it. Of
what lies behind a split tensor that was brought together for the loss, a rank has a contribution.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch

number_of_backward: Callable[[], int] = torch._C._current_graph_task_id


class _Backward(threading.local):
    # How many backwards from split tensors run in this thread; and of one from a plain tensor, by torch's
    # number, whether it has come by split ones: then what parameters get from behind these, by ``id``, or
    # None if that is the loss of this rank alone.
    depth = 0
    number = -1
    # The last that was looked at, and is not of a block that was shown; and whether one was, on any thread.
    common = -1
    shown = False
    behind: dict[int, torch.Tensor] | None = None
    nodes: set[Any]


RUNNING = _Backward()
# What a node of a graph keeps whose result is a block that was shown.
_SHOWN = "distdl_rma block"
# Names of nodes at which blocks end, and what is plain begins.
ENDS_OF_BLOCKS: set[str] = set()


@contextmanager
def from_split_tensor() -> Iterator[None]:
    """Context of a backward that begins at a split tensor."""
    RUNNING.depth += 1
    try:
        yield
    finally:
        RUNNING.depth -= 1


def come_by_blocks(_gradient: torch.Tensor | None = None) -> None:
    """Note that the running backward has come by what each rank has a block of."""
    if RUNNING.number != number_of_backward():
        RUNNING.number, RUNNING.behind = number_of_backward(), None


def show_block(block: torch.Tensor) -> None:
    """Note in its graph that what is computed of a block is the loss of this rank alone."""
    if block.grad_fn is not None:
        node: Any = block.grad_fn
        _Backward.shown, node.metadata[_SHOWN] = True, True


def _is_own() -> bool:
    # Whether the running backward will come by a block that was shown: what is nearer to the loss comes
    # first. Not by what lies behind a split tensor that was brought together.
    if not _Backward.shown or RUNNING.common == number_of_backward():
        return False
    seen, ahead = set[Any](), _roots()
    while ahead:
        node = ahead.pop()
        if node is None or node in seen:
            continue
        if _SHOWN in node.metadata:
            return True
        seen.add(node)
        if node.name() not in ENDS_OF_BLOCKS:
            ahead += [each for each, _ in node.next_functions]
    RUNNING.common = number_of_backward()
    return False


def _roots() -> list[Any]:
    # Where the running backwards began, as those who called them say.
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is torch.autograd.backward.__code__:
            tensors = frame.f_locals["tensors"]
            found += [tensors] if isinstance(tensors, torch.Tensor) else tensors
        frame = frame.f_back
    return [getattr(end, "node", None) or getattr(end, "grad_fn", None) for end in found]


def come_by_whole(node: Any, summed_later: Callable[[torch.Tensor], bool]) -> None:
    """Note that the running backward has come by all of a split tensor, at this node of its graph.

    From now on what comes to parameters from behind it is added up, to tell it from what they get besides.
    """
    if RUNNING.depth:
        return
    if RUNNING.number != number_of_backward():
        behind: dict[int, torch.Tensor] | None = None if _is_own() else {}
        RUNNING.number, RUNNING.behind, RUNNING.nodes = number_of_backward(), behind, set()
    if RUNNING.behind is None:
        return
    handles, ahead = [], [node]
    while ahead:
        one = ahead.pop()
        if one in RUNNING.nodes:
            continue
        RUNNING.nodes.add(one)
        leaves = {}
        for at, (following, _) in enumerate(one.next_functions):
            leaf = getattr(following, "variable", None)
            if leaf is None:
                ahead += [] if following is None else [following]
            elif summed_later(leaf):
                leaves[at] = id(leaf)
        if leaves:
            handles.append(one.register_hook(partial(_add_up, RUNNING.behind, leaves)))
    torch.autograd.Variable._execution_engine.queue_callback(partial(_leave, handles))


def _add_up(behind: dict[int, torch.Tensor], leaves: dict[int, int], found: Any, _given: Any) -> None:
    for at, leaf in leaves.items():
        if found[at] is not None:
            behind[leaf] = behind[leaf] + found[at] if leaf in behind else found[at]


def _leave(handles: list[Any]) -> None:
    # The graph may be kept for another backward.
    RUNNING.number, RUNNING.behind, RUNNING.nodes = -1, None, set()
    for handle in handles:
        handle.remove()


def own_part(parameter: torch.Tensor, computed: torch.Tensor) -> torch.Tensor | None:
    """Of a gradient what is a contribution, without what all ranks have alike; None if all of it is."""
    if RUNNING.depth:
        return None
    if RUNNING.number != number_of_backward():
        if not _is_own():
            return torch.zeros_like(computed)
        come_by_blocks()
    if RUNNING.behind is None:
        return None
    part = RUNNING.behind.get(id(parameter))
    return torch.zeros_like(computed) if part is None else part
