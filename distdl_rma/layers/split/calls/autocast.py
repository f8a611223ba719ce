"""Functions whose arguments torch's autocast converts, and the dtype for each.

The lists are torch's own for the CPU (``AutocastCPU``). A rule gets converted tensors and computes without
autocast, as torch's kernels do. If a function in no list calls listed ones, these convert their arguments.

Torch converts below its functions, where it sees blocks and not split tensors: a rule would compute partial
results in one dtype and combine them in another. So the arguments are converted before the rule is called.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_SHORTER = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d mm bmm matmul __matmul__
__rmatmul__ addmm addbmm baddbmm linear scaled_dot_product_attention prelu
""".split()
_LONGER = """
prod polar view_as_complex cdist quantile nanquantile trace avg_pool3d adaptive_avg_pool3d
adaptive_max_pool3d adaptive_max_pool3d_with_indices max_pool3d max_unpool1d max_unpool2d max_unpool3d
grid_sample grid_sampler mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss
hinge_embedding_loss margin_ranking_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div
cross_entropy nll_loss multi_margin_loss multilabel_margin_loss cosine_embedding_loss triplet_margin_loss
""".split()
_LONGER += [f"fft_{name}{dims}" for name in ("fft", "ifft", "rfft", "irfft") for dims in ("", "2", "n")]
_LONGER += ["fft_hfft", "fft_ihfft"]
# Functions of matrices, then functions that are refused for cut tensors.
_LONGER += """
cholesky cholesky_inverse cholesky_solve inverse pinverse qr svd linalg_cholesky linalg_cholesky_ex
linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lstsq
linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals ctc_loss fractional_max_pool2d
fractional_max_pool3d
""".split()
# Functions that join tensors take the longest of their dtypes.
_JOINING = frozenset({"cat", "stack", "index_copy"})
_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_cast(name: object) -> bool:
    """Whether autocast converts arguments of functions of this name."""
    return name in (*_SHORTER, *_LONGER, *_JOINING)


def castable(x: torch.Tensor) -> bool:
    """Whether a tensor has a dtype that autocast converts."""
    return x.dtype in _CAST


def dtype_for(name: str, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Dtype to which autocast converts the castable tensors of a function."""
    if name in _LONGER:
        return torch.float32
    short = torch.get_autocast_dtype("cpu")
    if name in _SHORTER or not tensors:
        return short
    # Torch decides which dtype joined tensors have.
    return torch.cat([torch.empty(0, dtype=x.dtype) for x in tensors]).dtype
