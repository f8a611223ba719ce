"""What users do with a model beside training it: state, hooks, copies, several of them, modes."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from distdl_rma import MismatchError, UnsupportedError, distribute
from distdl_rma.split import SplitTensor
from distdl_rma.split.calls.site import module_path
from tests.model.against_alone import whole
from tests.model.training import (
    ROWS,
    STEPS,
    alike,
    beside_alone,
    both,
    gradients,
    inputs,
    loop,
    loss_of,
    made,
    sgd,
    split_as,
)

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4), pytest.mark.in_turn(4)]


@pytest.fixture
def pair(comm):
    """A model alone, and the same one distributed."""
    alone = made()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    yield alone, split
    split.distributed.close()


def parametrised():
    torch.manual_seed(3)
    return nn.Sequential(
        parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)),
        nn.Tanh(),
        parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        parametrizations.weight_norm(nn.Linear(16, 3)),
    ).double()


@beside_alone(parametrised)
def test_weight_and_spectral_norm(model):
    return loop(model, sgd(model))


@beside_alone(**ROWS)
def test_functional_call(model):
    # These are nobody's parameters, and torch.autograd.grad sums for them.
    ours = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    y = torch.func.functional_call(model, {k: v * 2 for k, v in ours.items()}, (inputs(),))
    found = torch.autograd.grad(loss_of(y), list(ours.values()), allow_unused=True)
    return torch.stack([g.sum() for g in found if g is not None])


@beside_alone()
def test_state_is_saved_and_loaded(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loop(model, optimizer)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    loop(model, optimizer)
    file.seek(0)
    state = torch.load(file)
    model.load_state_dict(state["model"])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    optimizer.load_state_dict(state["optimizer"])
    return loop(model, optimizer)


@beside_alone()
def test_several_losses_and_a_graph_that_is_kept(model):
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        y = model(inputs(step))
        y.square().mean().backward(retain_graph=True)
        y.abs().mean().backward()
        torch.autograd.backward([model(inputs(step)).mean(), model(inputs(step + 1)).std()])
        optimizer.step()


def test_two_models_in_one_loss(comm):
    torch.manual_seed(4)
    alone = [made(), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()).double()]
    split = [distribute(copy.deepcopy(model), {"H": -1}) for model in alone]
    for net, front in (alone, split):
        optimizer = torch.optim.SGD([*net.parameters(), *front.parameters()], lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            fake = front(inputs(step))
            # As of adversarial losses: through the other one, and detached.
            (loss_of(net(fake)) + loss_of(net(fake.detach())) + (fake - 0.1).abs().mean()).backward()
            optimizer.step()
    for one, other in zip(split, alone, strict=True):
        alike(one, other)
        one.distributed.close()


@beside_alone()
def test_inputs_that_need_gradients(model):
    x = split_as(model, inputs().requires_grad_())
    loss_of(model(x)).backward()
    # And by torch.autograd.grad, where the parameters' gradients are not asked for.
    other = split_as(model, inputs().requires_grad_())
    for p in model.parameters():
        p.requires_grad_(False)
    (gradient,) = torch.autograd.grad(loss_of(model(other)), other)
    return torch.stack([whole(x.grad), whole(gradient)])


@beside_alone()
def test_gradients_that_are_asked_for(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    found = torch.autograd.grad(loss_of(model(inputs())), parameters)
    loss_of(model(inputs(1))).backward()
    return torch.cat([*(g.flatten() for g in found), gradients(*parameters)])


@beside_alone()
def test_learnable_tensors_of_nobody(model):
    # An input, a plain network ahead of the model, weights of a loss, used in several ways.
    torch.manual_seed(4)
    ahead = nn.Conv2d(3, 3, 1).double()
    x, scale = inputs().requires_grad_(), torch.ones(2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(13, 1, dtype=torch.float64).requires_grad_()
    given = split_as(model, inputs(1))
    y = model(ahead(x) * 0.5)
    (loss_of(y) * scale[0].exp() + scale[1] * 3).backward()
    (weights * given + (weights * 2).expand(2, 3, 13, 11)).square().mean().backward()
    # What was brought together, beside what is split.
    (whole(y.detach().mean()) * (whole(given.flip(2)) * given).mean() * scale.sum()).backward()
    return gradients(x, scale, weights, *ahead.parameters(), *model.parameters())


def test_what_is_computed_of_parameters_and_of_others_is_refused(pair):
    _, split = pair
    other = torch.ones(4, dtype=torch.float64, requires_grad=True)
    y = split(inputs())
    with pytest.raises(UnsupportedError, match="one after the other"):
        y * (split.scale * other)
    loss_of(y * split.scale * other).backward()
    assert other.grad is not None


@beside_alone()
def test_hooks_on_modules_and_tensors(model):
    seen = []
    model.body.register_forward_hook(lambda m, args, y: y * 1.5)
    model.head.register_forward_pre_hook(lambda m, args: (args[0] + 1,))

    def half(_module, _args, y):
        y.register_hook(lambda g: g * 0.5)
        y.register_hook(lambda g: seen.append(whole(g.abs().sum())))

    model.norm.register_forward_hook(half)
    loop(model, sgd(model))
    return torch.stack(seen)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_a_graph(comm, context):
    def act(model):
        loop(model, sgd(model))
        model.eval()
        with context():
            y = model(inputs(5))
            assert not y.requires_grad
        return whole(y)

    both(act)


def test_copies_of_a_distributed_model(pair):
    alone, split = pair
    twin = copy.deepcopy(split)
    assert twin.distributed is not split.distributed and twin.stem.weight is not split.stem.weight
    expected, y = alone(inputs()), twin(inputs())
    assert isinstance(y, SplitTensor)
    torch.testing.assert_close(whole(y), expected)
    for each in (expected, y):
        loss_of(each).backward()
    for (name, p), other in zip(twin.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(p.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in split.parameters())
    loss_of(split(inputs())).backward()
    twin.distributed.close()


@pytest.mark.sizes(4)
@pytest.mark.mpi(min_size=4)
def test_replicas_of_split_models(comm, P_world):
    replica = comm.rank // 2
    ranks = [2 * replica, 2 * replica + 1]
    P_x = P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition((1, 1, 2, 1))
    alone = made()
    split = distribute(copy.deepcopy(alone), P_x, reduction="mean", replicas=2)
    optimizers = [sgd(model) for model in (alone, split) if model.norm.eval()]
    for step in range(STEPS):
        samples = [inputs(2 * step + at) for at in range(2)]
        losses = sum(loss_of(alone(x)) for x in samples) / 2, loss_of(split(samples[replica]))
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    alike(split, alone)
    split.distributed.close()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit.trace. is deprecated")
def test_compiled_and_traced_models_are_refused(pair):
    (_, split), x = pair, inputs()
    for name, trace in (
        ("compile", lambda: torch.compile(split, backend="eager")(x)),
        ("jit", lambda: torch.jit.trace(split.eval(), x)),
        ("func", lambda: torch.func.jvp(split, (x,), (x,))),
        ("func", lambda: torch.func.vmap(split)(x[None])),
        ("export", lambda: torch.export.export(split, (x,))),
    ):
        with pytest.raises(UnsupportedError, match=rf"torch\.{name}: a distributed model"):
            trace()
        assert module_path() == ""
    loss_of(split(x)).backward()


@beside_alone(**ROWS)
def test_a_compiled_loss_is_called_as_it_is(model):
    compiled = torch.compile(loss_of, backend="eager")
    loss = (compiled if hasattr(model, "distributed") else loss_of)(model(inputs()))
    loss.backward()
    return loss


@pytest.mark.mpi(min_size=2)
def test_generators_that_are_not_alike_are_noticed_where_a_model_draws(comm):
    split = distribute(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d()).double(), {"H": -1})
    x = inputs()
    torch.manual_seed(comm.rank)
    with pytest.raises(MismatchError, match=r"rank 1: calls for random numbers of .* seed it alike"):
        split(x)
    # Nothing is drawn.
    split.eval()(x)
    split.train()
    torch.manual_seed(3)
    loss_of(split(x)).backward()
    split.distributed.close()
