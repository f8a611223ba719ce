"""Backwards from plain losses: which part of a gradient is identical on all ranks, and which must be summed.

A plain tensor is identical on all ranks, so each rank computes the whole gradient of the parameters behind
it. But behind ``full_tensor()`` of a split tensor each rank computes only a contribution, and contributions
must be summed. One loss may reach the same weight both ways:

    loss = f(y.full_tensor()) + penalty(weight)

    loss --- penalty --------------------------> weight     whole on every rank: one of them counts
      '----- f --- full_tensor() --- blocks ---> weight     a contribution of each rank: all count

torch adds both up before a hook of the weight sees them. So the second part is added up separately, by hooks
of the nodes behind ``full_tensor()``, and the hook of the weight asks for it (``part_to_sum``). If a backward
passes a block of ``to_local()``, its loss is this rank's own, and everything must be summed.

What is known of the running backward is in ``RUNNING``, by torch's number of it. ``number`` is set at the
first split tensor that the backward reaches. Until then nobody has asked, and nothing is computed: most
backwards begin at a split tensor (``depth``), for which all parts are contributions and none of this is
needed.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from math import isfinite
from types import FrameType
from typing import Any
from zlib import crc32

import torch

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.checks.arguments import are_close
from distdl_rma.layers.checks.user_frames import warn_user
from distdl_rma.layers.dtypes import as_words
from distdl_rma.layers.staging import down
from distdl_rma.segments.machine import Machine

# Whether the running backward executes a node; torch's multi-gradient hooks use this function too.
_is_in_backward: Callable[[Any], bool] = torch._C._will_engine_execute_node
# Functions that begin a backward, and the argument that names the tensors at which it begins.
_ENTRIES = {torch.autograd.backward.__code__: "tensors", torch.autograd.grad.__code__: "outputs"}
backward_id: Callable[[], int] = torch._C._current_graph_task_id


class _Backward(threading.local):
    depth = 0  # number of backwards from split tensors that run in this thread
    number = -1  # torch's number of the backward from a plain tensor that has reached a split tensor
    common = -1  # torch's number of the last backward that was found to pass no block of ``to_local()``
    shown = False  # whether ``to_local()`` was called, on any thread
    # Contributions to gradients of parameters behind split tensors, by ``id`` of the parameter; None if the
    # loss is this rank's own.
    behind: dict[int, torch.Tensor] | None = None
    nodes: set[Any]  # of the graph behind split tensors


RUNNING = _Backward()
# Key in the metadata of a node whose result ``to_local()`` returned.
SHOWN = "distdl_rma block"
# Number of gradients that are kept; elements of each, about; tolerance relative to the largest element.
_KEPT, _SAMPLED, _ROUNDING = 64, 16, 1e-3
_MEAN = (
    "a backward begins at a mean over this rank's part of a split tensor, as F.mse_loss(y.to_local(), mine)"
    " is: gradients are summed over the ranks, so they become as many times too large. Take the loss of the"
    " split tensor, F.mse_loss(y, target), or a sum divided by y.numel(), which is that of the whole."
    " A mean that is weighted by the share of its part, or by reduction='mean' where parts are equal, is"
    " right: warnings.filterwarnings('ignore', \"a backward begins at a mean over this rank's part\")"
)
# Names of nodes that turn a block into a plain tensor.
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
    """Record that the running backward has reached a split tensor: from here on all must be summed."""
    if RUNNING.number != backward_id():
        RUNNING.number, RUNNING.behind = backward_id(), None


def show_block(block: torch.Tensor, is_part: bool) -> None:
    """Mark the node of a block that ``to_local()`` returns: a loss of it is the loss of this rank alone."""
    if block.grad_fn is not None:
        node: Any = block.grad_fn
        _Backward.shown, node.metadata[SHOWN] = True, is_part


def warn_of_mean(gradient: torch.Tensor) -> None:
    """As ``note_reached_split``; warns if the backward began at a mean over this rank's part of a tensor."""
    note_reached_split(gradient)
    if not RUNNING.depth and _begins_at_mean():
        warn_user(_MEAN)


def _begins_at_mean() -> bool:
    # Whether a mean over all elements lies between the loss and a part that ``to_local()`` returned.
    try:
        means = [node for node in nodes_behind(_roots(), _ends_blocks) if _is_mean(node)]
    except UnsupportedError:
        return False
    behind = [node for mean in means for node, _ in mean.next_functions]
    return any(node.metadata.get(SHOWN) for node in nodes_behind(behind, _ends_blocks))


def _is_mean(node: Any) -> bool:
    # A mean over all dimensions, or a loss function of torch with reduction="mean".
    if node.name() == "MeanBackward1":
        return len(node._saved_dim) == len(node._saved_self_sym_sizes)
    if node.name() == "DivBackward1":
        # F.cross_entropy with probabilities. A program's own divisions have other nodes.
        (negative, _), *_ = node.next_functions
        return negative is not None and [each.name() for each, _ in negative.next_functions] == [
            "SumBackward0"
        ]
    return node.name() == "MeanBackward0" or getattr(node, "_saved_reduction", None) == 1


def _is_own() -> bool:
    # Whether the running backward passes through a block of ``to_local()``. The search goes from the loss to
    # ``full_tensor()`` of split tensors; blocks behind these do not count.
    if not _Backward.shown or RUNNING.common == backward_id():
        return False
    if any(SHOWN in node.metadata for node in nodes_behind(_roots(), _ends_blocks)):
        return True
    RUNNING.common = backward_id()
    return False


def _ends_blocks(node: Any) -> bool:
    return SHOWN in node.metadata or node.name() in ENDS_OF_BLOCKS


def nodes_behind(roots: Iterable[Any], ends: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Nodes of a graph from its roots on, each once; nothing behind nodes for which ``ends`` is true."""
    seen, ahead = set[Any]([None]), [*roots]
    while ahead:
        node = ahead.pop()
        if node not in seen:
            seen.add(node)
            yield node
            ahead += [] if ends(node) else [each for each, _ in node.next_functions]


def _roots() -> list[Any]:
    # Nodes at which the running backwards began, from the frames of their callers: torch has no function.
    found: list[Any] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        ends = frame.f_locals.get(_ENTRIES[frame.f_code]) if frame.f_code in _ENTRIES else None
        if ends is not None:
            found += ends if isinstance(ends, Sequence) else [ends]
        frame = frame.f_back
    nodes = [getattr(end, "node", None) or getattr(end, "grad_fn", None) for end in found]
    # The backward began otherwise, or this version of torch names its arguments otherwise.
    if not any(node is not None and _runs(node) for node in nodes):
        raise UnsupportedError(
            "a backward passes what full_tensor() of a split tensor gave, or parameters of a distributed"
            " model, and began neither by backward() of a tensor nor by torch.autograd.backward or grad: so"
            " it is not known whether its loss is one that all ranks have alike, or of to_local()"
        )
    return nodes


def _runs(node: Any) -> bool:
    # Torch does not report a single root itself, only the nodes behind it.
    behind = [each for each, _ in node.next_functions if each is not None]
    return not behind or any(map(_is_in_backward, behind))


def note_reached_full_tensor(node: Any, summed_later: Callable[[torch.Tensor], bool]) -> bool:
    """Record that the running backward has reached ``full_tensor()`` of a split tensor, at this node.

    From now on gradients that reach parameters through this node are added up separately, because they must
    be summed over the ranks. Returns whether the gradient at the node is identical on all ranks.
    """
    if RUNNING.depth:
        return False
    if RUNNING.number != backward_id():
        behind: dict[int, torch.Tensor] | None = None if _is_own() else {}
        RUNNING.number, RUNNING.behind, RUNNING.nodes = backward_id(), behind, set()
    if RUNNING.behind is None:
        return False
    # Each node has one hook, even if several split tensors lie before it.
    new = {*nodes_behind([node], RUNNING.nodes.__contains__)} - RUNNING.nodes
    RUNNING.nodes |= new
    handles = []
    for one in new:
        following = [getattr(each, "variable", None) for each, _ in one.next_functions]
        leaves = {
            at: id(leaf) for at, leaf in enumerate(following) if leaf is not None and summed_later(leaf)
        }
        if leaves:
            handles.append(one.register_hook(partial(_add_up, RUNNING.behind, leaves)))
    torch.autograd.Variable._execution_engine.queue_callback(partial(_leave, handles))
    return True


def _add_up(behind: dict[int, torch.Tensor], leaves: dict[int, int], found: Any, _given: Any) -> None:
    for at, leaf in leaves.items():
        if found[at] is not None:
            behind[leaf] = behind[leaf] + found[at] if leaf in behind else found[at]


def _leave(handles: list[Any]) -> None:
    # Another backward may use the same graph.
    RUNNING.number, RUNNING.behind, RUNNING.nodes = -1, None, set()
    for handle in handles:
        handle.remove()


def has_common_gradient(parameter: torch.Tensor) -> bool:
    """Whether the running backward computes the whole gradient of a parameter identically on all ranks."""
    if RUNNING.number != backward_id():
        if not _is_own():
            return True
        note_reached_split()
    return RUNNING.behind is not None and id(parameter) not in RUNNING.behind


def part_to_sum(parameter: torch.Tensor) -> torch.Tensor | None:
    """The part of a gradient that must be summed over the ranks; None if the whole gradient must be."""
    return None if RUNNING.behind is None else RUNNING.behind[id(parameter)]


class GradientCheck:
    """Check of gradients of plain losses: they differ if a rank computes a loss from its own data. Local.

    Only the first rank's gradient counts where all ranks compute the same (``parameter_hooks.py``); if they
    do not, the others' would be lost without a trace. So the next call of a model compares them. Keeps a
    checksum of all gradients, and elements of the last ones, to find the first that differs by more than
    rounding.
    """

    what = "gradients"

    def __init__(self) -> None:
        self._number = 0
        # Name and elements of each gradient.
        self.last: deque[tuple[str, list[float]]] = deque(maxlen=_KEPT)

    @classmethod
    def of(cls, machine: Machine, ranks: Sequence[int]) -> GradientCheck:
        """The instance for some ranks of a machine."""
        kept: dict[tuple[int, ...], GradientCheck] = machine.kept.setdefault("gradients", {})
        return kept.setdefault(tuple(ranks), cls())

    def number(self) -> int:
        """Checksum of the bits of all noted gradients."""
        return self._number

    def words(self) -> list[Any]:
        """Names and elements of the last gradients."""
        return [*self.last]

    def problem(self, words: Mapping[int, Any]) -> str:
        """Name the first gradient that differs by more than rounding, with a likely cause; starts afresh."""
        self._number = 0
        self.last.clear()
        what = first_differing([*words.values()])
        return what and (
            f"in a backward before this call the gradient of {what!r} was not alike on all"
            " ranks. It came from a loss of plain tensors, which all ranks have alike: from other data,"
            " or from to_local() of a tensor that is in no graph; use the split tensor itself there"
        )

    def note(self, what: str, gradient: torch.Tensor) -> None:
        """Add a gradient of the running backward."""
        flat = gradient.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)][: 2 * _SAMPLED]
        some = some if some.is_cpu else down(some)
        values = (torch.view_as_real(some).reshape(-1) if some.is_complex() else some).tolist()
        self._number = crc32(as_words(some.contiguous()).tobytes(), self._number)
        self.last.append((what, values))


def first_differing(ranks: Sequence[Sequence[tuple[str, Sequence[float]]]]) -> str:
    """Name of the first noted gradient that differs by more than rounding between ranks; empty if none."""
    found = (abs(v) for each in ranks for _, values in each for v in values if isfinite(v))
    largest = max(found, default=0.0)
    for noted in zip_longest(*ranks, fillvalue=("", ())):
        (what, first), *others = noted
        scale = max([abs(v) for v in first if isfinite(v)] + [largest * _ROUNDING])
        for other, values in others:
            if other != what or not are_close(first, values, _ROUNDING * scale):
                return what or other
    return ""
