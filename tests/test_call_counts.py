"""What a call of a split tensor calls in a loop that runs: these figures do not grow."""

from __future__ import annotations

import time

import pytest

from distdl_rma import Machine
from distdl_rma.layers.split import layout
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN
from tests.call_counts import (
    LAYERS,
    Calls,
    modules,
    most,
    of_a_layer,
    of_a_model,
    of_a_module,
    profiles,
    steps,
)

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.sizes(2)]
# Of Python and of C, forward and backward; by Python 3.11 and torch 2.13.
MOST = {
    "convolution": (Calls(46, 52), Calls(27, 32)),
    "convolution of 512x512": (Calls(49, 56), Calls(31, 38)),
    "instance norm": (Calls(50, 53), Calls(32, 30)),
    "batch norm": (Calls(55, 63), Calls(32, 30)),
    "max pool 2x2": (Calls(41, 38), Calls(0, 0)),
    "max pool 3x3": (Calls(71, 68), Calls(31, 34)),
    "linear": (Calls(41, 31), Calls(0, 0)),
    "relu": (Calls(10, 17), Calls(0, 0)),
    "mse loss": (Calls(115, 136), Calls(4, 4)),
}
# What another module adds to a call of a distributed model, torch's own calls of modules included.
MOST_OF_MODULES = {
    "module: convolution": (Calls(76, 108), Calls(39, 46)),
    "module: instance norm": (Calls(84, 94), Calls(44, 44)),
    "module: batch norm": (Calls(83, 116), Calls(44, 44)),
    "module: max pool 3x3": (Calls(97, 101), Calls(32, 37)),
    "module: linear": (Calls(58, 61), Calls(12, 14)),
    "module: relu": (Calls(29, 42), Calls(0, 0)),
}
# Begin and end of a call, a convolution of 1x1, and what every backward takes.
MOST_OF_A_MODEL = Calls(158, 176), Calls(75, 68)

# Of layers that take plain shards, whose ranks agree on the shapes of each call.
MOST_OF_LAYERS = {
    "DistributedConv2d": (Calls(72, 80), Calls(77, 93)),
    "DistributedMaxPool2d": (Calls(69, 68), Calls(50, 67)),
    "DistributedUpsample": (Calls(41, 44), Calls(19, 33)),
    "DistributedGroupNorm": (Calls(79, 86), Calls(82, 92)),
    "DistributedBatchNorm2d": (Calls(90, 91), Calls(82, 90)),
    "DistributedMSELoss": (Calls(166, 186), Calls(19, 25)),
}


def forget_other_tests(monkeypatch):
    # Their models are still there, and some of their layouts left out ranks.
    monkeypatch.setattr(LOSS_ORIGIN, "on", [])
    monkeypatch.setattr(layout, "LEAVING_OUT", [])


def test_a_call_takes_no_more_calls_than_it_did(P_world, comm, monkeypatch):
    forget_other_tests(monkeypatch)
    for name, call in steps(Machine.of(P_world)):
        found = [most(profile) for profile in profiles(call)]
        within = [calls.within(limit) for calls, limit in zip(found, MOST[name], strict=True)]
        assert all(within), f"{name}: forward {found[0]}, backward {found[1]}"


def test_a_module_of_a_distributed_model_takes_no_more_calls_than_it_did(P_world, comm, monkeypatch):
    forget_other_tests(monkeypatch)
    machine = Machine.of(P_world)
    counted = [(name, of_a_module(machine, make), MOST_OF_MODULES[name]) for name, make in modules()]
    for name, found, limits in (*counted, ("model", of_a_model(machine, []), MOST_OF_A_MODEL)):
        ahead, back = map(most, found)
        within = ahead.within(limits[0]) and back.within(limits[1])
        assert within, f"{name}: forward {ahead}, backward {back}"


def test_a_layer_takes_no_more_calls_than_it_did(P_world, comm, monkeypatch):
    forget_other_tests(monkeypatch)
    machine = Machine.of(P_world)
    for name, limits in MOST_OF_LAYERS.items():
        ahead, back = map(most, of_a_layer(machine, name, *LAYERS[name]))
        assert ahead.within(limits[0]) and back.within(limits[1]), f"{name}: forward {ahead}, backward {back}"


def test_waiting_is_not_counted(P_world, comm):
    (_, call), *_ = steps(Machine.of(P_world))

    def figures(late):
        def called():
            time.sleep(2e-3 * (comm.rank == late))
            return call()

        return [most(profile) for profile in profiles(called)]

    assert figures(late=0) == figures(late=1)
