"""Under autocast functions of split tensors have torch's types, on ranks without elements too."""

from contextlib import contextmanager, nullcontext
from itertools import chain, product, repeat

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from distdl_rma import shard
from distdl_rma.layers.ops.core.tensors import no_autocast
from distdl_rma.layers.split.calls.autocast import ON_CPU, ON_DEVICES, castable, dtype_for
from distdl_rma.layers.split.calls.signatures import mapped, tensors_in
from distdl_rma.layers.split.calls.table import RULES, functions_named
from tests.fuzz.samples import drawn_samples, operations
from tests.layers.split.against_whole import check
from tests.layers.split.samples import is_usable, taken

pytestmark = pytest.mark.mpi
SHAPE = 1, 2, 3, 4


def ones(x, *shape):
    """A tensor of the type and on the device of another one."""
    return torch.ones(shape).to(x)


def long(x, *shape):
    """The same of single precision, whatever the other one has."""
    return torch.ones(shape).to(x.device)


FUNCTIONS = {
    "matmul": lambda x: x @ long(x, 4, 2),
    "matmul of rows": lambda x: long(x, 2, 3) @ x,
    "linear": lambda x: F.linear(x, long(x, 2, 4), long(x, 2)),
    "addmm": lambda x: torch.addmm(long(x, 2), x[0, 0], long(x, 4, 2)),
    "addmm in place": lambda x: x[0, 0, :, :2].clone().addmm_(x[0, 0], ones(x, 4, 2) / 3),
    "mv": lambda x: x[0, 0].mv(ones(x, 4)),
    "addmv": lambda x: torch.addmv(ones(x, 3), x[0, 0], ones(x, 4)),
    "baddbmm": lambda x: torch.baddbmm(long(x, 2, 1, 1), x[0], x[0].mT),
    "dot": lambda x: torch.dot(x.flatten(), x.flatten()),
    "inner": lambda x: torch.inner(x, ones(x, 2, 4)),
    "outer": lambda x: torch.outer(x[0, 0, :, 0], ones(x, 3)),
    "einsum": lambda x: torch.einsum("nchw,wo->ncho", x, ones(x, 4, 2)),
    "einsum over rows": lambda x: torch.einsum("nchw,ho->ncwo", x, ones(x, 3, 2)),
    "einsum of an element": lambda x: torch.einsum("nchw,no->ochw", x, ones(x, 1, 2)),
    "einsum of one": lambda x: torch.einsum("nchw->cw", x),
    "tensordot": lambda x: torch.tensordot(x, ones(x, 3, 4, 2), 2),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "convolution": lambda x: F.conv2d(x, long(x, 3, 2, 3, 3), long(x, 3), padding=1),
    "pool": lambda x: F.avg_pool2d(x, 2, 1),
    "largest": lambda x: F.max_pool2d(x, 2, 1),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "nearest": lambda x: F.interpolate(x, scale_factor=2),
    "area": lambda x: F.interpolate(x, size=(2, 2), mode="area"),
    "average of a volume": lambda x: F.avg_pool3d(x, 1),
    "largest of a volume": lambda x: F.max_pool3d(x, 2),
    "adaptive of a volume": lambda x: F.adaptive_avg_pool3d(x, 1),
    "adaptive largest of a volume": lambda x: F.adaptive_max_pool3d(x, 2),
    "nearest of a volume": lambda x: F.interpolate(x.unsqueeze(0), scale_factor=2),
    "replicated around a volume": lambda x: F.pad(x, (1, 1, 0, 0, 0, 0), mode="replicate"),
    "reflected": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "prelu": lambda x: F.prelu(x, long(x, 2)),
    "prod": lambda x: x.prod(2),
    "prod of a type": lambda x: x.prod(2, dtype=torch.bfloat16),
    "sum": lambda x: x.sum(2),
    "sum of all": lambda x: x.sum(),
    "sum of a type": lambda x: x.sum(2, dtype=torch.float64),
    "mean": lambda x: x.mean(2),
    "mean of all": lambda x: x.mean(),
    "variance": lambda x: x.var(2),
    "deviation": lambda x: x.std(),
    "largest of all": lambda x: x.amax(2) + x.max(),
    "quantile": lambda x: x.float().quantile(0.5, 2),
    "norm": lambda x: x.norm(),
    "norm of rows": lambda x: torch.linalg.vector_norm(x, dim=2),
    "normalised": lambda x: F.normalize(x, dim=2),
    "logsumexp": lambda x: x.logsumexp(2),
    "softmax": lambda x: x.softmax(2),
    "log softmax": lambda x: F.log_softmax(x, 2),
    "softmin": lambda x: F.softmin(x, 2),
    "cumsum": lambda x: x.cumsum(2),
    "cumprod": lambda x: x.cumprod(2),
    "logcumsumexp": lambda x: x.logcumsumexp(2),
    "transform": lambda x: torch.fft.rfft(x, dim=3).abs(),
    "exp": lambda x: x.exp(),
    "gelu": F.gelu,
    "power": lambda x: x**2,
    "cat": lambda x: torch.cat([x, long(x, *SHAPE)], 2),
    "cat of short ones": lambda x: torch.cat([x.bfloat16(), long(x, *SHAPE).bfloat16()], 2),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance norm": F.instance_norm,
    "group norm": lambda x: F.group_norm(x, 1),
    "layer norm": lambda x: F.layer_norm(x, (3, 4)),
    "root mean square": lambda x: F.rms_norm(x, (3, 4)),
    "response norm": lambda x: F.local_response_norm(x, 2),
    "response norm of a volume": lambda x: F.local_response_norm(x.unsqueeze(0), 2),
    "cross entropy": lambda x: F.cross_entropy(x, long(x, 1, 3, 4).long()),
    "mean of squares": lambda x: F.mse_loss(x, 0 * long(x, *SHAPE)),
    "logits": lambda x: F.binary_cross_entropy_with_logits(x, long(x, *SHAPE)),
    "distance": lambda x: torch.dist(x, ones(x, *SHAPE)),
    "similarity": lambda x: F.cosine_similarity(x, ones(x, *SHAPE), 2),
    "where": lambda x: x.where(x > 0.5, x.new_zeros(())),
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


# Of a matrix of three by three, in forms that torch's samples lack.
ON_GPUS = [
    lambda x: x.norm(),
    lambda x: x.sum(dtype=torch.float64),
    lambda x: x.sum(0, dtype=torch.float16),
    lambda x: x.addmv(x.select(0, 0), x.select(0, 0)),
    lambda x: F.scaled_dot_product_attention(*[x.view(1, 3, 3)] * 3),
]
# Torch checks the type that some norms are given, and takes the one of two types that is first.
EXCLUDED = {"norm", "masked.norm", "linalg.cross"}


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


def calls_of_rules_that_cast():
    """Names, functions and arguments, of torch's samples."""
    for op in operations():
        names = [each.name.rpartition(".")[2] for each in (op, *op.aliases)]
        casts = any(RULES[each].casts for name in names for each in functions_named(name) if each in RULES)
        if casts and op.name not in EXCLUDED and torch.float32 in op.supported_dtypes("cpu"):
            some = taken(lambda op=op: drawn_samples(op, torch.float32, False), 8)
            yield from ((op.name, op.op, *each) for each in [*filter(is_usable, some)][:2])
    yield from ((f"form {at}", function, (torch.ones(3, 3),), {}) for at, function in enumerate(ON_GPUS))


@pytest.mark.sizes(1)
@pytest.mark.filterwarnings("ignore")
def test_types_on_gpus_are_torchs():
    calls = [*calls_of_rules_that_cast()]
    assert len(calls) > 200
    with autocast_of_gpus(), FakeTensorMode():
        for (name, function, *given), kinds in product(
            calls, product([torch.float32, torch.float16], repeat=2)
        ):
            # The first tensor is of the one type, all others are of the other.
            others = chain(kinds, repeat(kinds[1]))

            def there(x, others=others):
                if not isinstance(x, torch.Tensor):
                    return x
                dtype = next(others) if x.is_floating_point() else x.dtype
                return torch.empty(x.shape, dtype=dtype, device="cuda")

            args, kwargs = tree_map(there, given)
            found = []
            for mode in (nullcontext(), AsRules()):
                try:
                    with mode:
                        found.append([each.dtype for each in tensors_in(function(*args, **kwargs))])
                except Exception as error:
                    found.append(type(error))
            assert found[0] == found[1], (name, kinds)
