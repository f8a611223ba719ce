"""Backwards from plain losses: what of a gradient all ranks have alike, and what is a contribution of each.

A plain tensor is alike on all ranks, so each of them has the whole gradient of what is computed of it. Of
what lies behind a split tensor that was brought together for the loss, a rank has a contribution.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from math import isfinite, isnan
from pathlib import Path
from types import FrameType
from typing import Any
from zlib import crc32

import torch

from distdl_rma.dtypes import as_words
from distdl_rma.errors import UnsupportedError
from distdl_rma.machine import Machine

# Whether the backward that runs comes by a node; torch's hooks of several gradients ask that too.
_is_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
# By which code a backward begins, and what of it says where.
_ENTRIES = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}
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
# Of so many gradients so many elements are kept, and by so much of the largest they may differ.
_KEPT, _SAMPLED, _ROUNDING = 64, 16, 1e-3
_LIBRARY_PATHS = f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/"
_MEAN = (
    "a backward begins at a mean over this rank's part of a split tensor, as F.mse_loss(y.to_local(), mine)"
    " is: gradients are summed over the ranks, so they become as many times too large. Take the loss of the"
    " split tensor, F.mse_loss(y, target), or a sum divided by y.numel(), which is that of the whole."
    " A mean that is weighted by the share of its part, or by reduction='mean' where parts are equal, is"
    " right: warnings.filterwarnings('ignore', \"a backward begins at a mean over this rank's part\")"
)
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


def note_reached_split(_gradient: torch.Tensor | None = None) -> None:
    """Record that the running backward has reached a split tensor."""
    if RUNNING.number != number_of_backward():
        RUNNING.number, RUNNING.behind = number_of_backward(), None


def show_block(block: torch.Tensor, is_part: bool) -> None:
    """Note in its graph that what is computed of a block is the loss of this rank alone."""
    if block.grad_fn is not None:
        node: Any = block.grad_fn
        _Backward.shown, node.metadata[_SHOWN] = True, is_part


def warn_of_mean(gradient: torch.Tensor) -> None:
    """As ``note_reached_split``; warn if the backward began at a mean over this rank's part of a tensor."""
    note_reached_split(gradient)
    if RUNNING.depth or not _begins_at_mean():
        return
    warn_user(_MEAN)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's that leads here, once."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARY_PATHS):
        frame = frame.f_back
    if frame is not None:
        known = frame.f_globals.setdefault("__warningregistry__", {})
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, registry=known)


def _begins_at_mean() -> bool:
    # Whether a mean over all of something lies between the loss and a part that was shown.
    try:
        ahead = [(node, False) for node in _roots()]
    except UnsupportedError:
        return False
    seen = set[Any]()
    while ahead:
        node, mean = ahead.pop()
        if node is None or (node, mean) in seen or node.name() in ENDS_OF_BLOCKS:
            continue
        if mean and node.metadata.get(_SHOWN):
            return True
        seen.add((node, mean))
        mean = mean or _is_mean(node)
        ahead += [(each, mean) for each, _ in node.next_functions if _SHOWN not in node.metadata]
    return False


def _is_mean(node: Any) -> bool:
    # Over all dimensions, or a loss of torch's with reduction="mean".
    if node.name() == "MeanBackward1":
        return len(node._saved_dim) == len(node._saved_self_sym_sizes)
    if node.name() == "DivBackward1":
        # Of F.cross_entropy with probabilities: a program's own divisions have other nodes.
        (negative, _), *_ = node.next_functions
        return negative is not None and [each.name() for each, _ in negative.next_functions] == [
            "SumBackward0"
        ]
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1


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
    # Where the running backwards began, as those who called them say: torch itself does not tell.
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        ends = frame.f_locals.get(_ENTRIES[frame.f_code]) if frame.f_code in _ENTRIES else None
        if ends is not None:
            found += ends if isinstance(ends, Sequence) else [ends]
        frame = frame.f_back
    nodes = [getattr(end, "node", None) or getattr(end, "grad_fn", None) for end in found]
    # Of a backward that began otherwise, or if another torch calls its arguments otherwise.
    if not any(node is not None and _runs(node) for node in nodes):
        raise UnsupportedError(
            "a backward passes what full_tensor() of a split tensor gave, or parameters of a distributed"
            " model, and began neither by backward() of a tensor nor by torch.autograd.backward or grad: so"
            " it is not known whether its loss is one that all ranks have alike, or of to_local()"
        )
    return nodes


def _runs(node: Any) -> bool:
    # Where there is one root, torch counts those behind it only.
    behind = [each for each, _ in node.next_functions if each is not None]
    return not behind or any(map(_is_in_backward, behind))


def note_reached_full_tensor(node: Any, summed_later: Callable[[torch.Tensor], bool]) -> bool:
    """Record that the running backward has reached the whole of a split tensor, at this node of its graph.

    From now on gradients that reach parameters through this node are added up, to tell them from others.
    Returns whether the gradient at the node is identical on all ranks.
    """
    if RUNNING.depth:
        return False
    if RUNNING.number != number_of_backward():
        behind: dict[int, torch.Tensor] | None = None if _is_own() else {}
        RUNNING.number, RUNNING.behind, RUNNING.nodes = number_of_backward(), behind, set()
    if RUNNING.behind is None:
        return False
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
    return True


def _add_up(behind: dict[int, torch.Tensor], leaves: dict[int, int], found: Any, _given: Any) -> None:
    for at, leaf in leaves.items():
        if found[at] is not None:
            behind[leaf] = behind[leaf] + found[at] if leaf in behind else found[at]


def _leave(handles: list[Any]) -> None:
    # The graph may be kept for another backward.
    RUNNING.number, RUNNING.behind, RUNNING.nodes = -1, None, set()
    for handle in handles:
        handle.remove()


def all_alike(parameter: torch.Tensor) -> bool:
    """Whether all ranks have all of a gradient alike in the running backward, no split tensor's own."""
    if RUNNING.number != number_of_backward():
        if not _is_own():
            return True
        note_reached_split()
    return RUNNING.behind is not None and id(parameter) not in RUNNING.behind


def own_part(parameter: torch.Tensor) -> torch.Tensor | None:
    """What is a contribution of a gradient that is not all alike, without what is; None if all of it is."""
    return None if RUNNING.behind is None else RUNNING.behind[id(parameter)]


class GradientCheck:
    """Gradients of plain losses that are equal on some ranks: a number of all, elements of the last.

    They are not, where a rank computes a plain loss of data of its own. Local.
    """

    what = "gradients"

    def __init__(self) -> None:
        self._number = 0
        # What each is of, and elements of it.
        self.last: deque[tuple[str, list[float]]] = deque(maxlen=_KEPT)

    @classmethod
    def of(cls, machine: Machine, ranks: Sequence[int]) -> GradientCheck:
        """Those of some ranks of a machine."""
        kept: dict[tuple[int, ...], GradientCheck] = machine.kept.setdefault("gradients", {})
        found = kept.get(ranks := tuple(ranks))
        if found is None:
            found = kept[ranks] = cls()
        return found

    def number(self) -> int:
        """Of all that were noted, bit for bit."""
        return self._number

    def words(self) -> list[Any]:
        """Elements of the last, each with what it is of."""
        return [*self.last]

    def problem(self, said: Mapping[int, Any]) -> str:
        """Which of them differs by more than rounding, and why that may be; begins anew."""
        self._number = 0
        self.last.clear()
        what = first_apart([*said.values()])
        return what and (
            f"in a backward before this call the gradient of {what!r} was not alike on all"
            " ranks. It came from a loss of plain tensors, which all ranks have alike: from other data,"
            " or from to_local() of a tensor that is in no graph; use the split tensor itself there"
        )

    def note(self, what: str, gradient: torch.Tensor) -> None:
        """Add one that comes in the running backward."""
        flat = gradient.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)][: 2 * _SAMPLED]
        values = (torch.view_as_real(some).reshape(-1) if some.is_complex() else some).tolist()
        self._number = crc32(as_words(some.contiguous()).tobytes(), self._number)
        self.last.append((what, values))


def first_apart(ranks: Sequence[Sequence[tuple[str, Sequence[float]]]]) -> str:
    """The first of the gradients that ranks noted that differs by more than rounding; empty if none does."""
    found = (abs(v) for each in ranks for _, values in each for v in values if isfinite(v))
    largest = max(found, default=0.0)
    for noted in zip_longest(*ranks, fillvalue=("", ())):
        (what, first), *others = noted
        scale = max([abs(v) for v in first if isfinite(v)] + [largest * _ROUNDING])
        for other, values in others:
            same = other == what and len(values) == len(first)
            if not same or not all(map(partial(_is_close, _ROUNDING * scale), first, values)):
                return what or other
    return ""


def _is_close(most: float, one: float, other: float) -> bool:
    # Also of what has overflown, or is no number, on both.
    return one == other or abs(one - other) <= most or (isnan(one) and isnan(other))
