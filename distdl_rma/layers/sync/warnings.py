"""Warnings: modules that see shards as if they were whole, numbers that drifted, too many threads.

None of these is an error: each is right in some program, and wrong or slow in most. One rank warns for all,
once, with the user's line.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import batchnorm, conv, padding, pooling

from distdl_rma.geometry.box import LEADING
from distdl_rma.layers.partitioned.core.layer import DistributedLayer
from distdl_rma.segments.machine import Machine, single_rank_problem

_WHOLE_IMAGE: tuple[type[nn.Module], ...] = (
    batchnorm._NormBase,
    nn.GroupNorm,
    pooling._AdaptiveAvgPoolNd,
    pooling._AdaptiveMaxPoolNd,
    padding._ConstantPadNd,
    padding._ReflectionPadNd,
    padding._ReplicationPadNd,
    padding._CircularPadNd,
)
_WINDOWS = (pooling._MaxPoolNd, pooling._AvgPoolNd, pooling._LPPoolNd, nn.Unfold)


def warn_of_pitfalls(
    model: nn.Module | None, drifted: Sequence[str], machine: Machine, who: str = "GradientSync"
) -> None:
    """Warn, on the first rank only, of shortsighted modules and of generators that drifted apart; local."""
    if machine.rank != machine.ranks[0]:
        return
    # A distributed model runs its modules on split tensors, so that they see the whole.
    wrong = "" if model is None or hasattr(model, "distributed") else shortsighted(model)
    if wrong:
        warnings.warn(
            f"GradientSync: {wrong}: plain modules see only the shard of their rank, and the layers of this"
            " model split the image; what looks at neighbours or at the whole image is wrong there. Use the"
            " distributed layers",
            stacklevel=3,
        )
    if drifted:
        warnings.warn(
            f"{who}: the ranks were seeded alike, and their generators of random numbers are in"
            f" different states now. If that is since weights of {', '.join(map(repr, drifted))} were filled,"
            " of which ranks keep different parts, fill them by model.apply(function) or under"
            " whole_parameters(model)",
            stacklevel=3,
        )


def warn_of_start(machine: Machine) -> None:
    """Warn of a job of one rank without a launcher, and of more threads than cores; the first rank, once."""
    if machine.rank != machine.ranks[0] or machine.kept.setdefault("start", False):
        return
    machine.kept["start"] = True
    segment, threads = machine.segments.segment, torch.get_num_threads()
    ranks, wanted = len(segment.node_ranks), max(1, segment.cores // len(segment.node_ranks))
    crowd = (
        f"{ranks} rank{'s' if ranks > 1 else ''} of {threads} threads on {segment.cores} cores stand in each"
        f" other's way; set OMP_NUM_THREADS={wanted} before Python starts, or torch.set_num_threads({wanted})"
    )
    for problem in (single_rank_problem(), crowd if threads > wanted else ""):
        if problem:
            warnings.warn(f"distribute: {problem}", RuntimeWarning, stacklevel=3)


def shortsighted(model: nn.Module) -> str:
    """Plain modules that read several places of an image, in a model whose layers all split images; local.

    Returns their names and types; empty if there are none. It is also empty if a layer has a whole image on a
    rank, for which plain modules may be meant.
    """
    layers = [part for part in model.modules() if isinstance(part, DistributedLayer)]
    sides = [getattr(layer, name, None) for layer in layers for name in ("P_x", "P_y")]
    images = [side for side in sides if side is not None and side.dim > LEADING]
    if not images or any(max(image.shape[LEADING:]) == 1 for image in images):
        return ""
    plain = ((path, part) for path, part in model.named_modules() if not isinstance(part, DistributedLayer))
    return ", ".join(f"{path!r} ({type(part).__name__})" for path, part in plain if _looks_around(part))


def _looks_around(part: nn.Module) -> bool:
    if isinstance(part, conv._ConvNd):
        return any(extent > 1 for extent in part.kernel_size)
    if isinstance(part, _WINDOWS):
        # Windows side by side are within a shard if its extents are multiples of theirs.
        of: dict[str, Any] = {"dilation": 1, "padding": 0} | vars(part)
        stride = of["kernel_size"] if of["stride"] is None else of["stride"]
        reach = np.multiply(of["dilation"], np.subtract(of["kernel_size"], 1)) + 1
        return bool(np.any(reach > stride) or np.any(of["padding"]))
    return part.mode != "nearest" if isinstance(part, nn.Upsample) else isinstance(part, _WHOLE_IMAGE)
