"""Calls without gradients leave nothing behind that training cannot use, and the other way round."""

import copy

import pytest
import torch
from torch import nn

from distdl_rma import GradientSync
from distdl_rma.layers import DistributedBatchNorm2d, DistributedConv2d, DistributedUpsample
from tests.layers.partitioned.every_layer import EVERY_LAYER, local, rows

pytestmark = pytest.mark.mpi


def train(layer, inputs):
    """Output of a step, and the gradients of input and parameters."""
    inputs = [x.detach().clone() for x in inputs]
    inputs[0].requires_grad_(inputs[0].is_floating_point())
    layer.zero_grad()
    y = layer(*inputs)
    if y.requires_grad:
        (y * y).sum().backward()
    return [y.detach(), inputs[0].grad, *(parameter.grad for parameter in layer.parameters())]


def same(found, expected, name):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=f"{name}: {{}}".format)


def test_every_layer_trains_and_is_evaluated_in_any_order(P_world):
    for name, make in EVERY_LAYER.items():
        for first, second in ((torch.inference_mode, torch.no_grad), (torch.no_grad, torch.inference_mode)):
            layer, inputs = make(P_world)
            expected = train(copy.deepcopy(layer), inputs)
            for mode in (first, second):
                with mode():
                    y = layer(*inputs)
                same([y, *train(layer, inputs)], [expected[0], *expected], name)


def test_every_layer_built_in_inference_mode_trains(P_world):
    for name, make in EVERY_LAYER.items():
        torch.manual_seed(5)
        twin, inputs = make(P_world)
        torch.manual_seed(5)
        with torch.inference_mode():
            layer, _ = make(P_world)
        assert not any(tensor.is_inference() for tensor in (*layer.parameters(), *layer.buffers())), name
        same(train(layer, inputs), train(twin, inputs), name)


def test_a_model_validated_before_and_between_its_steps_learns_as_without(P_world):
    P_x, x, learned = rows(P_world), local(), []
    for validates in (False, True):
        torch.manual_seed(2)
        net = nn.Sequential(
            DistributedConv2d(P_x, 4, 4, 3, padding=1),
            DistributedBatchNorm2d(P_x, 4),
            DistributedUpsample(P_x, scale_factor=2, mode="bilinear"),
        )
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with GradientSync(net, P_world):
            for _ in range(3):
                if validates:
                    with torch.inference_mode():
                        net.eval()(x)
                optimizer.zero_grad()
                net.train()(x).square().sum().backward()
                optimizer.step()
        learned.append([tensor.detach().clone() for tensor in (*net.parameters(), *net.buffers())])
    same(*learned, "model")


def test_running_statistics_change_in_inference_mode_as_in_training(P_world):
    layer = DistributedBatchNorm2d(rows(P_world), 4)
    twin, x = copy.deepcopy(layer), local()
    with torch.inference_mode():
        layer(x)
    twin(x)
    assert torch.equal(layer.running_mean, twin.running_mean)
    layer(x)
    twin(x)
    assert torch.equal(layer.running_var, twin.running_var)
    assert int(layer.num_batches_tracked) == 2
