"""Functions that are refused, or computed by every rank on the whole tensor.

Three things may happen to a function that no other file here has a rule for:

- It has a row here, and a tensor is cut: refused, with the reason and what to write instead.
- It is not in the table at all, and a tensor is cut: refused. A function of a user or of a new torch might do
  anything with a block, and a plausible wrong number is worse than an error.
- No tensor is cut, so every rank has all elements: every rank calls it, and the results are copies.

``always`` rows are refused for copies too, since they change or show the memory of a tensor itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma.layers.split.calls.table import WITHOUT_RULE, rule, twin_of
from distdl_rma.layers.split.calls.torch_errors import checked_rule
from distdl_rma.layers.split.operands import on_whole_tensors
from distdl_rma.layers.split.tensor import any_cut, composed, refused

_T: Any = torch.Tensor


def _refuse(*functions: Any, doc: str, why: str, always: bool = False) -> None:
    # ``doc`` is printed in docs/split-functions.md. ``always`` refuses them for replicated tensors too.
    def handler(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if always or any_cut(args, kwargs):
            raise refused(func, why)
        return on_whole_tensors(func, args, kwargs)

    handler.__doc__ = doc
    rule("refused", *functions)(handler)


_refuse(
    *(_T.__reduce_ex__, _T.__reduce__, _T.data_ptr, _T.untyped_storage, _T.storage, _T.share_memory_),
    *(_T.__dlpack__, _T.as_strided),
    doc="Needs the memory of the whole tensor, which no rank has.",
    why="no rank has the memory of all of it; full_tensor() makes a plain tensor, to_local() shows the block",
    always=True,
)
_refuse(
    *"unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_ set_ as_strided_".split(),
    doc="Changes the shape of the tensor itself: use the form without the underscore.",
    why="it changes the shape of the tensor itself; use the form without the underscore",
    always=True,
)
_refuse(
    *"index_put index_put_ masked_scatter masked_scatter_ put_ put".split(),
    doc="Writes by indices or a mask: use ``x[mask] = value``, ``where``, ``cat`` or ``pad``.",
    why="it writes by indices or a mask; write x[mask] = value, or build the tensor by torch.cat, torch.where"
    " or F.pad instead",
)
_refuse(
    *("multinomial", "fractional_max_pool2d", "fractional_max_pool3d"),
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    doc="Draws depend on all elements: replicated tensors only.",
    why="what it draws depends on elements that are on many ranks",
)
_refuse(
    F.ctc_loss,
    doc="Each step depends on the one before, over all labels: replicated tensors only.",
    why="every step needs the one before, of all labels",
)


@rule("copies", WITHOUT_RULE)
def without_rule(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function that has no rule: refused, unless every rank has all of all tensors.

    An operator of ATen uses the rule of torch's function for it.
    """
    twin = twin_of(func)
    if twin is not None:
        # ATen's operators name their first argument self.
        first = () if args else (kwargs.pop("self"),)
        return composed(twin, *first, *args, **kwargs)
    if any_cut(args, kwargs):
        raise refused(func, "it has no rule for split tensors")
    return on_whole_tensors(func, args, kwargs)


# Not refused although a result of blocks would be none: each rank needs the memory of the whole tensors. The
# results are small, or programs call the function rarely and for small tensors.
_OF_ALL: dict[str, list[Any]] = {
    "reduction": ["trapezoid", "trapz", "cumulative_trapezoid"],
    "loss": [F.multi_margin_loss, F.multilabel_margin_loss, F.cosine_embedding_loss, F.triplet_margin_loss],
    "norm": ["renorm"],
    "random": [torch.poisson, torch.binomial],
    "movement": [
        *"unique unique_consecutive histc histogram bincount corrcoef cov searchsorted".split(),
        *("index_add", "index_copy", "index_fill"),
        *(torch.block_diag, torch.cartesian_prod, torch.combinations),
        *("meshgrid", torch._VF.meshgrid),  # type: ignore[attr-defined]
    ],
    "contraction": [
        *(torch.linalg.solve, torch.linalg.solve_triangular, torch.linalg.lstsq, torch.cdist),
        *(torch.tensordot, *"cholesky_solve inner bilinear kron addr addmv addbmm".split()),
        *"lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split(),
    ],
}
for _kind, _functions in _OF_ALL.items():
    _doc = "Every rank gets the whole tensors, and needs the memory for these; all compute the same."
    checked_rule(_kind, *_functions, doc=_doc)(on_whole_tensors)
