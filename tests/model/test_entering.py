"""Where modules of a distributed model say that their functions are called."""

import sys

import pytest
import torch
from torch import nn

from distdl_rma import distribute
from distdl_rma.model.calls import Calls

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2, 3)]


def test_torchs_modules_call_where_the_user_calls_the_outermost_and_hooks_where_they_are(
    P_world, x, monkeypatch
):
    ways, end = [], Calls.end

    def noted(calls, trail):
        ways.append([step.place.where for step in trail.steps])
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
