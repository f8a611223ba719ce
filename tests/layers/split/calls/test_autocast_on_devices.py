"""Autocast of a device: split tensors have the types and numbers of plain ones, converted as on a GPU.

The device made of Python has no autocast of its own. It gets kernels here, one for each function that torch
converts on GPUs, by our lists, which ``test_autocast.py`` compares with torch's.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_map

from distdl_rma import UnsupportedError, distribute, shard
from distdl_rma.layers import staging
from distdl_rma.layers.split.calls.autocast import ON_DEVICES, castable, dtype_for
from tests.fake_device import NAME, needs_fake_device, register
from tests.layers.split.calls.test_autocast import FUNCTIONS

pytestmark = [
    pytest.mark.mpi,
    needs_fake_device,
    # Of torch's own kernel of a squared error on a device made of Python.
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]
# Functions of ATen within functions of Python in the lists.
LONGER = ("upsample", "_upsample", "nll_loss2d", "frobenius_norm", "nuclear_norm", "native_layer_norm")
KERNELS = []


def converting(op):
    """The kernel of a function of ATen under autocast: converts, and calls it without autocast."""
    name = op.overloadpacket.__name__
    name = "logsumexp" if name.startswith(LONGER) else name

    def kernel(*args, **kwargs):
        given, tensors = (args, kwargs), []
        tree_map(lambda x: tensors.append(x) if isinstance(x, torch.Tensor) and castable(x) else None, given)
        dtype = dtype_for(name, tensors, NAME)

        def cast(x):
            there = isinstance(x, torch.Tensor) and x.device.type == NAME and castable(x)
            return x.to(dtype) if there and dtype is not None else x

        with torch._C._DisableAutocast():
            args, kwargs = tree_map(cast, given)
            return op(*args, **kwargs)

    return kernel


@pytest.fixture
def device(monkeypatch):
    device = register()
    monkeypatch.setattr(staging, "ASYNCHRONOUS", {NAME})
    monkeypatch.setattr(staging, "AUTOCASTING", [*staging.AUTOCASTING, NAME])
    if not KERNELS:
        library, known = torch.library.Library("aten", "IMPL"), frozenset().union(*ON_DEVICES)
        for name in torch._C._dispatch_get_all_op_names():
            base, _, overload = name.removeprefix("aten::").partition(".")
            listed = base in known or base.startswith(LONGER)
            if listed and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA"):
                op = getattr(getattr(torch.ops.aten, base), overload or "default")
                library.impl(name.removeprefix("aten::"), converting(op), "AutocastPrivateUse1")
        KERNELS.append(library)
    return device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
# The device has kernels of the host, which transforms no short numbers.
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "transform"])
def test_types_and_numbers_are_those_of_plain_tensors(P_world, device, name, dtype):
    whole = ((torch.arange(24.0).view(1, 2, 3, 4) + 1) / 24).to(dtype).to(device).requires_grad_()
    x = shard({"H": -1}, whole.detach()).requires_grad_()
    with torch.autocast(NAME, torch.bfloat16):
        try:
            expected = FUNCTIONS[name](whole)
        except NotImplementedError as error:
            pytest.skip(f"{error}: on the host, whose kernels the device has")
        y = FUNCTIONS[name](x)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y.full_tensor().cpu(), expected.detach().cpu(), atol=2e-2, rtol=2e-2)
    for each in (y, expected):
        each.float().pow(3).sum().backward()
    assert x.grad.dtype == dtype
    # Gradients of norms are small differences of large terms in a short type.
    atol = 0.4 if name.endswith(" norm") and dtype == torch.bfloat16 else 4e-2
    torch.testing.assert_close(x.grad.full_tensor().cpu(), whole.grad.cpu(), atol=atol, rtol=4e-2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.low, self.scaled = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.last = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        y = self.norm(self.first(x)).relu()
        low = self.scaled(self.low(F.max_pool2d(y, 2)))
        return self.last(torch.cat([y, F.interpolate(low, scale_factor=2, mode="bilinear")], 1))


def test_a_model_trains_under_autocast_as_one_process_does(P_world, device):
    torch.manual_seed(1)
    alone = Net()
    split, alone = distribute(copy.deepcopy(alone).to(device), {"H": -1}), alone.to(device)
    for _ in range(2):
        x, wanted = (torch.rand(2, 1, 12, 8).to(device) for _ in range(2))
        for model in (alone, split):
            model.zero_grad()
            with torch.autocast(NAME, torch.bfloat16):
                y = model(x)
                loss = F.mse_loss(y, wanted)
            assert (y.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
            loss.backward()
        for p, other in zip(split.parameters(), alone.parameters(), strict=True):
            assert p.grad.dtype == torch.float32
            torch.testing.assert_close(p.grad.cpu(), other.grad.cpu(), atol=2e-2, rtol=5e-2)
    split.distributed.close()


def test_autocast_of_other_devices_is_refused(P_world, device, monkeypatch):
    monkeypatch.setattr(staging, "AUTOCASTING", ["cpu", "cuda"])
    split = distribute(nn.Conv2d(1, 1, 3, padding=1).to(device), {"H": -1})
    with torch.autocast(NAME, torch.bfloat16), pytest.raises(UnsupportedError, match="cpu, cuda have it"):
        split(torch.rand(1, 1, 12, 4).to(device))
    split.distributed.close()
