"""Compiled models against the same split models: equal, bit by bit, or refused in words."""

from __future__ import annotations

import copy
import random
import time
import warnings
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from distdl_rma import ConfigurationError, MismatchError, UnsupportedError, capture, distribute, shard
from tests.layers.model.nets import FNO2d, UNet
from tests.layers.model.test_nets import MODELS as MODELS_OF_ALL
from tests.layers.model.test_nets import made, zoo

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]


# The compiler has tests of its own, in test_compile_regions.py.
replayed = partial(capture, backend="replay")


def square(y):
    """A loss."""
    return (y - 0.3).square().mean()


def kinds(model):
    """Whether each kind of calls that was met is known, by its number."""
    return [kind.known for kind in model._compiled_call_impl.kinds]


def alike(one, other):
    """Whether two lists of tensors are equal, bit by bit; NaN is NaN."""
    return len(one) == len(other) and all(
        (x is None) == (y is None) and (x is None or torch.equal(x.nan_to_num(7), y.nan_to_num(7)))
        for x, y in zip(one, other, strict=True)
    )


class Pair:
    """Two copies of a model, of which one is compiled, and an optimizer for each."""

    def __init__(self, model, grid=None, **options):
        # Few bytes in a bucket: a backward of many pieces, which sums are between.
        given = grid or {"H": -1}
        self.models = [distribute(copy.deepcopy(model), given, bucket_nbytes=64) for _ in range(2)]
        self.models[1].compile("replay", **options)
        self.optimizers = [torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in self.models]

    def both(self, step):
        """Call ``step(model, optimizer)`` for both, with equal random numbers; then all must be equal."""
        state, found = torch.get_rng_state(), []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.set_rng_state(state)
            result = step(model, optimizer)
            gradients = [p.grad for p in model.parameters()]
            found.append([result.detach(), *model.state_dict().values(), torch.get_rng_state(), *gradients])
        assert alike(*[[x if x is None else x.clone() for x in each] for each in found])

    def train(self, make, loss=square, steps=4):
        """Train both on new data in each step."""

        def step(model, optimizer):
            optimizer.zero_grad()
            value = loss(model(*x) if isinstance(x, tuple) else model(x))
            value.backward()
            optimizer.step()
            return torch.tensor(float(value.detach()))

        for at in range(steps):
            torch.manual_seed(at)
            x = make()
            self.both(step)
        return self.models[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for model in self.models:
            model.distributed.close()


def of_size(size):
    """A grid of all ranks."""
    return {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2)}[size]


def convs(dims, norm):
    """A convolution, a norm and an activation in place."""
    conv = getattr(nn, f"Conv{dims}d")
    return nn.Sequential(conv(1, 4, 3, padding=1), norm, nn.ReLU(inplace=True), conv(4, 2, 1))


class Many(nn.Module):
    """Functions of many kinds beside each other."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, 2, 1), nn.LayerNorm(8)
        self.linear, self.up = nn.Linear(8, 24), nn.ConvTranspose2d(8, 8, 4, 2, 1)
        self.scale = nn.Parameter(torch.rand(8, 1, 1))
        self.register_buffer("seen", torch.zeros(8))
        self.drop = nn.Dropout(0.4)

    def forward(self, x, factor=1.0):
        x = self.first(x) * self.scale * factor
        with torch.no_grad():
            self.seen.add_(1)
        q, k, v = self.linear(self.norm(x.permute(0, 2, 3, 1))).flatten(1, 2).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(q, k, v).unflatten(1, x.shape[2:]).permute(0, 3, 1, 2)
        x = x / (1 + x.amax().detach()) + x.softmax(2) + F.avg_pool2d(x, 3, 1, 1)
        x = self.drop(self.up(torch.cat([x[:, :4].roll(1, 2), x[:, 4:].flip(3)], 1)))
        return {"y": F.interpolate(x, scale_factor=2, mode="bilinear"), "size": (x.std(), 3)}


MODELS = {
    "signal": (lambda: convs(1, nn.BatchNorm1d(4)), lambda: torch.rand(2, 1, 23), {"W": -1}),
    "image": (lambda: convs(2, nn.GroupNorm(2, 4)), lambda: torch.rand(2, 1, 9, 10), None),
    "more ranks than rows": (lambda: convs(2, nn.BatchNorm2d(4)), lambda: torch.rand(2, 1, 2, 10), None),
    "volume": (lambda: convs(3, nn.InstanceNorm3d(4, affine=True)), lambda: torch.rand(1, 1, 7, 6, 5), None),
    "U-Net": (UNet, lambda: torch.rand(2, 1, 21, 18), None),
    "U-Net, bilinear": (lambda: UNet(bilinear=True, norm="group"), lambda: torch.rand(1, 1, 20, 24), None),
    "FNO": (FNO2d, lambda: torch.rand(2, 1, 17, 14), None),
}


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_the_split_model(P_world, name):
    made, make, grid = MODELS[name]
    torch.manual_seed(3)
    with Pair(made(), grid or of_size(P_world.size)) as pair:
        assert kinds(pair.train(make)) == [True]


@pytest.mark.sizes(2)
@pytest.mark.parametrize(
    "name", ["AttentionUnet", "SegResNet", "MobileNetV3", "SwinTransformer, second version"]
)
def test_a_public_model_trains_as_the_split_one(P_world, name):
    public = MODELS_OF_ALL[name]
    torch.manual_seed(5)
    with Pair(made(public), f"{P_world.size}x1") as pair:
        assert kinds(pair.train(public.inputs, zoo.loss_of, steps=3)) == [True]


@pytest.mark.sizes(1, 2, 3, 4)
def test_many_functions_random_numbers_and_containers(P_world):
    torch.manual_seed(3)
    with Pair(Many(), {"H": -1}) as pair:
        model = pair.train(lambda: torch.rand(2, 1, 24, 16), lambda y: square(y["y"]) + y["size"][0])
        assert kinds(model) == [True]
        assert model(torch.rand(2, 1, 24, 16, generator=torch.Generator().manual_seed(1)))["size"][1] == 3


@pytest.mark.sizes(1, 2, 3, 4)
def test_loops(P_world):
    """Accumulation, two forwards before a backward, clipping, an average of weights, and a frozen layer."""
    torch.manual_seed(3)
    with Pair(convs(2, nn.BatchNorm2d(4)), {"H": -1}) as pair:
        averages = [copy.deepcopy([*m.parameters()]) for m in pair.models]

        def step(model, optimizer):
            optimizer.zero_grad()
            with model.distributed.no_sync():
                square(model(x)).backward()
            first, second = model(x), model(x * 2)
            (square(second) + square(first)).backward(retain_graph=True)
            square(first).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            with torch.no_grad():
                for old, new in zip(averages[pair.models.index(model)], model.parameters(), strict=True):
                    old.lerp_(new, 0.1)
            model[0].requires_grad_(at < 3)
            model.eval()
            with torch.no_grad():
                norm = norm + model(x).sum().full_tensor()
            model.train()
            return norm

        for at in range(6):
            torch.manual_seed(at)
            x = torch.rand(2, 1, 11, 8)
            pair.both(step)
        assert alike(*averages)
        # Training, the average in evaluation, and both with a frozen layer.
        assert kinds(pair.models[1]) == [True] * 4


def test_split_inputs_with_gradients(P_world):
    torch.manual_seed(3)
    with Pair(convs(2, nn.GroupNorm(1, 4)), {"H": -1}) as pair:
        for at in range(4):
            torch.manual_seed(at)
            whole, found = torch.rand(1, 1, 10, 8), []
            for model in pair.models:
                x = shard(model.distributed.partition(4), whole).requires_grad_()
                square(model(x)).backward()
                (other,) = torch.autograd.grad(model(x * 1).sum(), x)
                found.append([x.grad.to_local(), other.to_local()])
            assert alike(*found)


def test_kinds(P_world):
    """Other shapes, numbers, modes, attributes and hyperparameters are other kinds; at most eight of them."""
    torch.manual_seed(3)

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.slopes = nn.Conv2d(1, 2, 3, padding=1), [0.1]

        def forward(self, x, power=1):
            return F.leaky_relu(self.conv(x), self.slopes[0]) ** power

    model = distribute(Scaled(), {"H": -1})
    alone = copy.deepcopy(model)
    model.compile("replay")
    x = torch.rand(1, 1, 8, 6)

    def check(x, *rest):
        for _ in range(2):
            assert alike([alone(x, *rest).to_local()], [model(x, *rest).to_local()])

    with torch.no_grad():
        check(x)
        check(x, 2)
        check(x, 2.0)
        check(x[:, :, 1:])
        for each in (model, alone):
            each.slopes[0] = 0.3
        check(x)
        assert kinds(model) == [True] * 5
        for each in (model, alone):
            each.conv.weight.data = each.conv.weight.data * 2
        check(x)
        assert kinds(model) == [True] * 5
        check(x, 3)
        check(x, 4)
        check(x, 5)
        with pytest.warns(UserWarning, match="8 ways"):
            check(x, 6)
        assert kinds(model) == [True] * 8
        check(x, 3)
    for each in (model, alone):
        each.distributed.close()
    assert model._compiled_call_impl is None
    assert model(x).shape == (1, 2, 8, 6)


class Of(nn.Module):
    """A function of a convolution."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function, self.count, self.table = (
            nn.Conv2d(1, 2, 1),
            function,
            0,
            torch.zeros(2, 1, 1),
        )

        self.matrix = nn.Parameter(torch.eye(2) * -0.1)

    def forward(self, x):
        return self.function(self, self.conv(x))


def _counts(model, y):
    model.count += 1
    return y


def _notes(model, y):
    model.table += 1
    return y + model.table


def _numpy(model, y):
    return y * float(model.conv.weight.detach().numpy().sum())


REFUSED = {
    "a branch": (lambda _, y: y if y.mean() > 0 else -y, "depend on the values"),
    "a shape": (lambda _, y: y * y.flatten()[y.flatten() > 0].numel(), "depend on the values|refuse|not"),
    "numpy": (_numpy, "numpy.. reads the values"),
    "tolist": (lambda m, y: y * sum(m.conv.bias.tolist()), "tolist.. reads the values"),
    "a generator": (
        lambda _, y: y + torch.rand(1, generator=torch.Generator().manual_seed(1)),
        "generator of its own",
    ),
    "a counter": (_counts, "changes 'count'"),
    "random of Python": (lambda _, y: y * random.random(), "random numbers of Python"),
    "to_local": (lambda _, y: y + y.to_local().sum() * 0, "to_local|plain tensor"),
    "a plain result": (lambda m, _: m.conv.weight.sum(), "plain tensor that requires a gradient"),
    "other numbers": (lambda m, y: y * torch.linalg.cholesky(-m.matrix).sum(), "it raises _LinAlgError"),
    "its own tensor": (lambda m, y: (y, m.table), "a tensor of its own"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.sizes(2)
def test_what_a_replay_would_get_wrong_is_refused(P_world, name):
    function, words = REFUSED[name]
    torch.manual_seed(3)
    random.seed(3)
    model = distribute(Of(function), {"H": -1})
    x = torch.rand(1, 1, 8, 6)
    model.compile("replay")
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=words) as caught:
            model(x)
        assert "fallback=True" in str(caught.value)
        assert model.count == 0
    model.compile("replay", fallback=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for at in range(3):
            y = model(x)
            assert name != "a counter" or model.count == at + 1
    assert len([each for each in caught if "cannot be replayed" in str(each.message)]) >= 1
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    gradient = model.conv.weight.grad.clone()
    model.zero_grad()
    model._compiled_call_impl = None
    y = model(x)
    y = y[0] if isinstance(y, tuple) else y
    y.sum().backward()
    assert name == "random of Python" or torch.equal(gradient, model.conv.weight.grad)
    model.distributed.close()


@pytest.mark.sizes(2)
def test_hooks_modes_and_options(P_world, comm):
    torch.manual_seed(3)
    model = distribute(convs(2, nn.GroupNorm(1, 4)), {"H": -1})
    x = torch.rand(1, 1, 8, 6)
    with pytest.raises(ConfigurationError, match="'replay'"):
        model.compile(backend="eager")
    model.compile("replay")
    seen = []
    handle = model[2].register_forward_hook(lambda module, args, y: seen.append(y))
    with pytest.raises(UnsupportedError, match="changes 'seen'"):
        model(x)
    assert seen == []
    handle.remove()
    handle = model[2].register_full_backward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="has backward hooks"):
        model(x)
    handle.remove()
    # Virtual ranks share such hooks.
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    comm.Barrier()
    model(x)
    comm.Barrier()
    handle.remove()
    comm.Barrier()
    assert kinds(model) == []
    for _ in range(3):
        square(model(x)).backward()
    with pytest.raises(UnsupportedError, match="create_graph"):
        torch.autograd.grad(square(model(x)), model[0].weight, create_graph=True)
    y = model(x)
    with torch.no_grad():
        model[3].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        square(y).backward()
    twin = copy.deepcopy(model)
    assert kinds(model) == [True]
    assert twin._compiled_call_impl is None
    twin.compile("replay")
    square(twin(x)).backward()
    assert kinds(twin) == [True]
    for each in (model, twin):
        each.distributed.close()
    assert "compile" not in vars(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_hooks(P_world, dtype):
    factor = [0.5]
    torch.manual_seed(3)
    with Pair(nn.Sequential(convs(2, nn.BatchNorm2d(4)), nn.Softmax(1)), {"H": -1}) as pair:
        for model in pair.models:
            model[0][0].register_forward_hook(lambda module, args, y: y * factor[0])
            model[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        for half in (False, True, False):
            with torch.autocast("cpu", dtype, enabled=half):
                pair.train(lambda: torch.rand(2, 1, 9, 8), lambda y: square(y.float()), 3)
        assert kinds(pair.models[1]) == [True] * 2
        factor[0] = 0.25
        pair.train(lambda: torch.rand(2, 1, 9, 8))
        assert kinds(pair.models[1]) == [True] * 3


class Trainer:
    """An object with a step."""

    def __init__(self, model):
        self.model, self.loss, self.weight, self.steps = model, nn.CrossEntropyLoss(), 1.0, 0

    def step(self, x, target):
        return self.loss(self.model(x), target) * self.weight + 1e-3 * self.model[0].weight.square().sum()

    def counts(self, x):
        self.steps += 1
        return self.model(x).mean()


@pytest.mark.sizes(1, 2, 3, 4)
def test_a_step_with_its_loss(P_world):
    torch.manual_seed(3)
    with Pair(convs(2, nn.BatchNorm2d(4))) as pair:
        pair.models[1]._compiled_call_impl = None
        trainers = [Trainer(model) for model in pair.models]
        captured = replayed(trainers[1].step)
        for at in range(6):
            for trainer in trainers:
                trainer.weight = 1.0 if at < 4 else 0.5
            torch.manual_seed(at)
            x, target = torch.rand(2, 1, 11, 8), torch.randint(2, (2, 11, 8))

            def step(model, optimizer, x=x, target=target):
                optimizer.zero_grad()
                which = pair.models.index(model)
                loss = (captured if which else trainers[0].step)(x, target)
                loss.backward()
                optimizer.step()
                return loss.full_tensor()

            pair.both(step)
        assert [kind.known for kind in captured.kinds] == [True] * 2
        assert "2 kinds of calls of Sequential" in str(captured)
        assert "steps" in str(captured)
        with pytest.raises(UnsupportedError, match="changes 'steps'"):
            replayed(trainers[1].counts)(x)
        assert trainers[1].steps == 0


@pytest.mark.sizes(2)
def test_what_is_no_step(P_world):
    one, other = (distribute(nn.Conv2d(1, 1, 1), {"H": -1}) for _ in range(2))
    for step in (one, lambda x: x, lambda x: one(x) + other(x), None):
        with pytest.raises(ConfigurationError, match="capture: "):
            replayed(step)
    for model in (one, other):
        model.distributed.close()


@pytest.mark.sizes(2)
@pytest.mark.mpi(min_size=2)
def test_ranks_that_call_other_kinds(P_world, comm):
    torch.manual_seed(3)
    model = distribute(convs(2, nn.GroupNorm(1, 4)), {"H": -1})
    model.compile("replay")
    x = torch.rand(1, 1, 8, 6)
    for _ in range(2):
        square(model(x)).backward()
    if comm.rank == 1:
        model[1].eps = 1e-3
    with pytest.raises(MismatchError, match="replays kind 0"):
        model(x)
    model.distributed.close()


def _goes_backward(model, x):
    y = model(x).mean()
    y.backward()
    return y.detach()


def _registers(model, x):
    y = model(x)
    y.register_hook(print)
    return y.mean()


def _twice_again(model, x):
    inner = partial(checkpoint, model, use_reentrant=False)
    return checkpoint(lambda x: inner(x).relu(), x, use_reentrant=False).mean()


def _saved_elsewhere(model, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        return model(x).mean()


def _two_views(model, x):
    y = model(x)
    return y, y[:, :1]


STEPS = {
    "zero_grad": (lambda m, x: m.zero_grad() or m(x).mean(), "reads the .grad"),
    "backward": (_goes_backward, "calls backward"),
    "grad": (lambda m, x: m(x).mean() * (1 + m.weight.grad.norm()), "reads the .grad"),
    "autograd.grad": (lambda m, x: torch.autograd.grad(m(x).mean(), m.weight)[0].sum(), "autograd.grad"),
    "a hook of a tensor": (_registers, "a hook of a"),
    "data": (lambda m, x: setattr(m.bias, "data", m.bias + 1) or m(x).mean(), "sets the .data"),
    "a checkpoint in another one": (_twice_again, "within another one"),
    "a saved tensor elsewhere": (_saved_elsewhere, "none of torch's checkpoint"),
    "a time": (lambda m, x: (m(x).mean(), time.time()), "a plain result"),
    "two views": (_two_views, "show the same memory"),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sizes(2)
def test_what_is_no_part_of_a_step(P_world, name):
    function, words = STEPS[name]
    torch.manual_seed(3)
    model = distribute(nn.Conv2d(1, 2, 3, padding=1), {"H": -1})
    x = torch.rand(1, 1, 8, 6)
    model(x).mean().backward()
    with pytest.raises(UnsupportedError, match=words):
        replayed(lambda x: function(model, x))(x)
    model.distributed.close()


@pytest.mark.sizes(2)
def test_parameters_that_no_module_shows(P_world):
    torch.manual_seed(3)
    model, other = distribute(nn.Conv2d(1, 2, 1), {"H": -1}), nn.Parameter(torch.ones(()))
    x, weight, held = torch.rand(1, 1, 8, 6), model.weight, (random.Random(1), np.random.default_rng(1))
    for step, words in (
        (lambda x: model(x).mean() * weight.detach().norm(), "does not take from its module"),
        (lambda x: model(x).mean() * other, "no parameter of its modules"),
        (lambda x: model(x).mean() * held[0].random(), "random numbers of Python"),
        (lambda x: model(x).mean() * held[1].random(), "random numbers of Python"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            replayed(step)(x)
    assert held[0].random() == random.Random(1).random()
    model.distributed.close()


@pytest.mark.sizes(2)
def test_a_module_beside_the_model_with_the_same_names(P_world):
    found = []
    for compiles in (replayed, lambda step: step):
        torch.manual_seed(3)
        model, loss = distribute(nn.Conv2d(1, 2, 1), {"H": -1}), nn.Conv2d(2, 1, 1)
        step = compiles(lambda x, model=model, loss=loss: square(loss(model(x))))
        for at in range(3):
            step(torch.full((1, 1, 8, 6), 0.5 + at)).backward()
        found.append([p.grad for p in (*model.parameters(), *loss.parameters())])
        model.distributed.close()
    assert alike(*found)


@pytest.mark.parametrize("results", ["same", "detached", "unused", "view"])
def test_results_that_are_one_tensor_or_unused(P_world, results):
    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = convs(2, nn.GroupNorm(1, 4))

        def forward(self, x):
            y = self.net(x)
            others = {"same": y, "detached": y.detach(), "unused": y * 2, "view": None}
            return (y[:, :1] if results == "view" else y), others[results]

    def loss(found):
        y, other = found
        y.relu_()
        return square(y) + (0 if results in {"unused", "view"} else other.square().mean())

    torch.manual_seed(3)
    with Pair(Several()) as pair:
        assert kinds(pair.train(lambda: torch.rand(2, 1, 9, 8), loss, 5)) == [True]


def dice(y, target, weight):
    """One minus the weighted overlap of each class."""
    parts, true = y.softmax(1), F.one_hot(target, 3).movedim(-1, 1)
    both, all_of_them = (
        (each * weight[:, None, None]).sum((0, 2, 3)) for each in (parts * true, parts + true)
    )
    return 1 - (2 * both / all_of_them).mean()


LOSSES_OF_CLASSES = {
    "weighted": F.cross_entropy,
    "one is ignored": partial(F.cross_entropy, ignore_index=1),
    "dice": dice,
}


@pytest.mark.parametrize("which", LOSSES_OF_CLASSES)
def test_losses_of_classes(P_world, which):
    weight, number = torch.tensor([1.0, 2.0, 0.5]), torch.Generator().manual_seed(1)
    classes, function = torch.randint(0, 3, (2, 1, 9, 8), generator=number), LOSSES_OF_CLASSES[which]

    def loss(y):
        return function(y, shard({"H": -1}, classes)[:, 0], weight=weight)

    torch.manual_seed(3)
    split = distribute(nn.Conv2d(1, 3, 3, padding=1), {"H": -1})
    twin = distribute(nn.Conv2d(1, 3, 3, padding=1), {"H": -1})
    twin.load_state_dict(split.state_dict())
    steps = [lambda x: loss(split(x)), replayed(lambda x: loss(twin(x)))]
    for at in range(4):
        torch.manual_seed(at)
        x = shard({"H": -1}, torch.rand(2, 1, 9, 8))
        found = [step(x) for step in steps]
        for value in found:
            value.backward()
        assert alike(
            *[
                [y.detach(), *(p.grad for p in m.parameters())]
                for y, m in zip(found, (split, twin), strict=True)
            ]
        )
    assert steps[1].kinds[0].known


@pytest.mark.sizes(2)
def test_a_detached_input_among_the_results(P_world):
    class Detached(nn.Module):
        def forward(self, x):
            return x.detach(), x.detach().round()

    model = distribute(Detached(), {"H": -1})
    model.compile("replay")
    x = shard({"H": -1}, torch.rand(1, 1, 8, 6)).requires_grad_()
    for _ in range(3):
        assert not any(y.requires_grad for y in model(x))


def test_a_norm_whose_result_is_unused_keeps_its_statistics(P_world):
    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(2, 2, 1), nn.BatchNorm1d(2)

        def forward(self, x):
            y = self.conv(x)
            self.norm(y.mean((2, 3)))
            return y

    torch.manual_seed(3)
    with Pair(Watched()) as pair:
        assert kinds(pair.train(lambda: torch.rand(2, 2, 9, 8), square, 4)) == [True]


def test_a_model_behind_a_compiled_one(P_world):
    """Gradients that arrive are views without the halo."""
    torch.manual_seed(3)
    after = distribute(nn.Conv2d(1, 2, 3, padding=1), {"H": -1})
    with Pair(convs(2, nn.GroupNorm(1, 4))) as pair:
        pair.train(lambda: torch.rand(2, 1, 33, 20), lambda y: after(y[:, :1]).square().mean(), 8)
    with Pair(nn.Conv2d(1, 1, 3, padding=1)) as pair:
        pair.train(lambda: torch.rand(2, 1, 33, 20), lambda y: after(y).square().mean(), 8)
    with Pair(convs(2, nn.GroupNorm(1, 4))) as pair:
        assert kinds(pair.train(lambda: torch.rand(2, 1, 33, 20), lambda y: y.mean(), 8)) == [True]
    after.distributed.close()
