"""Random numbers: those of elements by their indices in the whole tensor; all default generators stay equal.

A draw of elements takes one number from the default generator, or from the one that is passed::

    default generators          1 number, equal on all ranks (``seed_from``), and all move on alike
        |
        '--- element i          number i of the sequence of this seed (``draws.fill``)

So a run draws the same masks on every grid, and a checkpoint that recomputes a dropout draws the same again:
torch restores the default generator for it. Tensors without a cut draw by index too; otherwise a model's
numbers would depend on which of its tensors happen to be cut. ``poisson`` and ``binomial`` need a number of
draws that depends on what is drawn, so that no element has a place in a sequence: every rank draws all of
them (``refusals.py``). A dropout of channels is small: every rank draws the mask of the whole from the
default generator, as torch does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.layers.ops.core.autograd import as_step
from distdl_rma.layers.split.calls.signatures import named, tensors_in
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.functions.draws import fill, generator_of_block, seed_from
from distdl_rma.layers.split.operands import as_blocks, common_layout, of_cut, part_for, site_for
from distdl_rma.layers.split.tensor import SplitTensor, checked_block, composed
from distdl_rma.layers.split.views import begin_change
from distdl_rma.layers.staging import up

# Alpha dropout sets elements to SELU's limit for large negative inputs; this is its negative.
_ALPHA = 1.7580993408473766


@as_step
def draw(
    out: torch.Tensor,
    name: str,
    layout: Decomposition,
    *parameters: Any,
    source: torch.Generator | None = None,
) -> torch.Tensor:
    """Fill this rank's block by torch's method ``name`` with its parameters, and return it; local.

    Tensors among the parameters are cut like the block.
    """
    seed, of_elements = seed_from(source), any(isinstance(x, torch.Tensor) for x in parameters)
    if not of_elements and fill(out, name, layout, seed, parameters):
        return out
    # Torch's method raises the errors of types, and of parameters that are tensors. Without bounds, integers
    # of ``random_`` have those of their type.
    given = () if parameters[0] is None else parameters
    getattr(out, name)(*given, generator=generator_of_block(layout, seed))
    if of_elements:
        _overwrite(out, layout, seed, parameters[0])
    return out


def _overwrite(drawn: torch.Tensor, layout: Decomposition, seed: int, probability: Any) -> None:
    # What torch has drawn with a probability for each element, again by the indices. In double precision,
    # since a number and its probability decide by a comparison.
    number = torch.empty(drawn.shape, dtype=torch.float64, device=drawn.device)
    fill(number, "uniform_", layout, seed, (0.0, 1.0))
    with torch.no_grad():
        drawn.copy_(number < probability)


def _scaled(mask: torch.Tensor, p: float, alpha: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    # The factor of each element, and what is added afterwards. Alpha dropout keeps mean and variance: dropped
    # elements get SELU's limit, and a and the offset undo what this does to both.
    if not alpha:
        return mask.div_(1 - p) if p < 1 else mask, None
    a = ((_ALPHA * _ALPHA * p + 1) * (1 - p)) ** -0.5 if p < 1 else 0.0
    offset = (mask - 1).mul_(_ALPHA * a).add_(_ALPHA * a * p)
    return mask.mul_(a), offset


@rule(
    "random",
    *"dropout dropout_ dropout1d dropout2d dropout3d feature_dropout feature_dropout_".split(),
    *"alpha_dropout alpha_dropout_ feature_alpha_dropout feature_alpha_dropout_".split(),
)
@of_cut(uncut=True)
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
        begin_change(func, x)
    if "feature" in name or name[-1] == "d":
        factor, offset = _of_channels(func, x, p, "alpha" in name)
    else:
        drawn = draw(torch.empty_like(local, requires_grad=False), "bernoulli_", layout, 1 - p)
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
    drawn = torch.empty(shape, dtype=x._local.dtype, device="cpu").bernoulli_(1 - p)
    values = _scaled(up(drawn, x._local.device), p, alpha)
    cut = part_for(shape, layout).slices()
    return values[0][cut], None if values[1] is None else values[1][cut]


_DRAWN_IN_PLACE = "bernoulli_ normal_ uniform_ exponential_ random_".split()


@checked_rule("random", *(getattr(torch.Tensor, name) for name in _DRAWN_IN_PLACE))
@of_cut(uncut=True, plain="it would change a plain tensor, which every rank has, by one that is split")
def drawn_in_place(
    call: Call, site: Site, x: SplitTensor, generator: torch.Generator | None = None, **parameters: Any
) -> Any:
    """Each rank fills its block; parameters of the distribution are cut."""
    func, args, kwargs = call
    begin_change(func, x)
    if func.__name__ == "random_" and len(args) == 2 and "to" not in kwargs:
        # The only number is the upper bound.
        parameters = {"from": 0, "to": args[1]}
    given = as_blocks(site, (*parameters.values(),), x._layout)
    draw(checked_block(x), func.__name__, x._layout, *given, source=generator)
    return x


@rule("random", torch.rand_like, torch.randn_like, torch.randint_like)
def drawn_like(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor that is cut as the input is; each rank draws its block."""
    (x, *bounds), kwargs = args, dict(kwargs)
    bounds += [kwargs.pop(key) for key in ("low", "high") if key in kwargs]
    source, needs = kwargs.pop("generator", None), kwargs.pop("requires_grad", False)
    y = torch.empty_like(x._local.detach(), **kwargs)
    name = {torch.rand_like: "uniform_", torch.randn_like: "normal_"}.get(func, "random_")
    bounds = [0, *bounds][-2:] if name == "random_" else [0.0, 1.0]
    draw(y, name, x._layout, *bounds, source=source)
    return SplitTensor(y.requires_grad_(needs), x._layout)


@checked_rule("random", torch.bernoulli, torch.Tensor.bernoulli, torch.normal)
def drawn_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Each rank draws its block by its parameters."""
    layout, site = common_layout(func, tensors_in(args, kwargs)), site_for(func, *tensors_in(args, kwargs))
    blocks, options = as_blocks(site, (args, kwargs), layout, 1)
    seed = seed_from(options.pop("generator", None))
    # Torch has the errors and the graph: gradients of parameters are zero.
    y = func(*blocks, **options, generator=generator_of_block(layout, seed))
    given = named(func, blocks, options)
    with torch.no_grad():
        if func is torch.normal:
            fill(y, "normal_", layout, seed, (0.0, 1.0))
            y.mul_(given["std"]).add_(blocks[0])
        else:
            _overwrite(y, layout, seed, blocks[0] if given["p"] is None else given["p"])
    return SplitTensor(y, layout)


@checked_rule("random", "rrelu", "rrelu_")
@of_cut(uncut=True)
def rrelu(call: Call, site: Site, x: SplitTensor, lower: float, upper: float, **given: Any) -> Any:
    """In training each rank draws slopes for the negative elements of its block; else a fixed slope."""
    in_place = bool(given.get("inplace")) or call[0].__name__.endswith("_")
    if not given["training"]:
        return composed(F.leaky_relu, x, (lower + upper) / 2, inplace=in_place)
    local = checked_block(x).detach()
    slope = draw(torch.empty_like(local), "uniform_", x._layout, lower, upper, source=given.get("generator"))
    factor = SplitTensor(torch.where(local > 0, 1.0, slope), x._layout)
    return composed(torch.Tensor.mul_ if in_place else torch.mul, x, factor)
