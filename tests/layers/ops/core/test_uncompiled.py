"""Models under torch.compile: a break of the graph at each distributed layer, and the same numbers."""

import os
import shutil
import subprocess
import sys

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync, layers
from distdl_rma.layers import (
    DistributedConcat,
    DistributedConv2d,
    DistributedConvTranspose2d,
    DistributedInstanceNorm2d,
    DistributedMaxPool2d,
    DistributedMSELoss,
    Repartition,
)
from tests.layers.partitioned.every_layer import OTHERS, rows

# What torch says when it compiles, of itself.
pytestmark = pytest.mark.filterwarnings("ignore")


class UNet(nn.Module):
    """Two levels, with a skip connection, between plain layers of torch that have parameters of their own."""

    def __init__(self, P_x):
        super().__init__()
        self.first = nn.Sequential(
            nn.Conv2d(1, 4, 1), DistributedConv2d(P_x, 4, 4, 3, padding=1), DistributedInstanceNorm2d(P_x, 4)
        )
        self.down = DistributedMaxPool2d(P_x, 2)
        self.below = DistributedConv2d(P_x, 4, 8, 3, padding=1)
        self.up = DistributedConvTranspose2d(P_x, 8, 4, 2, stride=2)
        self.join = DistributedConcat([P_x, P_x])
        self.last = DistributedConv2d(P_x, 8, 1, 3, padding=1)
        self.stay = Repartition(P_x, P_x)

    def forward(self, x):
        high = nn.functional.gelu(self.first(x))
        low = self.below(self.down(high))
        return torch.sigmoid(self.last(self.join(high, self.up(low)))) + self.stay(x)


@pytest.fixture
def compiler(comm, tmp_path, monkeypatch):
    """Start afresh, and leave nothing behind; what one rank has compiled, the others find."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(comm.bcast(tmp_path)))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()
    yield torch.compile
    torch.compiler.reset()


def learned(P_world, compile_model, compile_step=lambda step: step):
    """Losses of some steps, and what the parameters are then."""
    P_x = rows(P_world)
    torch.manual_seed(6)
    model, loss_of = UNet(P_x), DistributedMSELoss(P_x)
    x = torch.rand(1, 1, 4, 6)
    with GradientSync(model, P_world) as sync:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        network = compile_model(model)

        def step(x):
            loss = loss_of(network(x), torch.zeros_like(x))
            loss.backward()
            sync.clip_grad_norm_(1.0)
            return loss

        step, losses = compile_step(step), []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(step(x).item())
            optimizer.step()
    return [torch.tensor(losses), *(p.detach().clone() for p in model.parameters())]


@pytest.mark.mpi
@pytest.mark.timeout(200)
@pytest.mark.parametrize("way", ["model", "step", "generated code"])
def test_what_is_compiled_learns_as_without(P_world, comm, compiler, way):
    if way == "generated code":
        if comm.size != 2:
            pytest.skip("generating code takes long: on two ranks only")
        if shutil.which(os.environ.get("CXX", "g++")) is None:
            pytest.skip("torch's inductor needs a C++ compiler")
        found = learned(P_world, lambda model: compiler(model, backend="inductor"))
    elif way == "step":
        found = learned(P_world, lambda model: model, lambda step: compiler(step, backend="eager"))
    else:
        found = learned(P_world, lambda model: compiler(model, backend="eager"))
    rtol, atol = (1e-4, 1e-5) if way == "generated code" else (0, 0)
    torch.testing.assert_close(found, learned(P_world, lambda model: model), rtol=rtol, atol=atol)


def test_every_way_into_a_layer_is_a_break():
    for name in set(layers.__all__) - OTHERS:
        kind = getattr(layers, name)
        for entry in (kind.__call__, getattr(kind, "connect", kind.__call__)):
            assert getattr(entry, "_torchdynamo_disable", False), f"{name}.{entry.__name__}"


@pytest.mark.mpi
def test_one_graph_of_everything_is_refused_before_anything_is_sent(P_world, compiler):
    P_x, x = rows(P_world), torch.rand(1, 4, 6, 6)
    layer = DistributedConv2d(P_x, 4, 4, 3, padding=1)
    with pytest.raises(Exception, match="exchange data with other ranks") as caught:
        compiler(nn.Sequential(layer, nn.GELU()), backend="eager", fullgraph=True)(x)
    assert type(caught.value).__module__.startswith("torch._dynamo")
    assert layer(x).shape == x.shape


_WITHOUT_COMPILER = """
import sys, torch
from mpi4py import MPI
from distdl_rma import MPIPartition
from distdl_rma.layers import DistributedConv1d
P_x = MPIPartition(MPI.COMM_WORLD).create_cartesian_topology_partition((1, 1, 1))
DistributedConv1d(P_x, 1, 1, 1)(torch.ones(1, 1, 2)).sum().backward()
assert "torch._dynamo" not in sys.modules
"""


def test_calls_do_not_import_the_compiler():
    script = [sys.executable, "-c", _WITHOUT_COMPILER]
    done = subprocess.run(script, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.mpi
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile", "fail_on_recompile"])
@pytest.mark.processes
def test_a_stance_of_the_compiler_changes_nothing(P_world, compiler, stance):
    layer, x = DistributedConv2d(rows(P_world), 4, 4, 3, padding=1), torch.rand(1, 4, 6, 6)
    model = nn.Sequential(layer, nn.GELU())
    expected, compiled = model(x), compiler(model, backend="eager")
    assert torch.equal(compiled(x), expected)
    with torch.compiler.set_stance(stance):
        y = compiled(x)
        y.sum().backward()
    assert torch.equal(y, expected)
