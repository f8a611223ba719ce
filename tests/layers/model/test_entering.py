"""Where modules of a distributed model say that their functions are called, and their backward hooks."""

import sys
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_module

from distdl_rma import UnsupportedError, distribute
from distdl_rma.layers.checks.model_calls import Calls
from tests.layers.model.training import whole

pytestmark = pytest.mark.mpi(min_size=2)


def test_torchs_modules_call_where_the_user_calls_the_outermost_and_hooks_where_they_are(
    P_world, x, monkeypatch
):
    ways, end = [], Calls.end

    def noted(calls, trail):
        ways.append([step.place.location for step in trail.steps])
        end(calls, trail)

    monkeypatch.setattr(Calls, "end", noted)
    parts = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Sigmoid()), nn.Conv2d(1, 1, 3), nn.ReLU())
    parts[2].register_forward_hook(lambda module, given, y: torch.abs(y))
    model = distribute(parts, {"H": -1})
    for _ in range(2):
        model(x)
    model(x)
    model.distributed.close()
    line = sys._getframe().f_code.co_firstlineno
    hook, loop, last = (f"test_entering.py:{line + n}" for n in (11, 14, 15))
    assert ways == [[at, at, at, at, hook, at] for at in (loop, loop, last)]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
        self.body = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Sigmoid())

    def forward(self, x):
        return x + self.body(torch.tanh(self.norm(self.first(x)))), x.mean()


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift, self.blocks = nn.Conv2d(1, 2, 3, padding=1), nn.ModuleList([Residual(), Residual()])
        self.last = nn.Linear(2 * 7 * 6, 3)

    def forward(self, x):
        x, sums = self.lift(x), 0
        for block in self.blocks:
            x, mean = block(x)
            sums = sums + mean
        return self.last(x.flatten(1)) * sums


@pytest.mark.parametrize("needs", [True, False])
@pytest.mark.parametrize("every", [True, False])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.processes
def test_backward_hooks_of_modules_see_and_change_gradients_of_whole_tensors(P_world, needs, every):
    x, seen = torch.randn(2, 1, 7, 6, dtype=torch.float64), []

    def noted(name, gradients):
        seen.append(name)
        seen.extend([None if g is None else whole(g).detach().clone() for g in gradients])

    def hook(name, _module, given, found):
        noted(name, (*given, *found))
        return tuple(None if g is None else g.clamp(-0.01, 0.01) for g in given)

    def before(name, _module, found):
        noted(f"before {name}", found)
        return tuple(None if g is None else g * 1.5 for g in found)

    ends = []
    for split in (False, True):
        torch.manual_seed(0)
        model, handles = Hooked().double(), []
        if split:
            model = distribute(model, {"H": -1})
        if every:
            handles = [
                torch_module.register_module_full_backward_hook(partial(hook, "any")),
                torch_module.register_module_full_backward_pre_hook(partial(before, "any")),
            ]
        for name, module in [] if every else model.named_modules():
            module.register_full_backward_hook(partial(hook, name))
            module.register_full_backward_pre_hook(partial(before, name))
        given = x.clone().requires_grad_(needs)
        for _ in range(2):
            model(given).square().mean().backward()
        with torch.no_grad():
            model(given)
        for handle in handles:
            handle.remove()
        ends.append([*seen, *[p.grad for p in model.parameters()], whole(given.grad)])
        seen.clear()
    assert len(ends[0]) > 40
    for expected, found in zip(*ends, strict=True):
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)
        else:
            assert found == expected


def test_backward_hooks_that_see_a_part_of_a_gradient_are_refused(P_world):
    class Embedded(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.conv = nn.Embedding(3, 6), nn.Conv2d(1, 1, 3, padding=1)

        def forward(self, x):
            return self.conv(x) + self.words(torch.tensor(1))

    x = torch.randn(2, 1, 7, 6)
    for name, register, what in (
        ("words", "register_full_backward_hook", "gradient of a plain tensor"),
        ("words", "register_full_backward_pre_hook", "gradient of a plain tensor"),
        ("conv", "register_backward_hook", "call register_full_backward_hook"),
    ):
        model = distribute(Embedded(), {"H": -1})
        getattr(getattr(model, name), register)(lambda *_: None)
        with pytest.raises(UnsupportedError, match=f"{name}.*{what}"):
            model(x)
        with torch.no_grad():
            model(x)
        model.distributed.close()
