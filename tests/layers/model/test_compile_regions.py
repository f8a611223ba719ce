"""Models compiled by Inductor against the same split models: equal to rounding, or replayed."""

from __future__ import annotations

import copy
import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from distdl_rma import UnsupportedError, capture, distribute, shard
from distdl_rma.layers.capture import regions
from tests.layers.model.test_compile import convs, square
from tests.layers.model.test_compile_checkpoints import deep

# On one rank norms are kernels of torch, and nothing lies between exchanges.
pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3), pytest.mark.in_turn(2, 3)]


@pytest.fixture(autouse=True)
def no_translations(monkeypatch):
    # Virtual ranks, and other tests of this process, have compiled the same regions.
    monkeypatch.setattr(regions, "_TRANSLATED", {})


class Changing(nn.Module):
    """Memory that is changed in place: of a region, of before it, and by a view of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.register_buffer("seen", torch.zeros(4, 1, 1))

    def forward(self, x):
        x = self.first(x)
        y = self.second(x)
        y += x * 2
        y = y.relu_() * 2
        part = y[:, 1:3]
        part.mul_(0.5)
        z = (y + 1).sigmoid() + x
        rows = z.flatten(2)
        rows.add_(rows.mean(2, keepdim=True)).mul_(1.5)
        self.seen.mul_(0.5).add_(1)
        z = self.norm(z * self.seen).add_(y)
        return F.leaky_relu_(self.second(z) * z.tanh(), 0.2), rows, part


class Grouped(nn.Module):
    """Norms of many forms, without weights, of large means, and of one element."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(
            [
                nn.GroupNorm(3, 6, affine=False),
                nn.InstanceNorm2d(6, eps=1e-3),
                nn.GroupNorm(6, 6),
                nn.BatchNorm2d(6),
            ]
        )

    def forward(self, x):
        for norm in self.norms:
            x = norm(x).tanh() * 1.25 + 1000
        return x - 1000


class Shared(nn.Module):
    """Operands of convolutions that others read too: a sum, a view, a change in place, the caller."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.wide = nn.Conv2d(4, 4, 5, padding=2)
        self.strided = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.dilated = nn.Conv2d(4, 2, 3, padding=2, dilation=2)

    def forward(self, x):
        a = self.first(x * 2 + 1).sigmoid() * 2
        b = self.second(a) + self.wide(a) * a
        c = F.relu_(b + 1)
        d = self.strided(c).tanh() + c[:, :, ::2, ::2].sin()
        e = self.second(d * d).square() + d
        f = self.dilated(e) + e.flatten(2).mean(2, keepdim=True)[..., None].narrow(1, 0, 2)
        g = f.sin() + 1
        h = self.wide(torch.cat([g, g], 1).tanh() * 3).sin() * 0.1
        g *= 0.5
        return h, g.tanh() * 0.1, e.sin() * 0.1


def norms(dims, norm):
    """Two blocks, of which the first activation is in place."""
    return nn.Sequential(convs(dims, norm), nn.BatchNorm2d(2) if dims == 2 else nn.Identity(), nn.SiLU())


MODELS = {
    "signal": (lambda: norms(1, nn.BatchNorm1d(4)), lambda: torch.rand(3, 1, 24), {"W": -1}),
    "image": (lambda: norms(2, nn.GroupNorm(2, 4)), lambda: torch.rand(2, 1, 9, 10), {"H": -1}),
    "more ranks than rows": (lambda: norms(2, nn.BatchNorm2d(4)), lambda: torch.rand(2, 1, 2, 10), {"H": -1}),
    "an idle rank": (
        lambda: nn.Sequential(nn.BatchNorm2d(2), nn.GELU()),
        lambda: torch.rand(1, 2, 6, 6),
        {"N": -1},
    ),
    "volume": (
        lambda: norms(3, nn.InstanceNorm3d(4, affine=True, track_running_stats=True)),
        lambda: torch.rand(1, 1, 6, 6, 5),
        {"D": -1},
    ),
    "channels": (
        lambda: nn.Sequential(nn.GroupNorm(2, 6), nn.ReLU()),
        lambda: torch.rand(2, 6, 4, 4),
        {"C": -1},
    ),
    "norms": (Grouped, lambda: torch.rand(2, 6, 6, 5) + 50, {"H": -1}),
    "operands of several": (Shared, lambda: torch.rand(2, 1, 11, 14), {"W": -1}),
    "checkpoints": (lambda: deep()[:2], lambda: torch.rand(2, 1, 12, 8), {"H": -1}),
    "in place": (Changing, lambda: torch.rand(2, 1, 12, 8), {"H": -1}),
}


def steps(model, function, make, dtype, number=3):
    """Results, buffers and gradients of all steps of a training."""
    found, optimizer = [], torch.optim.SGD(model.parameters(), 0.05)
    for at in range(number):
        torch.manual_seed(at)
        optimizer.zero_grad()
        y = function(make().to(dtype))
        ys = y if isinstance(y, tuple) else (y,)
        sum(map(square, ys)).backward()
        found += [x.clone() for x in (*[y.to_local() for y in ys], *model.buffers())]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
    return found


def close(found, true, rtol, atol):
    """Whether all tensors are equal to rounding."""
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one, other, rtol=rtol, atol=atol)


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_split_model(P_world, comm, name):
    made, make, grid = MODELS[name]
    torch.manual_seed(5)
    alone = made()
    split, compiled = (distribute(copy.deepcopy(alone), grid) for _ in range(2))
    compiled.compile()
    true = steps(split, split, make, torch.float32)
    # Of elements of 1000, the fourth digit behind the point is rounded.
    rtol, atol = (2e-3, 2e-4) if name == "norms" else (1e-4, 1e-5)
    close(steps(compiled, compiled, make, torch.float32), true, rtol, atol)
    kinds = compiled._compiled_call_impl.kinds
    assert [kind.known for kind in kinds] == [True]
    # Norms whose channels are cut are operations, and an idle rank has no elements.
    fused = name != "channels" and (name != "an idle rank" or comm.rank == 0)
    assert (kinds[0].captured.program.regions >= 2) == fused


def pair(make):
    """The same model twice, split."""
    torch.manual_seed(5)
    alone = make()
    return [distribute(copy.deepcopy(alone), {"H": -1}) for _ in range(2)]


def test_a_step_with_its_loss_under_autocast(P_world):
    split, compiled = pair(lambda: nn.Sequential(norms(2, nn.GroupNorm(2, 4)), nn.Dropout(0.3)))

    def loss(model, x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.l1_loss(model(x), torch.cat([x, x * 0.5], 1))

    step, make = capture(lambda x: loss(compiled, x)), lambda: torch.rand(2, 1, 8, 6)
    one = steps(split, partial(loss, split), make, torch.float32)
    close(steps(compiled, step, make, torch.float32), one, 0.05, 0.02)
    assert step.kinds[0].known and step.kinds[0].captured.program.regions


@pytest.mark.parametrize("ranks", [{0, 1, 2}, {1}])
def test_without_a_compiler_calls_are_replayed(P_world, comm, monkeypatch, ranks):
    split, compiled = pair(lambda: norms(2, nn.GroupNorm(2, 4)))
    if comm.rank in ranks:

        def missing(*_):
            raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found\nand more")

        monkeypatch.setattr(regions, "_translated", missing)
    compiled.compile()
    make = lambda: torch.rand(2, 1, 9, 6)  # noqa: E731
    with pytest.warns(
        UserWarning, match=r"rank \d: RuntimeError: InvalidCxxCompiler: No working C\+\+ compiler found"
    ):
        found = steps(compiled, compiled, make, torch.float32)
    close(found, steps(split, split, make, torch.float32), 0, 0)
    assert compiled._compiled_call_impl.kinds[0].known and not compiled._compiled_call_impl.fuses


def test_a_first_gradient_of_elements_in_one_place(P_world):
    """The gradient of a sum has strides of zero, those behind it have not."""
    split, compiled = pair(lambda: nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Sigmoid(), nn.Tanh()))
    compiled.compile()
    last = (lambda y: y.sum(3).square().sum(), lambda y: (y.transpose(2, 3) * 2).sum(), square)
    for at, loss in enumerate((*[torch.Tensor.sum] * 3, *last, lambda y: y[..., ::2].sum())):
        found = list[list[torch.Tensor]]()
        for model in (split, compiled):
            model.zero_grad()
            loss(model(torch.rand(2, 1, 8, 6, generator=torch.Generator().manual_seed(at)))).backward()
            found += [[p.grad.clone() for p in model.parameters()]]
        close(*found, 1e-4, 1e-4)


@pytest.mark.sizes(2)
@pytest.mark.processes
def test_the_latest_regions_are_kept(P_world, monkeypatch):
    monkeypatch.setattr(regions, "_TRANSLATED", {})
    monkeypatch.setattr(regions, "_LATEST", 1)
    more = nn.Conv2d(2, 1, 1), nn.Sigmoid()
    split, compiled = pair(lambda: nn.Sequential(convs(2, nn.GroupNorm(2, 4)), *more))
    compiled.compile()
    make = lambda: torch.rand(2, 1, 9, 6)  # noqa: E731
    found = steps(compiled, compiled, make, torch.float32)
    close(found, steps(split, split, make, torch.float32), 1e-4, 1e-4)
    assert len(regions._TRANSLATED) == 1


@pytest.mark.parametrize("which", ["result", "gradient"])
def test_a_region_that_differs_is_found(P_world, comm, monkeypatch, which):
    _, compiled = pair(lambda: convs(2, nn.GroupNorm(2, 4)))
    true, number = regions._translated, [0]

    def wrong(*given):
        code, number[0] = true(*given), number[0] + 1
        # The backward is compiled first: its last region, or the last one of the forward.
        if comm.rank == 1 and number[0] == (1 if which == "gradient" else 3):
            return lambda *some: [x * 1.01 for x in code(*some)]
        return code

    monkeypatch.setattr(regions, "_translated", wrong)
    compiled.compile()
    with pytest.raises(
        UnsupportedError, match=f"rank 1: .*{which}.* of a replay differs from the split model's"
    ):
        square(compiled(torch.rand(1, 1, 8, 6))).backward()


def test_a_region_is_what_its_steps_are(P_world):
    """Memory of before a region keeps its values for those who need them."""

    class Kept(nn.Module):
        def forward(self, x):
            y = x.flip(3)
            z = y.sin() * 2
            y.add_(z)
            w = x.flip(2)
            v = w.cos() + w
            w.mul_(v).add_(1)
            a = x.roll(1, 2)
            part, b = a[:, :1], a * 2 + 1
            c = b.mean((2, 3), keepdim=True)
            a.add_(1)
            return y, z + 1, w.roll(1, 3), v.square() - v, (b - c) * 2, part.exp() + c, x.clone().add_(1)

    model = distribute(Kept(), {"H": -1})
    model.compile()
    x = shard({"H": -1}, torch.rand(2, 2, 9, 4, dtype=torch.float64))
    for _ in range(2):
        with torch.no_grad():
            close([y.to_local() for y in model(x)], [y.to_local() for y in model.forward(x)], 1e-12, 0)
    assert model._compiled_call_impl.kinds[0].captured.program.regions


def test_values_are_of_memory_as_it_was(P_world):
    """Memory is changed between two regions that read it."""

    class Changed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)

        def forward(self, x):
            y = self.conv(x) * 2
            a = y + 1
            y.relu_()
            z = self.conv(y)
            b = z + 0.5
            w = self.conv(z * 2)
            z[:, :1] = 0
            return self.conv(w) * 2 + a, (w - b).sigmoid()

    split, compiled = pair(lambda: Changed().double())
    compiled.compile()
    make = lambda: torch.rand(2, 2, 6, 5)  # noqa: E731
    true = steps(split, split, make, torch.float64)
    close(steps(compiled, compiled, make, torch.float64), true, 1e-9, 1e-10)
    x = shard({"H": -1}, make().double())
    with torch.no_grad():
        close([y.to_local() for y in compiled(x)], [y.to_local() for y in compiled.forward(x)], 1e-12, 0)


@pytest.mark.parametrize(("dtype", "large", "atol"), [(torch.float64, 1e7, 1e-7), (torch.float32, 1e6, 2e-6)])
@pytest.mark.parametrize("make_norm", [partial(nn.GroupNorm, 2), nn.BatchNorm2d, nn.InstanceNorm2d])
def test_a_large_mean_hides_no_deviation(P_world, make_norm, dtype, large, atol):
    split, compiled = pair(lambda: nn.Sequential(make_norm(4), nn.Tanh(), nn.Conv2d(4, 2, 1)).to(dtype))
    compiled.compile()
    found = []
    for model in (split, compiled):
        means = iter([0.0, 0.0, large, large])

        def make(means=means):
            return torch.rand(2, 4, 6, 5, dtype=dtype) + next(means)

        found.append(steps(model, model, make, dtype, 4))
    close(*found, atol, atol)


def test_a_compiler_that_cannot_be_loaded_is_named(P_world, monkeypatch):
    _, compiled = pair(lambda: convs(2, nn.GroupNorm(2, 4)))
    compiled.compile()
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    with pytest.raises(UnsupportedError, match=r"rank 0: torch cannot load its compiler: .*_dynamo"):
        compiled(torch.rand(1, 1, 8, 6))


def test_sums_of_many_elements(P_world):
    _, compiled = pair(nn.Identity)
    step = capture(lambda x: (compiled(x) * 0.5).mean())
    x = shard({"H": -1}, torch.full((1, 1, 4096, 1024), 0.1))
    for _ in range(3):
        assert abs(step(x).full_tensor().item() - 0.05) < 1e-8
    assert step.kinds[0].captured.program.regions
