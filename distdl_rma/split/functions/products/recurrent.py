"""Recurrent layers: each rank runs through the sequences of its samples."""

from __future__ import annotations

from typing import Any

from distdl_rma.split import layout as lay
from distdl_rma.split.calls.site import site_of
from distdl_rma.split.calls.table import rule
from distdl_rma.split.functions.places.shapes import frozen, uncut
from distdl_rma.split.operands import any_cut, as_part, machine_of, on_copies, wholes
from distdl_rma.split.reducing import with_whole
from distdl_rma.split.tensor import SplitTensor, mapped, refused


@rule("contraction", "lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Samples stay cut, time and features are made whole; all ranks run through a single sample."""
    if not any_cut(args):
        return on_copies(func, args, kwargs)
    x, states, weights, *others = args
    if not isinstance(weights, (list, tuple)) or kwargs:
        raise refused(func, "packed sequences are not supported; pad them")
    if not isinstance(x, SplitTensor):
        raise refused(func, "its states are split, its input is not")
    _, _, dropout, training, _, batch_first = others
    if dropout and training:
        raise refused(func, "dropout between its layers; nn.Dropout between layers of their own is exact")
    batch = 0 if batch_first else 1
    site = site_of(machine_of(x), func)
    local, layout = with_whole(site, x, [d for d in range(3) if d != batch], "sequences made whole")
    weights = wholes(site, weights, layout, [f"weight {at}" for at in range(len(weights))])
    several = isinstance(states, (list, tuple))
    given = states if several else (states,)
    row = lay.reordered(layout, [None, batch, None])
    parts = [uncut(row, {0: frozen(h)[0], 2: frozen(h)[2]}) for h in given]
    before = [as_part(site, h, part, part, at) for at, (h, part) in enumerate(zip(given, parts, strict=True))]
    y, *after = func(local, before if several else before[0], weights, *others)
    found = SplitTensor(y, uncut(layout, {2: y.shape[2]}))
    return found, *(SplitTensor(h, part) for h, part in zip(after, parts, strict=True))


@rule("contraction", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def cell(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Samples stay cut, features are made whole."""
    x, states, *weights = args
    if not isinstance(x, SplitTensor) or kwargs:
        raise refused(func, "its states are split, its input is not")
    if not x.is_split:
        return on_copies(func, args, kwargs)
    site = site_of(machine_of(x), func)
    local, layout = with_whole(site, x, [1], "features made whole")
    several = isinstance(states, (list, tuple))
    given = states if several else (states,)
    part = uncut(layout, {1: frozen(given[0])[1]})
    before = [as_part(site, h, part, part, at) for at, h in enumerate(given)]
    weights = wholes(site, weights, layout, [f"weight {at}" for at in range(len(weights))])
    return mapped(lambda h: SplitTensor(h, part), func(local, before if several else before[0], *weights))
