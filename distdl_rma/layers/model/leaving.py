"""What a call of a distributed model leaves in plain tensors: changes of its inputs, and assigned buffers.

A model may change its input in place, or assign what it computed to a buffer. When the call ends, the
caller's tensor and the buffer are plain, with the values that the model alone gives them.

    during the call                                    when it ends
    input x (plain)  --cut--> y (split), changed       x.copy_(all of y): the caller's tensor has the change
    buffer = split tensor, assigned                    the module's table gets the whole tensor
    buffer (plain), changed by a split tensor          became split as the same object; becomes plain again
    list of inputs, appended to                        the caller's list gets the same, plain where it was

Each becomes plain by a movement, in which all ranks must take part. So each is a step of the call's trace
(``Change.step``): the ranks compare it before they move anything. If they differ, all of them raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from operator import setitem
from typing import Any, NamedTuple

import torch
from torch import nn

from distdl_rma.errors import UnsupportedError
from distdl_rma.layers.checks.generators import Noted
from distdl_rma.layers.dtypes import is_readable
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.signatures import mapped
from distdl_rma.layers.split.calls.site import NO_PLACE, THREAD
from distdl_rma.layers.split.operands import everywhere_of, site_for
from distdl_rma.layers.split.plain_operands import gathered
from distdl_rma.layers.split.tensor import Original, SplitTensor, become_plain, checked_block
from distdl_rma.layers.sync.gradient_groups import under


class Change(NamedTuple):
    """A split tensor that becomes plain: ``put`` gets the whole."""

    what: str
    value: SplitTensor
    put: Callable[[torch.Tensor], Any]

    @property
    def step(self) -> Noted:
        """For the trace of the call: ranks compare it before they make the tensor plain."""
        layout, dtype = self.value._layout, self.value._local.dtype
        return Noted(f"a change of {self.what}: {tuple(layout.shape)} of {dtype}, {lay.described(layout)}")


class Inputs:
    """Arguments of a call in which ``cut`` makes split tensors; a tensor that is passed twice is cut once.

    Keeps the version of each block at the beginning, so that a change in place is noticed by a number.
    """

    def __init__(self, arguments: Any, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}
        self._cut: list[tuple[torch.Tensor, SplitTensor, Original]] = []
        # Lists and dicts of the caller, what the model gets in their place, and what was in that.
        self._containers: list[tuple[Any, Any, list[Any]]] = []

        def part(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in self._made:
                self._made[id(x)] = x, (y := cut(x))
                if isinstance(y, SplitTensor) and y is not x:
                    self._cut.append((x, y, Original(y._local)))
            return self._made[id(x)][1]

        def note(theirs: Any, ours: Any) -> None:
            self._made[id(theirs)] = theirs, ours
            self._containers.append((theirs, ours, _items(ours)))

        self.arguments = mapped(part, arguments, note)

    def changes(self, others: Iterable[torch.Tensor]) -> list[Change]:
        """Changes in place of tensors that were cut; ``UnsupportedError`` if ``others`` show one's memory."""
        changed = [(x, y) for x, y, before in self._cut if before.has_changed]
        for other in others if changed else ():
            for x in (x for x, _ in changed if x is not other and _share_memory(x, other)):
                raise UnsupportedError(
                    f"the model changes an input of shape {tuple(x.shape)} in place, and another input,"
                    f" parameter or buffer, of shape {tuple(other.shape)}, has the same memory; pass a"
                    " clone()"
                )
        return [Change("an input in place", y, x.copy_) for x, y in changed]

    def leave_containers(self) -> None:
        """Put into the caller's lists and dicts what the model has put into its own; local."""
        back = {id(ours): theirs for theirs, ours in self._made.values()}
        for theirs, ours, before in self._containers:
            if [*map(id, _items(ours))] != [*map(id, before)]:
                now = [back.get(id(each), each) for each in _items(ours)[-len(ours) :]] if ours else []
                theirs.clear()
                theirs.update(zip(ours, now, strict=True)) if isinstance(theirs, dict) else theirs.extend(now)


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else [*container]


def _share_memory(*two: torch.Tensor) -> bool:
    # Whether the intervals of memory of two tensors meet.
    if not all(type(x) in (torch.Tensor, nn.Parameter) and is_readable(x) and x.numel() for x in two):
        return False
    if not (two[0].is_cpu and two[1].is_cpu):
        first, other = (x.untyped_storage()._cdata for x in two)
        return bool(first == other)
    spans = (sum((n - 1) * k for n, k in zip(x.shape, x.stride(), strict=True)) + 1 for x in two)
    (a, b), (n, m) = ([x.data_ptr() for x in two], [n * x.itemsize for n, x in zip(spans, two, strict=True)])
    return a < b + m and b < a + n


def became_split(
    modules: Iterable[tuple[str, nn.Module]], inputs: Iterable[torch.Tensor] = ()
) -> Iterator[Change]:
    """Changes of buffers, and of inputs that were plain, which are split tensors now."""
    for x in inputs:
        if isinstance(x, SplitTensor):
            yield Change("an input in place", x, partial(become_plain, x))
    for path, module in modules:
        for key, y in module._buffers.items():
            if isinstance(y, SplitTensor):
                put = partial(become_plain, y) if y._was_plain else partial(setitem, module._buffers, key)
                yield Change(f"buffer {under(path, key)!r}", y, put)


def write(changes: Iterable[Change]) -> None:
    """Make all of these plain, in their graphs; collective over their ranks, blocks if one is cut."""
    wholes: dict[int, torch.Tensor] = {}
    for _, x, put in changes:
        if id(x) not in wholes:
            wholes[id(x)] = _whole(x)
        put(wholes[id(x)])


def _whole(x: SplitTensor) -> torch.Tensor:
    # Alike on all ranks, even if these call the model in different lines.
    THREAD.place = NO_PLACE
    with torch._C.DisableTorchFunctionSubclass():
        block = everywhere_of(site_for(write, x), x) if x.is_split else checked_block(x)
        return gathered(block, x._layout.partition)


def make_buffers_plain(modules: Iterable[tuple[str, nn.Module]]) -> None:
    """Make replicated buffers plain; local. ``UnsupportedError`` if a cut one was assigned since a call."""
    changes = [*became_split(modules)]
    write(change for change in changes if not change.value.is_split)
    for what, x, _ in (change for change in changes if change.value.is_split):
        raise UnsupportedError(
            f"{what} is a split tensor, {lay.described(x._layout)}, that was assigned outside of a call of"
            " the model, or in one that raised: assign its full_tensor(), on all ranks"
        )
