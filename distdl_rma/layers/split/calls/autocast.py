"""Functions whose arguments torch's autocast converts, and the dtype for each.

The lists are torch's own: those of ``AutocastCPU``, and for other devices of ``AutocastCUDA``.
A rule gets converted tensors and computes without autocast, as torch's kernels do. If a function in
no list calls listed ones, these convert their arguments.

Torch converts below its functions, where it sees blocks and not split tensors: a rule would compute partial
results in one dtype and combine them in another. So the arguments are converted before the rule is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Of all devices; then of the CPU alone.
_SHORTER = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d mm bmm matmul __matmul__
__rmatmul__ addmm addbmm baddbmm linear scaled_dot_product_attention prelu
""".split()
_LONGER = """
prod cdist mse_loss l1_loss smooth_l1_loss huber_loss soft_margin_loss poisson_nll_loss
hinge_embedding_loss margin_ranking_loss binary_cross_entropy_with_logits kl_div cross_entropy nll_loss
multi_margin_loss multilabel_margin_loss cosine_embedding_loss triplet_margin_loss
""".split()
_LONGER_ON_CPU = """
polar view_as_complex quantile nanquantile trace avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d
reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
adaptive_max_pool3d_with_indices max_pool3d max_unpool1d max_unpool2d max_unpool3d grid_sample grid_sampler
binary_cross_entropy fft_fft fft_fft2 fft_fftn fft_ifft fft_ifft2 fft_ifftn fft_rfft fft_rfft2 fft_rfftn
fft_irfft fft_irfft2 fft_irfftn fft_hfft fft_ihfft
""".split()
# Functions of matrices, then functions that are refused for cut tensors.
_LONGER_ON_CPU += """
cholesky cholesky_inverse cholesky_solve inverse pinverse qr svd linalg_cholesky linalg_cholesky_ex
linalg_cond linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lstsq
linalg_matrix_rank linalg_qr linalg_solve linalg_svd linalg_svdvals ctc_loss fractional_max_pool2d
fractional_max_pool3d
""".split()
_SHORTER_ON_DEVICES = "addmv addr mv einsum linalg_vecdot vecdot linalg_multi_dot multi_dot".split()
_LONGER_ON_DEVICES = """
acos asin cosh cosine_similarity cumprod cumsum dist erfinv exp expm1 group_norm layer_norm
linalg_matrix_norm linalg_vector_norm log log10 log1p log2 log_softmax logsumexp norm pow reciprocal renorm
rms_norm rsqrt sinh softmax softplus sum tan upsample upsampling_nearest2d upsampling_bilinear2d
""".split()
# Functions of several tensors take the longest of their dtypes.
_JOINING_ON_CPU = ["cat", "stack", "index_copy"]
_JOINING_ON_DEVICES = """
addcdiv addcmul atan2 bilinear cross dot vdot grid_sample grid_sampler index_put scatter_add
tensordot
""".split()


class Casts(NamedTuple):
    """Names of functions that autocast computes in the shorter type, in float32, in the longest of theirs."""

    shorter: frozenset[str]
    longer: frozenset[str]
    joining: frozenset[str]


ON_CPU = Casts(frozenset(_SHORTER), frozenset(_LONGER + _LONGER_ON_CPU), frozenset(_JOINING_ON_CPU))
ON_DEVICES = Casts(
    frozenset(_SHORTER + _SHORTER_ON_DEVICES),
    frozenset(_LONGER + _LONGER_ON_DEVICES),
    frozenset(_JOINING_ON_DEVICES),
)
_CAST = frozenset({torch.float32, torch.float16, torch.bfloat16})


def is_cast(name: object) -> bool:
    """Whether autocast of any device converts arguments of functions of this name."""
    return any(name in names for casts in (ON_CPU, ON_DEVICES) for names in casts)


def castable(x: torch.Tensor) -> bool:
    """Whether a tensor has a dtype that autocast converts."""
    return x.dtype in _CAST


def dtype_for(name: str, tensors: Sequence[torch.Tensor], kind: str = "cpu") -> torch.dtype | None:
    """Dtype to which autocast of a type of device converts the castable tensors of a function.

    None if autocast is off there, or leaves the function as it is.
    """
    shorter, longer, joining = ON_CPU if kind == "cpu" else ON_DEVICES
    if not torch.is_autocast_enabled(kind):
        return None
    if name in longer:
        return torch.float32
    if name in shorter or (name in joining and not tensors):
        return torch.get_autocast_dtype(kind)
    if name not in joining:
        return None
    # Torch decides which dtype joined tensors have.
    return torch.cat([torch.empty(0, dtype=x.dtype) for x in tensors]).dtype
