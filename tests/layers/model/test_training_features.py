"""What users do with a distributed model, in training loops and beside, as with the model alone."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from distdl_rma import MismatchError, SplitTensor, UnsupportedError, distribute
from distdl_rma.layers.split.calls.site import module_path
from distdl_rma.layers.sync import DistributedGradScaler
from tests.layers.model.training import (
    ROWS,
    STEPS,
    Net,
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
    whole,
)
from tests.layers.split.test_function_nodes import Sigmoid

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4), pytest.mark.in_turn(4)]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_global_norm(comm, norm_type):
    def act(model):
        norms = []
        clip = nn.utils.clip_grad_norm_
        loop(model, sgd(model), lambda _: norms.append(clip(model.parameters(), 0.1, norm_type)))
        return torch.stack(norms)

    both(act)


@pytest.mark.parametrize("quiet", [False, True])
def test_accumulation_with_and_without_no_sync(comm, quiet):
    def act(model):
        handle = getattr(model, "distributed", None)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                last = handle is None or not quiet or micro == 2
                with nullcontext() if last else handle.no_sync():
                    (loss_of(model(inputs(micro))) / 3).backward()
            optimizer.step()

    both(act)


@pytest.mark.mpi(min_size=2)
def test_in_no_sync_each_rank_keeps_its_own_part_of_a_gradient(comm, split_of):
    alone = made()
    split = split_of(alone)
    with split.distributed.no_sync():
        loss_of(split(inputs())).backward()
    loss_of(alone(inputs())).backward()
    for name in ("stem", "body"):
        own, all_of_it = getattr(split, name).weight.grad, getattr(alone, name).weight.grad
        torch.testing.assert_close(sum(comm.allgather(own)), all_of_it, atol=1e-9, rtol=1e-9)
        assert not torch.allclose(own, all_of_it)
    split.zero_grad()


@pytest.mark.parametrize("kind", ["torch", "distributed"])
def test_gradient_scalers(comm, P_world, kind):
    def act(model):
        options = {"init_scale": 2.0**10, "growth_interval": 2}
        ours = kind == "distributed" and hasattr(model, "distributed")
        scaler = DistributedGradScaler(P_world, **options) if ours else torch.amp.GradScaler("cpu", **options)
        optimizer, scales = sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            # The gradients of the second step are infinite.
            scaler.scale(loss_of(model(inputs(step))) * (float("inf") if step == 1 else 1)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return torch.tensor(scales)

    both(act)


@beside_alone()
def test_moving_averages(model):
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    loop(model, sgd(model), lambda _: average.update_parameters(model))
    average.eval()
    with torch.no_grad():
        y = average(inputs(9))
    values = [value.double().flatten() for value in average.module.state_dict().values()]
    if hasattr(average.module, "distributed"):
        average.module.distributed.close()
    return torch.cat([whole(y).flatten(), *values])


@beside_alone(tolerance=1e-7)
def test_lbfgs_with_a_closure(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model(inputs()))
        loss.backward()
        return loss

    for _ in range(2):
        loss = optimizer.step(closure)
    return whole(loss)


# Blocks are rounded where the whole is; sums over ranks in another order.
@beside_alone(lambda: made().float(), tolerance=2e-2)
def test_autocast(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(inputs(step).float())
            assert whole(y).dtype in (torch.bfloat16, torch.float32)
            loss = loss_of(y.float())
        loss.backward()
        optimizer.step()
    return whole(loss)


class Scaled(torch.autograd.Function):
    """By a parameter of the model, which has a hook."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()


class Quantised(Net):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))

    def forward(self, x):
        return super().forward(Scaled.apply(self.stem(x)[:, :3], self.gain))


@beside_alone(lambda: made(Quantised))
def test_an_autograd_function_of_a_parameter(model):
    model.gain.register_hook(lambda gradient: 2 * gradient)
    return loop(model, sgd(model))


class CheckpointedTwice(Net):
    """Checkpoints within others, of what an autograd function returns as well."""

    def forward(self, x):
        y = checkpoint(self.middle, F.relu(self.norm(self.stem(x))), use_reentrant=False)
        return self.head(y.mean((2, 3))) * self.scale

    def middle(self, y):
        z = checkpoint(lambda y: checkpoint(self.body, y, use_reentrant=False).sin(), y, use_reentrant=False)
        z = checkpoint(lambda z: Sigmoid.apply(z.exp()) * z, z, use_reentrant=False)
        parts = nn.Sequential(self.frozen, nn.Tanh())
        return y + checkpoint(parts, Sigmoid.apply(z) * y, use_reentrant=False)


@beside_alone(lambda: made(CheckpointedTwice))
def test_checkpoints_within_checkpoints(model):
    return loop(model, sgd(model))


def test_an_activation_in_place_within_a_checkpoint_is_refused_as_torch_does(split_of):
    class Activated(Net):
        def forward(self, x):
            return checkpoint(nn.SiLU(inplace=True), self.stem(x), use_reentrant=False).mean()

    for model in (alone := made(Activated), split_of(alone)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs(0)).backward()


@beside_alone()
def test_a_checkpoint_around_the_whole_model(model):
    for step in range(2):
        loss_of(checkpoint(model, inputs(step), use_reentrant=False)).backward()
    return gradients(*model.parameters())


def test_reentrant_checkpoints_are_refused(split_of):
    class Reentrant(Net):
        def forward(self, x):
            return checkpoint(self.stem, x, use_reentrant=True).mean()

    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        split_of(made(Reentrant))(inputs().requires_grad_()).backward()


# A term of the parameters that goes backward by itself, before, after or together with another loss.
@beside_alone(**ROWS)
def test_losses_of_plain_tensors(model):
    optimizer = sgd(model)
    for step in range(4):
        optimizer.zero_grad()
        loss, term = loss_of(model(inputs(step))), sum(p.square().sum() for p in model.parameters())
        if step < 2:
            for each in (loss, term)[:: 1 - 2 * step]:
                each.backward()
        else:
            torch.autograd.backward([term, loss][:: 5 - 2 * step])
        optimizer.step()
    return whole(loss)


@beside_alone(**ROWS)
def test_gradients_that_are_asked_for_also_of_plain_terms(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    ends = loss_of(model(inputs())), model.scale.square().sum()
    found = torch.autograd.grad(ends, parameters)
    loss_of(model(inputs(1))).backward()
    return torch.cat([*(g.flatten() for g in found), gradients(*parameters)])


def of_words():
    # Whose embedding is not cut either; and what becomes an image in the model.
    torch.manual_seed(3)
    parts = nn.Embedding(7, 16), nn.Unflatten(2, (1, 4, 4)), nn.Flatten(2), nn.Linear(16, 3)
    return nn.Sequential(*parts).double()


@beside_alone(of_words, grids=[{"N": -1}])
def test_a_model_that_is_given_nothing_to_cut(model):
    optimizer, handle = sgd(model), getattr(model, "distributed", None)
    for step in range(4):
        optimizer.zero_grad()
        words = torch.arange(10).view(2, 5) % 7
        if step == 2:
            with nullcontext() if handle is None else handle.no_sync():
                model(words).square().mean().backward()
        (model(words) - step).square().mean().backward()
        optimizer.step()


def test_a_loss_of_the_own_block_is_one_of_its_rank(comm):
    def act(model):
        y = model(inputs())
        own = y.to_local() if isinstance(y, SplitTensor) else y
        assert own is (y.to_local() if isinstance(y, SplitTensor) else y)
        own.square().sum().backward()
        return gradients(model.weight)

    both(act, lambda: nn.Conv2d(3, 2, 3, padding=1).double(), **ROWS)


# A block that a head is behind counts on every rank; one that is only looked at changes no count.
@pytest.mark.parametrize("looked_at", [False, True])
def test_a_head_behind_own_blocks_or_all_of_them(comm, looked_at):
    def act(model):
        y = model.norm(model.stem(split_as(model, inputs())))
        own = y.to_local() if isinstance(y, SplitTensor) else y
        model.head((whole(y) if looked_at else own).transpose(1, 3)).square().sum().backward()
        return gradients(model.head.weight, model.head.bias, model.stem.weight)

    both(act, **ROWS)


class Parts(nn.Module):
    """Steps of which some are recomputed in the backward."""

    def __init__(self, start, stop):
        super().__init__()
        torch.manual_seed(3)
        steps = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.Conv2d(4, 3, 3)
        self.steps, self.start, self.stop = nn.Sequential(*steps), start, stop

    def forward(self, x):
        x = self.steps[: self.start](x)
        x = checkpoint(self.steps[self.start : self.stop], x, use_reentrant=False)
        return self.steps[self.stop :](x)


@pytest.mark.parametrize("part", [(1, 2), (2, 3), (2, 4), (0, 4)], ids=str)
def test_ranks_without_elements_recompute_with_the_others(comm, part):
    # Three channels or rows of four ranks.
    def act(model):
        loss = model(inputs()[:, :, :10]).square().mean()
        loss.backward()
        return loss

    both(act, lambda: Parts(*part).double(), grids=[{"C": -1}, {"H": -1}])


@beside_alone(**ROWS)
def test_a_penalty_behind_all_of_a_tensor(model):
    penalty = sum(p.square().sum() for p in model.parameters())
    y = whole(model(inputs()))
    loss = (torch.exp(-model.scale) * (y - 1).abs()).mean() + model.scale.sum() + penalty
    loss.backward(retain_graph=True)
    loss.backward()
    loss_of(model(inputs(1))).backward()
    return loss


@pytest.fixture
def pair(split_of):
    return (alone := made()), split_of(alone)


def parametrised():
    norm = parametrizations.weight_norm
    torch.manual_seed(3)
    return nn.Sequential(
        norm(nn.Conv2d(3, 4, 3, padding=1)), nn.Tanh(), parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), norm(nn.Linear(16, 3)),
    ).double()  # fmt: skip


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


def test_two_models_in_one_loss(split_of):
    torch.manual_seed(4)
    alone = [made(), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()).double()]
    split = [split_of(model) for model in alone]
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


@beside_alone(**ROWS)
def test_evaluation_without_a_graph(model):
    loop(model, sgd(model))
    model.eval()
    found = []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found.append(whole(model(inputs(5))))
        assert not found[-1].requires_grad
    return torch.stack(found)


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
    twin.distributed.close()
    y = split(inputs())
    assert isinstance(y, SplitTensor)
    loss_of(y).backward()


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
def test_generators_that_are_not_alike_are_noticed_where_a_model_draws(comm, split_of):
    split, x = split_of(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Dropout2d()).double()), inputs()
    torch.manual_seed(comm.rank)
    with pytest.raises(MismatchError, match=r"rank 1: calls for random numbers of .* seed it alike"):
        split(x)
    # Nothing is drawn.
    split.eval()(x)
    split.train()
    torch.manual_seed(3)
    loss_of(split(x)).backward()
