"""Under autocast functions of split tensors have torch's types, on ranks without elements too."""

from contextlib import contextmanager, nullcontext
from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from distdl_rma import shard
from distdl_rma.layers.ops.core.tensors import no_autocast
from distdl_rma.layers.split.calls.autocast import ON_CPU, ON_DEVICES, castable, dtype_for
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
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


# Torch refuses the first on GPUs. Cells of recurrent networks are refused for cut tensors.
UNLISTED = {"binary_cross_entropy", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"}


@pytest.mark.sizes(1)
@pytest.mark.parametrize(("key", "casts"), [("AutocastCPU", ON_CPU), ("AutocastCUDA", ON_DEVICES)])
def test_the_lists_are_torchs(key, casts):
    names = {
        name.removeprefix("aten::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    }
    here = {getattr(function, "__name__", "") for function in RULES}
    unlisted = UNLISTED if casts is ON_DEVICES else set()
    assert (names & here) - frozenset().union(*casts) == unlisted & here


# Of two matrices of three by three.
ON_GPUS = {
    "exp": lambda x, y: x.exp(),
    "power": lambda x, y: x**2,
    "addcdiv": lambda x, y: x.addcdiv(y, y),
    "addmv": lambda x, y: torch.addmv(x.select(0, 0), y, y.select(0, 0)),
    "addr": lambda x, y: x.addr(y.select(0, 0), y.select(0, 1)),
    "atan2": torch.atan2,
    "bilinear": lambda x, y: F.bilinear(x, y, torch.stack([x] * 3)),
    "cat": lambda x, y: torch.cat([x, y]),
    "similarity": F.cosine_similarity,
    "cross": lambda x, y: torch.cross(x, y, dim=0),
    "cumulated": lambda x, y: x.cumsum(0) + x.cumprod(0),
    "distance": torch.dist,
    "distances": torch.cdist,
    "dot": lambda x, y: torch.dot(x.select(0, 0), y.select(0, 0)),
    "vdot": lambda x, y: torch.vdot(x.select(0, 0), y.select(0, 0)),
    "vecdot": torch.linalg.vecdot,
    "einsum": lambda x, y: torch.einsum("ij,jk->ik", x, y),
    "product": torch.matmul,
    "inner": torch.inner,
    "outer": lambda x, y: torch.outer(x.select(0, 0), y.select(0, 0)),
    "linear": F.linear,
    "mv": lambda x, y: x.mv(y.select(0, 0)),
    "tensordot": lambda x, y: torch.tensordot(x, y, 1),
    "convolution": lambda x, y: F.conv1d(x.unsqueeze(0), y.unsqueeze(1), y.select(0, 0)),
    "group norm": lambda x, y: F.group_norm(x, 1),
    "layer norm": lambda x, y: F.layer_norm(x, (3,)),
    "root mean square": lambda x, y: F.rms_norm(x, (3,)),
    "instance norm": lambda x, y: F.instance_norm(x.unsqueeze(0)),
    "norm": lambda x, y: x.norm(),
    "norm of rows": lambda x, y: torch.linalg.vector_norm(x, dim=1),
    "norm of a matrix": lambda x, y: torch.linalg.matrix_norm(x),
    "renorm": lambda x, y: x.renorm(2, 0, 1.0),
    "sum": lambda x, y: x.sum(),
    "sum of a type": lambda x, y: x.sum(dtype=torch.float64),
    "sum of short ones": lambda x, y: x.sum(0, dtype=torch.float16),
    "prod": lambda x, y: x.prod(0),
    "mean": lambda x, y: x.mean(),
    "variance": lambda x, y: x.var(),
    "quantile": lambda x, y: x.float().quantile(0.5),
    "logsumexp": lambda x, y: x.logsumexp(0),
    "softmax": lambda x, y: x.softmax(0),
    "log softmax": lambda x, y: F.log_softmax(x, 0),
    "scatter": lambda x, y: x.scatter_add(0, torch.zeros(3, 3, dtype=torch.long, device="cuda"), y),
    "put": lambda x, y: x.index_put((torch.zeros(3, dtype=torch.long, device="cuda"),), y),
    "prelu": lambda x, y: F.prelu(x, y.view(-1).narrow(0, 0, 1)),
    "mean of squares": F.mse_loss,
    "cross entropy": F.cross_entropy,
    "divergence": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "logits": F.binary_cross_entropy_with_logits,
    "pool": lambda x, y: F.avg_pool1d(x, 1),
    "attention": lambda x, y: F.scaled_dot_product_attention(*[x.view(1, 3, 3)] * 3),
}


class AsRules(TorchFunctionMode):
    """Calls functions with the arguments that their rules get; what is not listed, torch converts itself."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        rule, given = RULES.get(func), (args, kwargs or {})
        some = [x for x in tensors_in(given) if castable(x)]
        dtype = dtype_for(rule.casts, some, "cuda") if rule is not None and rule.casts else None
        if dtype is None:
            return func(*args, **given[1])
        args, kwargs = mapped(lambda x: x.to(dtype) if castable(x) else x, given)
        with no_autocast():
            return func(*args, **kwargs)


@contextmanager
def autocast_of_gpus():
    # Without a GPU torch leaves its autocast off, unless it is told so by its own functions.
    was = torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True), torch.set_autocast_dtype("cuda", torch.float16)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", was[0]), torch.set_autocast_dtype("cuda", was[1])


@pytest.mark.sizes(1)
@pytest.mark.parametrize("name", ON_GPUS)
def test_types_on_gpus_are_torchs(name):
    with autocast_of_gpus(), FakeTensorMode():
        for kinds in product([torch.float32, torch.float16], repeat=2):
            x, y = (torch.empty(3, 3, dtype=kind, device="cuda") for kind in kinds)
            found = []
            for mode in (nullcontext(), AsRules()):
                try:
                    with mode:
                        found.append(ON_GPUS[name](x, y).dtype)
                except (RuntimeError, TypeError) as error:
                    found.append(type(error))
            assert found[0] == found[1], (name, kinds)
