"""Frames: operands of operations that are computed where the operation reads them, between places of a halo.

A convolution of a small block reads own data and halo from one tensor, into which the split model copies the
data. In a program, the region that computes the data writes them there::

    relu -> x -> copy, receive, convolve        relu -> 0 x 0 -> receive, convolve
            |                                             |
            backward of relu                    view of x -> backward of relu

The zeros are the frame: padding, or memory that received data overwrite. Nobody needs ``x`` beside it, unless
it leaves the step. The backward has the same tensor, which it would otherwise have to keep, or to copy anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from distdl_rma.layers.capture.recording import COMPUTED, Forward, Recorder, Slot, Step, alias
from distdl_rma.layers.capture.regions import Regions, filled, made_by

_pad = torch.ops.aten.constant_pad_nd.default


class _Names(dict[int, Slot]):
    # Other slots in the place of some.
    def __missing__(self, number: int) -> Slot:
        return Slot(number)


def framed(regions: Regions, forth: Sequence[Step], back: Sequence[Step]) -> tuple[list[Step], list[Step]]:
    """Steps of a forward and of its backward, in which kernels compute operands within their frames.

    A kernel whose result is changed later, or has another layout than operations give their tensors, does
    not.
    """
    recorder, steps = regions.recorder, [*forth, *back]
    makers = {n: at for at, step in enumerate(forth) if regions.fuses(step) for n in made_by([step])}
    changed = {recorder.memory(n): at for at, step in enumerate(steps) for n in regions.changed(step)}
    names, behind = _Names(), dict[int, list[Step]]()
    for at, step in enumerate(steps):
        if regions.fuses(step):
            steps[at] = step._replace(args=filled(step.args, names))
        around = step.function.frame(*step.args) if isinstance(step.function, Forward) else []
        if not any(around):
            continue
        x, *others, last = step.args
        made = makers.get(x.number, -1)
        stays = made >= changed.get(recorder.memory(x.number), 0)
        if stays and x.number not in names and recorder.tensors[x.number].is_contiguous():
            behind[made] = _frame(recorder, x, around)
            wide, names[x.number] = (each.results for each in behind[made])
            last = [*last, wide]
        steps[at] = step._replace(args=(names[x.number], *others, last))
    both = [[step, *behind.get(at, ())] for at, step in enumerate(steps)]
    ahead, after = both[: len(forth)], both[len(forth) :]
    return [*chain.from_iterable(ahead)], [*chain.from_iterable(after)]


def _frame(recorder: Recorder, x: Slot, around: Sequence[int]) -> list[Step]:
    # The steps that put a frame around a tensor, and show the tensor in it.
    inner = recorder.tensors[x.number].detach()
    whole = _pad(inner, around)
    before = around[::2]
    offset = sum(n * stride for n, stride in zip(before, reversed(whole.stride()), strict=True))
    view = tuple(inner.shape), whole.stride(), offset
    wide, within = (Slot(recorder.add(each, COMPUTED)) for each in (whole, alias(whole, *view)))
    return [Step(_pad, (x, around), {}, wide, True), Step(alias, (wide, *view), {}, within, True)]
