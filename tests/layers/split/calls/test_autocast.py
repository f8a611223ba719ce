"""Under autocast functions of split tensors have torch's types, on ranks without elements too."""

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from distdl_rma import shard
from distdl_rma.layers.split.calls.autocast import is_cast
from distdl_rma.layers.split.calls.table import RULES
from tests.layers.split.against_whole import check

pytestmark = pytest.mark.mpi
LABELS = torch.zeros(1, 3, 4, dtype=torch.long)
THIRDS = torch.full((4, 2), 1 / 3)
FUNCTIONS = {
    "matmul": lambda x: x @ torch.ones(4, 2),
    "matmul of rows": lambda x: torch.ones(2, 3) @ x,
    "linear": lambda x: F.linear(x, torch.ones(2, 4), torch.ones(2)),
    "addmm": lambda x: torch.addmm(torch.ones(2), x[0, 0], torch.ones(4, 2)),
    "addmm in place": lambda x: x[0, 0, :, :2].clone().addmm_(x[0, 0], THIRDS.to(x.dtype)),
    "addmv": lambda x: torch.addmv(torch.ones(3, dtype=x.dtype), x[0, 0], torch.ones(4, dtype=x.dtype)),
    "baddbmm": lambda x: torch.baddbmm(torch.ones(2, 1, 1), x[0], x[0].mT),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "inner": lambda x: torch.inner(x, torch.ones(2, 4, dtype=x.dtype)),
    "einsum": lambda x: torch.einsum("nchw,wo->ncho", x, torch.ones(4, 2, dtype=x.dtype)),
    "einsum over rows": lambda x: torch.einsum("nchw,ho->ncwo", x, torch.ones(3, 2, dtype=x.dtype)),
    "einsum of an element": lambda x: torch.einsum("nchw,no->ochw", x, torch.ones(1, 2, dtype=x.dtype)),
    "einsum of one": lambda x: torch.einsum("nchw->cw", x),
    "tensordot": lambda x: torch.tensordot(x, torch.ones(3, 4, 2, dtype=x.dtype), 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "convolution": lambda x: F.conv2d(x, torch.ones(3, 2, 3, 3), torch.ones(3), padding=1),
    "prelu": lambda x: F.prelu(x, torch.ones(2)),
    "prod": lambda x: x.prod(2),
    "prod of a type": lambda x: x.prod(2, dtype=torch.bfloat16),
    "sum": lambda x: x.sum(2),
    "quantile": lambda x: x.float().quantile(0.5, 2),
    "cat": lambda x: torch.cat([x, torch.ones(1, 2, 3, 4)], 2),
    "cat of short ones": lambda x: torch.cat([x.bfloat16(), torch.ones(1, 2, 3, 4).bfloat16()], 2),
    "cross entropy": lambda x: F.cross_entropy(x, LABELS),
    "mean of squares": lambda x: F.mse_loss(x, torch.zeros(1, 2, 3, 4)),
    "transform": lambda x: torch.fft.rfft(x, dim=3).abs(),
    "response norm": lambda x: F.local_response_norm(x.unsqueeze(0), 2),
    "average of a volume": lambda x: F.avg_pool3d(x, 1),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
}


@pytest.mark.sizes(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_types_are_torchs(P_world, name, dtype):
    x = (torch.arange(24.0).view(1, 2, 3, 4) / 24).to(dtype).requires_grad_()

    def under_autocast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return FUNCTIONS[name](x)

    # Parts of sums below 8 that ranks add are rounded to bfloat16, each by up to half of 2 ** -5.
    atol = 2**-5 if name == "convolution" else 2e-2
    # The first dimension has one element for all ranks.
    check(P_world, under_autocast, [x], atol=atol, rtol=2e-2)


def test_products_of_short_integers_have_one_type_on_all_ranks(P_world):
    x = shard({"H": -1}, torch.arange(6, dtype=torch.int16).view(1, 1, 1, 6))
    assert (x @ torch.ones(6, 2, dtype=torch.int16)).full_tensor().tolist() == [[[[15, 15]]]]


@pytest.mark.sizes(1)
def test_the_lists_are_torchs():
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")
    }
    here = {getattr(function, "__name__", "") for function in RULES}
    assert {name for name in names & here if not is_cast(name)} == set()
