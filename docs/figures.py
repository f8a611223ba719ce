"""The figures of docs/layers, drawn from the plans that the layers make: of all ranks at once, without MPI.

``python docs/figures.py`` writes docs/images/<page>.svg for every page. One colour is one rank, everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.exchange import Exchange
from distdl_rma.geometry.halo import Stencil, Window, WindowSplit
from distdl_rma.geometry.intervals import Balanced
from distdl_rma.geometry.partition import Partition, groups_along, groups_onto, transposed
from distdl_rma.geometry.trees import all_reduction, broadcast, reduction
from distdl_rma.layers.ops.conv.own_and_halo import OwnAndHalo
from distdl_rma.layers.ops.norm.statistic_groups import NormAxes
from distdl_rma.layers.ops.resizing import Interpolation, Resize
from sheet import FRAME, GREY, HATCHED, STAYS, SUM, Canvas, Plane, Point, svg

__all__ = ["FIGURES", "drawn"]

# Sender, receiver, and the box that moves in the tensors of both.
Move = tuple[int, int, Box, Box]


def grid(*shape: int, first: int = 0) -> Partition:
    """Partition of consecutive ranks."""
    return Partition(tuple(range(first, first + prod(shape))), shape, first)


def owned(parts: Decomposition) -> list[tuple[int, Box]]:
    """Ranks and their boxes."""
    return [(rank, parts.box(rank)) for rank in parts.partition.ranks]


def each(box: Box) -> list[Box]:
    """Elements of a box."""
    return [Box(tuple((i, i + 1) for i in at)) for at in product(*(range(*ends) for ends in box.bounds))]


def moves(source: Decomposition, target: Decomposition, images: Sequence[int] = ()) -> list[Move]:
    """What all ranks get, from their own plans of one movement."""
    found: list[Move] = []
    for rank in sorted({*source.partition.ranks, *target.partition.ranks}):
        plan = Exchange(rank, source, target, images=tuple((shift,) for shift in images))
        found += [(rank, rank, piece.box, piece.target) for piece in plan.local]
        found += [(piece.peer, rank, piece.target, piece.box) for piece in plan.receives]
    return found


def fan(
    canvas: Canvas, starts: Mapping[int, Point], ends: Mapping[int, Point], found: Iterable[Move]
) -> None:
    """Arrows from the places of senders to those of receivers."""
    for sender, receiver, *_ in found:
        if sender in starts and receiver in ends:
            canvas.arrow(starts[sender], ends[receiver], **(STAYS if sender == receiver else {}))


def movement() -> Canvas:
    """Repartition of 3 x 3 blocks into 4 x 4, a sum-reduction and a broadcast."""
    canvas = Canvas(50, "Repartition: P_x is 3 × 3", "a tensor of 12 × 12")
    canvas.title((50, 2), "P_y is 4 × 4", "colour: the sender, number: the receiver")
    shown, middle = 6, 9.0
    canvas.text((38, 4.2), f"rank {shown} gets", color=GREY)
    source, target = (Decomposition.balanced(grid(n, n), (12, 12)) for n in (3, 4))
    x, y = Plane(canvas, (2, 7.5), (2, 2)), Plane(canvas, (50, 6.5), (2, 2))
    for rank, box in owned(source):
        x.shard(box, rank)
    for sender, receiver, here, there in moves(source, target):
        place, (width, height) = y.apart(target.partition, receiver, 0.8, 0.8), x.place(here)[1]
        place.box(there, sender, linewidth=0)
        if receiver == shown:
            x.box(here, **FRAME)
            canvas.box((38 - width / 2, middle - height / 2), (width, height), sender, str(sender))
            canvas.arrow(x.point(here), (38 - width / 2, middle))
            canvas.arrow((38 + width / 2, middle), place.point(there))
            middle += 6
    for rank, box in owned(target):
        place = y.apart(target.partition, rank, 0.8, 0.8)
        place.box(box, **FRAME | {"linewidth": 2.0 if rank == shown else 0.8})
        canvas.badge(place.point(box), rank)
    many, few = grid(2, 3), Partition((0, 3), (2, 1), 0)
    groups, roots = groups_onto(many, few, False, False), tuple((rank,) for rank in few.ranks)
    sums = reduction(groups, few.ranks, (1, 1), lambda _: 0, 0)
    copies = broadcast(few.ranks, groups, (1, 1), lambda _: 0, 0)
    canvas.title((2, 36), "SumReduce: P_x is 2 × 3, P_y is 2 × 1", "each row is summed; dotted: stays")
    canvas.title((46, 36), "Broadcast: P_x is 2 × 1, P_y is 2 × 3", "the adjoint: the same read backwards")
    for left, first, last, stages in ((3, groups, roots, sums), (47, roots, groups, copies)):
        for n, pair in enumerate(zip(first, last, strict=True)):
            ends: list[dict[int, Point]] = [{}, {}]
            for end, ranks in enumerate(pair):
                for i, rank in enumerate(ranks):
                    corner = left + 17 * n + 10 * end, 43 + 3 * (i - (len(ranks) - 1) / 2)
                    canvas.box(corner, (4, 2.4), rank, str(rank))
                    ends[end][rank] = corner[0] + 4 * (1 - end), corner[1] + 1.2
            fan(canvas, ends[0], ends[1], moves(*stages[0]))
    return canvas


def convolution() -> Canvas:
    """Tiles, halos and the rim of a convolution on 2 x 2 ranks."""
    canvas = Canvas(41, "Input: tiles and halos", "arrows: what rank 0 fetches; dotted: padding")
    canvas.title((48, 2), "Output: core and rim", "hatched: what strips add to")
    stencil, shape, P_x = Stencil.of((3, 3), (1, 1), (1, 1), ((1, 1), (1, 1))), (10, 12), grid(2, 2)
    source, outputs = (Decomposition.balanced(P_x, extents) for extents in (shape, stencil.outputs(shape)))
    parts = zip(outputs.splits, stencil.windows, shape, strict=True)
    target = source.with_splits({d: WindowSplit(*part) for d, part in enumerate(parts)})
    x = {rank: Plane(canvas, (5, 9), (1.9, 1.9)).apart(P_x, rank, 7, 7) for rank in P_x.ranks}
    y = {rank: Plane(canvas, (49, 7), (1.9, 1.9)).apart(P_x, rank, 2.5, 2.5) for rank in P_x.ranks}
    for rank, box in owned(source):
        x[rank].box(target.box(rank), facecolor="none", edgecolor=GREY, linestyle=":")
        x[rank].shard(box, rank)
        y[rank].shard(outputs.box(rank), rank)
        for strip in OwnAndHalo(stencil, Box.of_shape(shape), box, outputs.box(rank)).rim:
            y[rank].box(strip.outputs, rank, **HATCHED)
    for sender, receiver, here, there in moves(source, target):
        if sender != receiver:
            x[receiver].box(there, sender, **HATCHED)
            if receiver == 0:
                x[sender].box(here, **FRAME)
                canvas.arrow(x[sender].point(here), x[0].point(there), linewidth=1.4)
    steps = "start: edges to the neighbours", "core: own data", "wait", "rim: what the strips add"
    for n, step in enumerate(steps):
        canvas.text((49, 31 + 2.3 * n), f"{n + 1}. {step}", ha="left")
    return canvas


def linear() -> Canvas:
    """The general linear layer: input down the columns of the weight, output along its rows."""
    more = "thin: first gathered; thick: then summed; dotted: stays on its rank"
    canvas = Canvas(45, "P_x is 1 × 4, P_W is 3 × 4, P_y is 1 × 3", more)
    P_x, P_y, P_w = grid(1, 4), grid(1, 3, first=4), grid(1, 3, 4)
    one, rows, columns = Balanced(1, 1), Balanced(12, 3), Balanced(16, 4)
    source, target = Decomposition.balanced(P_x, (1, 16)), Decomposition.balanced(P_y, (1, 12))
    weight = Decomposition(P_w, (rows, columns), (None, 0, 1))
    gather = moves(source, Decomposition(P_w, (one, columns), (None, None, 1)))
    scatter = moves(Decomposition(P_w, (one, rows), (None, 1, None)), target)
    x = {rank: Plane(canvas, (12, 8), (1.9, 3)).apart(P_x, rank, 5, 0) for rank in P_x.ranks}
    w = {rank: Plane(canvas, (12, 15.5), (1.9, 1.5)).apart(P_w, rank, 5, 3.5) for rank in P_w.ranks}
    y = {rank: Plane(canvas, (73, 18.5), (3, 1.5)).apart(transposed(P_y), rank, 0, 3.5) for rank in P_y.ranks}
    for at, name in (((5, 9.5), "x"), ((5, 28), "W"), ((74.5, 16.5), "y")):
        canvas.name(at, name)
    for sender, receiver, *_ in scatter:
        start = w[sender].point(weight.box(sender), 0.5, 1)
        turn = start[0], start[1] + 1.6
        canvas.line(start, turn, **SUM, linestyle=":" if sender == receiver else "-")
        canvas.arrow(turn, (73, turn[1]), **SUM)
    for sender, receiver, box, _ in gather:
        start, end = x[sender].point(box, 0), w[receiver].point(weight.box(receiver), 0)
        turn = end[0] - 2, end[1]
        canvas.line(start, (turn[0], start[1]), turn, linestyle=":" if sender == receiver else "-")
        canvas.arrow(turn, end, **(STAYS if sender == receiver else {}))
    for rank, box in owned(target):
        y[rank].shard(Box(box.bounds[::-1]), rank)
    for planes, parts in ((x, source), (w, weight)):
        for rank, box in owned(parts):
            planes[rank].shard(box, rank)
    return canvas


def pooling() -> Canvas:
    """Windows over the borders of shards, and one that sticks out."""
    more = "lines: windows; hatched: fetched; dashed: beyond the tensor"
    canvas = Canvas(41, "kernel_size=3, stride=2, ceil_mode=True", more)
    stencil, P_x, n = Stencil((Window(3, stride=2, ceil=True),)), grid(3), 10
    source, outputs = (Decomposition.balanced(P_x, extents) for extents in ((n,), stencil.outputs((n,))))
    target = source.with_splits({0: WindowSplit(outputs.splits[0], stencil.windows[0], n)})
    x = Plane(canvas, (11, 7.5), (6, 2.8))
    y = {rank: replace(x, at=(x.at[0], 14.5 + 9 * i)) for i, rank in enumerate(P_x.ranks)}
    canvas.name((5, 8.9), "x")
    for rank, box in owned(source):
        for i in each(box):
            x.box(i, rank, str(i.start[0]))
        y[rank].box(target.box(rank), zorder=0, linestyle="--", edgecolor=GREY)
        canvas.text((5, y[rank].at[1] + 1.4), f"rank {rank}")
    for sender, receiver, _, there in moves(source, target):
        for i in each(there):
            y[receiver].box(i, sender, str(i.start[0]), **(HATCHED if sender != receiver else {}))
            if sender != receiver:
                canvas.arrow(x.point(i, 0.5, 1), y[receiver].point(i, 0.5, 0), linewidth=1.4)
    for rank, box in owned(outputs):
        for j in each(box):
            window, down = stencil.reads(j), 1.25 + 0.2 * (j.start[0] % 2)
            canvas.line(*(y[rank].point(window, side, down) for side in (0.02, 0.98)), linewidth=2)
            corner = y[rank].point(window)[0] - 4, y[rank].at[1] + 4.8
            canvas.box(corner, (8, 2.4), rank, f"output {j.start[0]}")
    return canvas


def upsampling() -> Canvas:
    """Taps of a linear interpolation, and a circular padding."""
    more = "a line: a tap, as thick as its weight; dark: it reads another rank's input"
    canvas = Canvas(42, 'Up-sampling: scale_factor=1.7, mode="linear"', more)
    P_x, n, resize, pad = grid(3), 7, Resize(7, 11, 1.7), Window(1, left=2, right=2)
    taps = Interpolation.of("linear", 1, resize, torch.float32)
    weights = torch.zeros(n, resize.outputs)
    if taps.weight is not None:
        weights.index_put_((taps.index, torch.arange(resize.outputs)), taps.weight, accumulate=True)
    source, outputs = (Decomposition.balanced(P_x, (extent,)) for extent in (n, resize.outputs))
    reads = source.with_splits({0: WindowSplit(outputs.splits[0], taps.window, n)})
    x, y = Plane(canvas, (12, 7), (63 / n, 2.8)), Plane(canvas, (12, 19), (63 / resize.outputs, 2.8))
    for sender, receiver, here, _ in moves(source, reads):
        for i, j in product(each(here), each(outputs.box(receiver))):
            if weight := float(weights[i.start[0], j.start[0]]):
                rank = sender if sender == receiver else None
                canvas.thread(x.point(i, 0.5, 1), y.point(j, 0.5, 0), rank, 0.4 + 4 * weight)
    for plane, parts, name in ((x, source, "x"), (y, outputs, "y")):
        canvas.name((5, plane.at[1] + 1.4), name)
        for rank, box in owned(parts):
            plane.shard(box, rank)
    more = "a number: the element of x that it copies; colour: its owner; frames: the ranks that get them"
    canvas.title((2, 27), "Padding: circular, 2 on both sides", more)
    padded = source.with_splits({0: WindowSplit(Balanced(pad.outputs(n), 3), pad, n)})
    y = Plane(canvas, (12 + 126 / pad.outputs(n), 33), (63 / pad.outputs(n), 2.8))
    canvas.name((5, 34.4), "y")
    for sender, _, here, there in moves(source, padded, (-n, 0, n)):
        for i, j in zip(each(here), each(there), strict=True):
            y.box(j, sender, str(i.start[0]), linewidth=0)
    for rank, box in owned(padded):
        y.box(box, **FRAME)
        canvas.badge(y.point(box, 0.5, 1.7), rank)
    return canvas


def normalization() -> Canvas:
    """Elements that share a mean and a variance, and the ranks that they lie on."""
    more = "framed: the elements that share a mean and a variance; in full colour: one such set"
    canvas = Canvas(36, "P_x is 2 × 2 × 2: batch, channel, width", more)
    source = Decomposition.balanced(grid(2, 2, 2), (2, 6, 8))
    layouts = {
        "batch": NormAxes((0, 2), (1,)),
        "instance": NormAxes((2,), (1,)),
        "layer": NormAxes((1, 2), (1, 2)),
        "group (of 2 channels)": NormAxes((1, 2), (1,), groups=3),
    }
    canvas.text((1, 34), "share:", ha="left")
    for i in range(source.shape[0]):
        canvas.text((2, 13.8 + 11 * i), f"instance {i}", rotation=90)
        canvas.text((4.2, 13.8 + 11 * i), "channels", rotation=90, color=GREY)
    for n, (name, layout) in enumerate(layouts.items()):
        plane = Plane(canvas, (6 + 18.8 * n, 9), (1.9, 1.6), 11)
        cuts = [Balanced(m, 1 if d in layout.reduced else m) for d, m in enumerate(source.shape)]
        if layout.groups:
            cuts[1] = Balanced(source.shape[1], layout.groups)
        cells = [Box(bounds) for bounds in product(*(map(cut.interval, range(cut.parts)) for cut in cuts))]
        shown = next(cell for cell in cells if cell.bounds[1][1] > 2)
        for rank, box in owned(source):
            plane.box(box, rank, faint=True, linewidth=0)
            if not (box & shown).empty:
                plane.box(box & shown, rank, linewidth=0)
            canvas.badge(plane.point(box), rank)
        for cell in cells:
            thickness = 2.2 if cell == shown else 0.6
            slabs = [cell.replace(0, i, i + 1) for i in range(*cell.bounds[0])]
            for slab in slabs:
                plane.box(slab, **FRAME | {"linewidth": thickness, "zorder": 2 + thickness / 10})
            if cell == shown:
                canvas.line(plane.point(slabs[0], 0, 1), plane.point(slabs[-1], 0, 0), linewidth=thickness)
        P_x, channels = source.partition, source.splits[1]
        sharing = dict.fromkeys(layout.ranks_sharing(P_x, rank, channels) for rank, _ in owned(source))
        together = " | ".join(" ".join(map(str, ranks)) for ranks in sharing)
        for down, text, weight in ((7, name, "bold"), (31, "width", "normal"), (34, together, "normal")):
            canvas.text(
                (plane.at[0] + 7.6, down), text, fontweight=weight, color=GREY if down == 31 else None
            )
    return canvas


def losses() -> Canvas:
    """Sums over shards, one number, and gradients of shards."""
    canvas, P_x, shape = Canvas(35, "Input, of any sizes"), grid(3, 1), (7, 4)
    for left, title in ((24, "Local sums"), (45, "Loss: alike on all"), (66, "Gradients")):
        canvas.title((left, 2), title)
    for centre, words in ((39, "one allreduce"), (60.5, "nothing travels")):
        canvas.text((centre, 33), words, color=GREY)
    starts, ends = {}, {}
    for rank, box in owned(Decomposition.balanced(P_x, shape)):
        x = Plane(canvas, (2, 5), (2.6, 2.6)).apart(P_x, rank, 0, 4)
        gradient, middle = replace(x, at=(66, x.at[1])), x.point(box)[1]
        x.shard(box, rank)
        gradient.shard(box, rank)
        canvas.box((24, middle - 1.6), (10, 3.2), rank, f"sum of {box.volume}")
        canvas.box((45, middle - 1.6), (10, 3.2), rank, f"total / {prod(shape)}")
        starts[rank], ends[rank] = (34, middle), (45, middle)
        canvas.arrow(x.point(box, 1), (24, middle))
        canvas.arrow((55, middle), gradient.point(box, 0))
    for stage in all_reduction(groups_along(P_x, (0, 1)), (3,), lambda _: 0, 0):
        fan(canvas, starts, ends, moves(*stage))
    return canvas


def embedding() -> Canvas:
    """Look-ups of split indices in copies of a table, and the sum of the gradients of the copies."""
    more = "thin: look-up; thick: in the backward, the gradients of the copies are summed"
    canvas, P_x, n, dim = Canvas(43, "P_x is 1 × 3: sentence, word", more), grid(1, 3), 6, 4
    text = ((3, 0, 5, 1, 5, 2), (4, 5, 0, 0, 2, 1))
    source = Decomposition.balanced(P_x, (2, 6))
    for down, name in ((9.4, "indices"), (22, "weight"), (39, "output")):
        canvas.text((2, down), name, ha="left", fontweight="bold")
    stubs = {}
    for rank, box in owned(source):
        # A rank has 23 units: its table in the middle, its indices and outputs above and below.
        words, vectors = (
            Plane(canvas, (22 - width, down), (width, height)).apart(P_x, rank, 23 - 2 * width, 0)
            for width, height, down in ((3, 2.4, 7), (9, 2, 37))
        )
        table = Plane(canvas, (18, 16), (2, 2)).apart(P_x, rank, 23, 0)
        used = {text[word.start[0]][word.start[1]] for word in each(box)}
        for row in range(n):
            table.box(Box(((row, row + 1), (0, dim))), rank, str(row), faint=row not in used)
        for word in each(box):
            number = str(text[word.start[0]][word.start[1]])
            words.box(word, rank, number)
            vectors.box(word, rank, f"row {number}")
        whole = Box.of_shape((n, dim))
        canvas.arrow(words.point(box, 0.5, 1), table.point(whole, 0.5, 0))
        canvas.arrow(table.point(whole, 0.5, 1), vectors.point(box, 0.5, 0))
        stubs[rank] = table.point(whole, 0.85, 1)
    for stage in all_reduction((P_x.ranks,), (n * dim,), lambda _: 0, 0):
        for sender, receiver, *_ in moves(*stage):
            start, end = stubs[sender], stubs[receiver]
            canvas.line((start[0], 31.5), (end[0], 31.5), **SUM)
            canvas.arrow((end[0], 31.5), end, **SUM)
    return canvas


FIGURES: dict[str, Callable[[], Canvas]] = {
    draw.__name__: draw
    for draw in (movement, convolution, linear, pooling, upsampling, normalization, losses, embedding)
}


def drawn(page: str) -> str:
    """SVG of the figure of a page."""
    return svg(FIGURES[page])


if __name__ == "__main__":
    for page in FIGURES:
        (Path(__file__).parent / "images" / f"{page}.svg").write_text(drawn(page))
