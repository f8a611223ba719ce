"""A layer on a grid is torch's layer: the same numbers, gradients and states, whatever is done with it."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from distdl_rma import GradientSync, UnsupportedError, gather_state_dict, load_global_state_dict
from tests.layers.partitioned.same_error import MORE_FAULTS, same_error
from tests.layers.partitioned.sequential import agree
from tests.layers.partitioned.twins import FLOATING, FORMS, WEIGHTED, Twins

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")]
# Four ranks make a grid of two by two.
SQUARE = {
    form: [pytest.mark.sizes(2, 3, 4)] for form in ("channel", "general", "transposed general", "linear")
}
each_form = pytest.mark.parametrize(
    "form", [pytest.param(form, marks=SQUARE.get(form, [])) for form in FORMS], ids=FORMS
)


@each_form
def test_steps_of_any_shapes_equal_torchs(P_world, form):
    twins = Twins(P_world, form)
    for key, value in vars(twins.twin).items():
        # Upsample of torch is called by its class.
        assert key.startswith("_") or key == "name" or getattr(twins.layer, key) == value, key
    for shape in twins.shapes():
        x = twins.draw(shape)
        twins.step(x)
        with torch.no_grad():
            agree(twins.layer(twins.into(x)), twins.out(twins.twin(x)), "without gradients")
    x = twins.draw()
    with GradientSync(nn.Sequential(twins.layer), P_world):
        twins.step(x)
    twins.layer.eval(), twins.twin.eval()
    twins.step(x)


@each_form
def test_every_way_of_autograd(P_world, form):
    twins, relu = Twins(P_world, form), nn.ReLU(inplace=True)
    ours, theirs = zip(*(twins.leaves(twins.draw()) for _ in range(2)), strict=True)
    again = False
    for net, (a, b) in ((twins.twin, theirs), (twins.layer, ours)):

        def active(x, net=net):
            return relu(net(relu(x * 1)))

        first, second = active(a), checkpoint(active, b, use_reentrant=False)
        loss = first.square().sum() + (first * second).sum()
        again = again or (net is twins.twin and first.shape == a.shape and twins.P_x == twins.P_y)
        if again:
            loss = loss + net(first * 1).square().sum()
        if not loss.requires_grad:
            continue
        loss.backward(retain_graph=True)
        first.sum().backward()
        active(b).square().sum().backward()
    twins.compare(*zip(ours, theirs, strict=True))


@pytest.mark.mpi(min_size=2)
@pytest.mark.in_turn(3)
@each_form
def test_a_fault_on_one_rank_is_refused_on_all_and_leaves_no_trace(P_world, comm, form):
    twins = Twins(P_world, form, name="it")
    layer, x = twins.layer, twins.into(twins.draw())
    before = layer(x).detach()
    state = {key: value.clone() for key, value in layer.state_dict().items()}
    for at, fault in enumerate(MORE_FAULTS.values()):
        culprit = at % comm.size
        wrong = fault(x) if comm.rank == culprit else x
        text = same_error(comm, lambda wrong=wrong: layer(wrong))
        assert text.startswith("'it': ") and f"rank {culprit}" in text
    assert all(torch.equal(state[key], value) for key, value in layer.state_dict().items())
    agree(layer(x).detach(), before)


@each_form
def test_short_types_are_as_exact_as_torchs(P_world, form):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        eps = torch.finfo(dtype).eps

        def same(actual, expected, what, dtype=dtype, eps=eps):
            # What is summed over all elements is rounded as often.
            atol = (100 if "weight" in what or "bias" in what else 16) * eps
            torch.testing.assert_close(actual, expected, rtol=4 * eps, atol=atol, msg=f"{what} of {dtype}")

        twins = Twins(P_world, form, dtype)
        twins.step(twins.draw(), same=same)


@pytest.mark.parametrize("form", FLOATING)
def test_autocast_computes_in_torchs_type(P_world, form):
    close = partial(torch.testing.assert_close, rtol=0.03, atol=0.03)
    twins = Twins(P_world, form, torch.float32)
    local, whole = twins.leaves(twins.draw())
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = twins.layer(local), twins.twin(whole)
    close(y, twins.out(expected))
    expected.float().sum().backward()
    y.float().sum().backward()
    twins.compare((local, whole), same=lambda a, b, what: close(a, b))


@pytest.mark.parametrize("form", WEIGHTED)
def test_states_are_torchs(P_world, form):
    twins = Twins(P_world, form)
    layer, twin = twins.layer, twins.twin
    for state in (twin.state_dict(), {key: value + 1 for key, value in twin.state_dict().items()}):
        load_global_state_dict(layer, state)
        whole = gather_state_dict(layer)
        assert whole.keys() == state.keys()
        assert all(torch.equal(whole[key], value) for key, value in state.items())
    assert (
        layer.state_dict().keys() == state.keys()
        and layer.state_dict()._metadata == twin.state_dict()._metadata
    )
    after = []
    for net in (layer, twin):
        for tensor in (*net.parameters(), *net.buffers()):
            tensor.data.fill_(7)
        torch.manual_seed(5)
        net.reset_parameters()
        after.append(torch.get_rng_state())
    assert torch.equal(*after), "the generator goes on as after torch's"
    whole = gather_state_dict(layer)
    assert all(torch.equal(whole[key], value) for key, value in twin.state_dict().items())


# Whose backward moves something on two ranks.
MOVING = ["conv", "circular", "general", "transposed", "AvgPool2d", "bilinear", "batch norm", "instance norm"]
MOVING += ["straddling groups", "layer norm", *(form for form in FORMS if form.endswith("cut otherwise"))]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("form", MOVING)
def test_second_derivatives_are_refused(P_world, form):
    twins = Twins(P_world, form)
    local, _ = twins.leaves(twins.draw())
    with pytest.raises(UnsupportedError, match="no second derivatives"):
        torch.autograd.grad(twins.layer(local).sum(), local, create_graph=True)
