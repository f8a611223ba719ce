"""Functions along dimensions that must be whole, such as sorting and Fourier transforms.

Every result along such a dimension depends on all elements of it, in their order. So a cut in it moves to
another dimension, torch's function runs on blocks, and the result moves back. An image that is cut in rows,
with a transform of its columns:

    rank 0: 0 0 0 0      0 0 | 1 1     F F | F F      F F F F
            0 0 0 0  ->  0 0 | 1 1  -> F F | F F  ->  F F F F
    rank 1: 1 1 1 1      0 0 | 1 1     F F | F F      F F F F
            1 1 1 1      0 0 | 1 1     F F | F F      F F F F
          cut in rows   cut in columns   by torch     cut in rows

Each way is one exchange in which every element travels at most once. Results without the dimension, such as
medians, stay where they are: they are small.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.site import Site
from distdl_rma.layers.split.calls.table import Call, rule
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.operands import composition, of_any_cut, of_cut, on_whole_tensors
from distdl_rma.layers.split.reduction_axes import Along, by_whole_dims, computed, positive, with_whole
from distdl_rma.layers.split.tensor import SplitTensor, composed

_ALONG = "cumsum cumprod logcumsumexp cummax cummin argsort sort topk diff".split()
_TO_ONE = "kthvalue mode median nanmedian quantile nanquantile".split()


@checked_rule("movement", *_ALONG, *_TO_ONE)
@of_any_cut
def along_whole_dimension(call: Call, site: Site, x: Any, dim: Any, **given: Any) -> Any:
    """If the dimension is cut, another one is cut meanwhile; results along it move back.

    Without another dimension, or for functions of all elements, every rank gets the whole tensor.
    """
    func, args, kwargs = call
    if func.__name__ in ("sort", "argsort") and args[1:] and isinstance(args[1], bool):
        # The overload with ``stable`` first.
        return composed(func, x, **{"stable": args[1], **kwargs})
    if not isinstance(x, SplitTensor) or dim is None or tensors_in(given) or 0 in x.shape:
        return on_whole_tensors(*call)
    dims, keepdim = (positive(dim, x.dim()),), given.pop("keepdim", None)
    options = {name: value for name, value in given.items() if value is not None}
    if keepdim is None:
        return by_whole_dims(site, x, dims, partial(func, dim=dims[0], **options))
    along = Along(site, *with_whole(site, x, dims), dims)
    found = computed(partial(func, dim=dims[0], keepdim=True, **options), along.local)
    return mapped(lambda y: along.result(y, keepdim), found)


rule("movement", "msort", doc="As ``sort`` along the first dimension.")(
    composition(lambda x: torch.sort(x, 0)[0])
)


_EACH = "fft ifft rfft irfft hfft ihfft".split()
_FFT = [getattr(torch.fft, f"{name}{dims}") for name in _EACH for dims in ("", "2", "n")]


@checked_rule("movement", *_FFT, torch.fft.fftshift, torch.fft.ifftshift)
@of_cut(empty=False)
def transform(call: Call, site: Site, x: SplitTensor, dim: Any, **given: Any) -> Any:
    """If a transformed dimension is cut, another one is cut meanwhile; the result moves back.

    Cut dimensions whose extent changes have balanced blocks then. If no other dimension can be cut, every
    rank transforms the whole tensor.
    """
    func, ndim, extents = call[0], x.dim(), given.get("s")
    if dim is None:
        dims = tuple(range(ndim - len(extents) if extents is not None else 0, ndim))
    else:
        # In the user's order: the last one is that of a real transform.
        dims = tuple(positive(d, ndim) for d in (dim if isinstance(dim, (tuple, list)) else (dim,)))
    compute = partial(func, dim=dims[0] if "n" in given else dims, **given)
    return by_whole_dims(site, x, dims, compute)


@checked_rule("window", torch.gradient)
@of_cut()
def gradient(call: Call, site: Site, x: SplitTensor, spacing: Any, dim: Any, edge_order: int) -> Any:
    """One tensor per dimension; if that is cut, another one is cut meanwhile, and the result moves back."""
    if tensors_in(spacing):
        # Of coordinates every rank needs all.
        return on_whole_tensors(*call)
    dims = range(x.dim()) if dim is None else dim if isinstance(dim, (list, tuple)) else (dim,)
    steps = spacing if isinstance(spacing, (list, tuple)) else [spacing] * len(dims)

    def along(d: int, step: Any) -> Any:
        given = {"spacing": step, "dim": d, "edge_order": edge_order}
        return by_whole_dims(site, x, [d], lambda block: torch.gradient(block, **given)[0])

    return tuple(along(positive(d, x.dim()), step) for d, step in zip(dims, steps, strict=True))
