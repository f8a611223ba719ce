"""Training loops of distributed models, as users write them, beside the model alone."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from distdl_rma import SplitTensor, UnsupportedError, distribute
from distdl_rma.sync import DistributedGradScaler
from tests.model.against_alone import whole
from tests.model.training import (
    ROWS,
    STEPS,
    Net,
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


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_global_norm(comm, norm_type):
    def act(model):
        norms = []

        def clip(_step):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))

        loop(model, sgd(model), clip)
        return torch.stack(norms)

    both(act)


@pytest.mark.parametrize("quiet", [False, True])
def test_accumulation_with_and_without_no_sync(comm, quiet):
    def act(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(STEPS):
            optimizer.zero_grad()
            for micro in range(3):
                handle = getattr(model, "distributed", None)
                if handle is not None and quiet and micro < 2:
                    with handle.no_sync():
                        (loss_of(model(inputs(micro))) / 3).backward()
                else:
                    (loss_of(model(inputs(micro))) / 3).backward()
            optimizer.step()

    both(act)


@pytest.mark.parametrize("kind", ["torch", "distributed"])
def test_gradient_scalers(comm, P_world, kind):
    def act(model):
        options = {"init_scale": 2.0**10, "growth_interval": 2}
        if hasattr(model, "distributed") and kind == "distributed":
            scaler = DistributedGradScaler(P_world, **options)
        else:
            scaler = torch.amp.GradScaler("cpu", **options)
        optimizer, scales = sgd(model), []
        for step in range(5):
            optimizer.zero_grad()
            loss = loss_of(model(inputs(step)))
            if step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return torch.tensor(scales)

    both(act)


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


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = x.clamp(-1, 1)
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x == y)


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
        z = checkpoint(lambda z: Clipped.apply(z.exp()) * z, z, use_reentrant=False)
        parts = nn.Sequential(self.frozen, nn.Tanh())
        return y + checkpoint(parts, Clipped.apply(z) * y, use_reentrant=False)


@beside_alone(lambda: made(CheckpointedTwice))
def test_checkpoints_within_checkpoints(model):
    return loop(model, sgd(model))


def test_an_activation_in_place_within_a_checkpoint_is_refused_as_torch_does(comm):
    class Activated(Net):
        def forward(self, x):
            return checkpoint(nn.SiLU(inplace=True), self.stem(x), use_reentrant=False).mean()

    for model in (alone := made(Activated), distribute(copy.deepcopy(alone), {"H": -1})):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            model(inputs(0)).backward()


@beside_alone()
def test_a_checkpoint_around_the_whole_model(model):
    for step in range(2):
        loss_of(checkpoint(model, inputs(step), use_reentrant=False)).backward()
    return gradients(*model.parameters())


def test_reentrant_checkpoints_are_refused(comm):
    class Reentrant(Net):
        def forward(self, x):
            return checkpoint(self.stem, x, use_reentrant=True).mean()

    split = distribute(made(Reentrant), {"H": -1})
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        split(inputs().requires_grad_()).backward()
    split.distributed.close()


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


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_fused_optimizers_and_schedulers(comm, kind):
    options = {"weight_decay": 0.1} if kind is torch.optim.AdamW else {"momentum": 0.9, "nesterov": True}

    def act(model):
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = kind(learning, lr=1e-2, fused=True, **options)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_of(model(inputs(step)))
            loss.backward()
            optimizer.step()
            cosine.step()
            plateau.step(whole(loss).detach())
        return torch.tensor(optimizer.param_groups[0]["lr"])

    both(act)


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
def test_gradients_of_plain_terms_that_are_asked_for(model):
    parameters = [p for p in model.parameters() if p.requires_grad]
    ends = loss_of(model(inputs())), model.scale.square().sum()
    return torch.cat([g.flatten() for g in torch.autograd.grad(ends, parameters)])


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
        if handle is not None and step == 2:
            with handle.no_sync():
                model(words).square().mean().backward()
        elif step == 2:
            model(words).square().mean().backward()
        (model(words) - step).square().mean().backward()
        optimizer.step()


@beside_alone(**ROWS)
def test_a_head_behind_all_of_a_tensor(model):
    for step in range(2):
        y = whole(model.norm(model.stem(split_as(model, inputs(step))))).mean((2, 3))
        F.mse_loss(model.head(y), torch.ones(2, 4, dtype=y.dtype)).backward()


def test_a_loss_of_the_own_block_is_one_of_its_rank(comm):
    torch.manual_seed(3)
    alone = nn.Conv2d(3, 2, 3, padding=1).double()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    alone(inputs()).square().sum().backward()
    y = split(inputs())
    assert y.to_local() is y.to_local()
    (y.to_local().square().sum()).backward()
    torch.testing.assert_close(split.weight.grad, alone.weight.grad, atol=1e-9, rtol=1e-9)
    split.distributed.close()


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
