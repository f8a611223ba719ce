"""Random numbers: blocks have their own, equal on ranks with copies; all default generators stay equal.

A generator of the block draws the numbers for its elements. Its seed combines the block's position and one
number, which every rank draws from its default generator or from the one that is passed. So the default
generators stay equal on all ranks, and a repeated run or a recomputation draws the same numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.split.calls.refusals import checked_rule
from distdl_rma.split.calls.site import Site
from distdl_rma.split.calls.table import Call, rule
from distdl_rma.split.functions.elements.pointwise import refuse_copy
from distdl_rma.split.operands import as_blocks, common_layout, of_any_cut, of_cut, on_whole_tensors, part_for
from distdl_rma.split.tensor import SplitTensor, checked_block, composed, refused, tensors_in

# Alpha dropout sets elements to SELU's limit for large negative inputs; this is its negative.
_ALPHA = 1.7580993408473766


def generator_of_block(layout: Decomposition, source: torch.Generator | None = None) -> torch.Generator:
    """A new generator for this call and this rank's block; draws one number from ``source``."""
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=source))
    return torch.Generator().manual_seed(hash((seed, *layout.box(layout.partition.me).start)))


def _kept(x: torch.Tensor, p: float, generator: torch.Generator | None) -> torch.Tensor:
    # One for each element that stays, otherwise zero.
    return x.bernoulli_(1 - p, generator=generator)


def _scaled(mask: torch.Tensor, p: float, alpha: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The factor of each element, and what is added afterwards.
    if not alpha:
        return mask.div_(1 - p) if p < 1 else mask, None
    a = ((_ALPHA * _ALPHA * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    offset = (mask - 1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return mask.mul_(a), offset


@rule(
    "random",
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_"),
    *("dropout1d", "dropout2d", "dropout3d", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_"),
)
@of_cut()
def dropout(call: Call, site: Site, x: SplitTensor, p: float, **given: Any) -> Any:
    """Of elements: each rank draws the mask of its block. Of channels: every rank draws the whole mask."""
    func, args, kwargs = call
    local, layout, name = checked_block(x), x._layout, func.__name__
    if p == 0 or not given["training" if "training" in given else "train"]:
        y = func(local, *args[1:], **kwargs)
        return x if y is local else SplitTensor(y, layout)
    if p < 0 or p > 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    in_place = given.get("inplace") or name.endswith("_")
    if in_place:
        refuse_copy(func, x)
    if "feature" in name or name[-1] == "d":
        factor, offset = _of_channels(func, x, p, "alpha" in name)
    else:
        drawn = _kept(torch.empty_like(local, requires_grad=False), p, generator_of_block(layout))
        factor, offset = _scaled(drawn, p, "alpha" in name)
    y = local.mul_(factor) if in_place else local * factor
    if offset is not None:
        y = y.add_(offset)
    return x if in_place else SplitTensor(y, layout)


def _of_channels(
    func: Any, x: SplitTensor, p: float, alpha: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    # As torch draws it, for the whole tensor, from the default generator.
    layout, name = x._layout, func.__name__
    dims = len(layout.shape)
    if dims < 2:
        raise ValueError(f"{name}: an input of at least 2 dimensions is needed, got {dims}")
    unbatched = (name == "dropout1d" and dims == 2) or (name == "dropout3d" and dims == 4)
    leading = 1 if unbatched else 2
    shape = (*layout.shape[:leading], *(1,) * (dims - leading))
    values = _scaled(_kept(x._local.new_empty(shape), p, None), p, alpha)
    cut = part_for(shape, layout).slices()
    return values[0][cut], None if values[1] is None else values[1][cut]


_DRAWN_IN_PLACE = "bernoulli_ normal_ uniform_ exponential_ cauchy_ log_normal_ geometric_ random_".split()


@checked_rule("random", *(getattr(torch.Tensor, name) for name in _DRAWN_IN_PLACE))
@of_cut(plain="it would change a plain tensor, which every rank has, by one that is split")
def drawn_in_place(call: Call, site: Site, x: SplitTensor, **_: Any) -> Any:
    """Each block is filled by a generator of its own; parameters of the distribution are cut."""
    func, (_x, *given), kwargs = call
    refuse_copy(func, x)
    generator = generator_of_block(x._layout, kwargs.get("generator"))
    others, options = as_blocks(site, (given, kwargs), x._layout)
    func(checked_block(x), *others, **{**options, "generator": generator})
    return x


@rule("random", torch.rand_like, torch.randn_like, torch.randint_like)
def drawn_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor that is cut as the input is; each block has a generator of its own."""
    (x, *bounds), kwargs = args, dict(kwargs)
    if not x.is_split:
        return on_whole_tensors(func, args, kwargs)
    bounds += [kwargs.pop(key) for key in ("low", "high") if key in kwargs]
    generator = generator_of_block(x._layout, kwargs.pop("generator", None))
    needs = kwargs.pop("requires_grad", False)
    y = torch.empty_like(x._local.detach(), **kwargs)
    if func is torch.rand_like:
        y.uniform_(generator=generator)
    elif func is torch.randn_like:
        y.normal_(generator=generator)
    else:
        low, high = bounds if len(bounds) == 2 else (0, *bounds)
        y.random_(low, high, generator=generator)
    return SplitTensor(y.requires_grad_(needs), x._layout)


@checked_rule("random", torch.bernoulli, torch.Tensor.bernoulli, torch.normal, torch.poisson, torch.binomial)
@of_any_cut
def drawn_by(call: Call, site: Site, x: Any, **_: Any) -> Any:
    """Each block is drawn with its parameters of the distribution and a generator of its own."""
    func, args, kwargs = call
    layout = common_layout(func, tensors_in(args, kwargs))
    generator = generator_of_block(layout, kwargs.get("generator"))
    blocks, options = as_blocks(site, (args, kwargs), layout, 1)
    return SplitTensor(func(*blocks, **{**options, "generator": generator}), layout)


@checked_rule("random", "rrelu", "rrelu_")
@of_cut()
def rrelu(call: Call, site: Site, x: SplitTensor, lower: float, upper: float, **given: Any) -> Any:
    """In training each rank draws slopes for the negative elements of its block; else a fixed slope."""
    func, local = call[0], checked_block(x)
    in_place = given.get("inplace") or func.__name__.endswith("_")
    if in_place:
        refuse_copy(func, x)
    if given["training"]:
        source = generator_of_block(x._layout, given.get("generator"))
        slope = torch.empty_like(local.detach()).uniform_(lower, upper, generator=source)
        slope = torch.where(local.detach() > 0, 1.0, slope)
        y = local.mul_(slope) if in_place else local * slope
    else:
        y = F.leaky_relu(local, (lower + upper) / 2, in_place)
    return x if in_place else SplitTensor(y, x._layout)


@checked_rule("random", F.gumbel_softmax)
@of_cut()
def gumbel_softmax(call: Call, site: Site, x: SplitTensor, tau: Any, hard: bool, dim: int, **_: Any) -> Any:
    """Each rank draws noise for its block, then a softmax; ``hard`` needs a dimension that is not cut."""
    local, layout = checked_block(x), x._layout
    noise = torch.empty_like(local.detach()).exponential_(generator=generator_of_block(layout)).log().neg()
    y: Any = composed(F.softmax, SplitTensor((local + noise) / tau, layout), dim)
    if not hard:
        return y
    if y._layout.splits[dim].parts > 1:
        raise refused(call[0], "hard=True with a dimension that is cut")
    soft = y._local
    top = soft.detach().max(dim, keepdim=True)[1]
    return SplitTensor(torch.zeros_like(soft).scatter_(dim, top, 1.0) - soft.detach() + soft, y._layout)
