"""What training loops do besides a step: on a distributed model it is what it is on the model alone."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from distdl_rma import UnsupportedError, distribute
from distdl_rma.split import SplitTensor
from distdl_rma.sync import DistributedGradScaler
from tests.model.against_alone import whole

pytestmark = [pytest.mark.mpi, pytest.mark.sizes(2, 3, 4)]
SHAPE = (2, 3, 13, 11)
STEPS = 3


class Net(nn.Module):
    """Convolutions, a norm, tied weights, and a parameter that is used on split and replicated tensors."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.body = nn.Conv2d(4, 4, 3, padding=1)
        self.scale = nn.Parameter(torch.rand(4))
        self.head = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)
        self.last.weight = self.head.weight
        self.frozen = nn.Conv2d(4, 4, 1)
        self.frozen.requires_grad_(False)

    def forward(self, x):
        y = F.relu(self.norm(self.stem(x)))
        y = y + self.body(self.body(y)) * self.scale.view(1, -1, 1, 1)
        y = self.frozen(y)
        pooled = y.mean((2, 3))
        return self.last(torch.tanh(self.head(pooled))) * self.scale


def made():
    torch.manual_seed(3)
    return Net().double()


def inputs(at=0):
    torch.manual_seed(50 + at)
    return torch.randn(SHAPE, dtype=torch.float64)


def loss_of(y):
    return (y - 0.3).square().mean() + y.abs().amax()


def alike(split, alone, tolerance=1e-9):
    state = alone.state_dict()
    for key, value in split.state_dict().items():
        torch.testing.assert_close(
            value, state[key], atol=tolerance, rtol=tolerance, msg=lambda m, k=key: f"{k}: {m}"
        )


def both(act, make=made, tolerance=1e-9, grids=None, **options):
    """Run ``act(model)`` on a distributed model and on the same one alone; state and result are alike."""
    from mpi4py import MPI

    size = MPI.COMM_WORLD.size
    for grid in grids or [f"{size}x1", f"1x{size}", *(["2x2"] if size == 4 else [])]:
        alone = make()
        split = distribute(copy.deepcopy(alone), grid, **options)
        try:
            torch.manual_seed(7)
            expected = act(alone)
            torch.manual_seed(7)
            found = act(split)
            alike(split, alone, tolerance)
            if expected is not None:
                torch.testing.assert_close(
                    whole(found).detach(), expected.detach(), atol=tolerance, rtol=tolerance
                )
        finally:
            split.distributed.close()


def loop(model, optimizer, after=None, steps=STEPS):
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model(inputs(step)))
        loss.backward()
        if after is not None:
            after(step)
        optimizer.step()
    return whole(loss)


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_by_the_global_norm(comm, norm_type):
    def act(model):
        norms = []

        def clip(_step):
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type))

        loop(model, torch.optim.SGD(model.parameters(), lr=0.1), clip)
        return torch.stack(norms)

    both(act)


def test_clipping_by_value(comm):
    def act(model):
        loop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda _: nn.utils.clip_grad_value_(model.parameters(), 0.01),
        )

    both(act)


def test_accumulation_with_and_without_no_sync(comm):
    def act(model, quiet):
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

    both(lambda model: act(model, quiet=False))
    both(lambda model: act(model, quiet=True))


@pytest.mark.parametrize("kind", ["torch", "distributed"])
def test_gradient_scalers(comm, P_world, kind):
    def act(model):
        split = hasattr(model, "distributed")
        options = {"init_scale": 2.0**10, "growth_interval": 2}
        if split and kind == "distributed":
            scaler = DistributedGradScaler(P_world, **options)
        else:
            scaler = torch.amp.GradScaler("cpu", **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scales = []
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


def test_autocast(comm):
    # Blocks are rounded where the whole is; sums over ranks in another order.
    def make():
        return made().float()

    def act(model):
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

    both(act, make, tolerance=2e-2)


def test_moving_averages(comm):
    def act(model):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        loop(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            lambda _: average.update_parameters(model),
        )
        average.eval()
        with torch.no_grad():
            y = average(inputs(9))
        values = [value.double().flatten() for value in average.module.state_dict().values()]
        if hasattr(average.module, "distributed"):
            average.module.distributed.close()
        return torch.cat([whole(y).flatten(), *values])

    both(act)


class Checkpointed(Net):
    """The same, its middle recomputed in the backward."""

    def forward(self, x):
        y = F.relu(self.norm(self.stem(x)))
        y = checkpoint(lambda y: y + self.body(F.dropout(self.body(y), 0.0)), y, use_reentrant=False)
        y = checkpoint(nn.Sequential(self.frozen, nn.Tanh()), y, use_reentrant=False)
        return self.head(y.mean((2, 3))) * self.scale


def test_activation_checkpointing(comm):
    both(
        lambda model: loop(model, torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda: (torch.manual_seed(3), Checkpointed().double())[1],
    )


def test_a_checkpoint_around_the_whole_model(comm):
    def act(model):
        for step in range(2):
            loss_of(checkpoint(model, inputs(step), use_reentrant=False)).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    both(act)


def test_reentrant_checkpoints_are_refused(comm):
    class Reentrant(Net):
        def forward(self, x):
            return checkpoint(self.stem, x, use_reentrant=True).mean()

    torch.manual_seed(1)
    split = distribute(Reentrant().double(), {"H": -1})
    with pytest.raises(UnsupportedError, match="use_reentrant=False"):
        split(inputs().requires_grad_()).backward()
    split.distributed.close()


def test_lbfgs_with_a_closure(comm):
    def act(model):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=4, line_search_fn="strong_wolfe")

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(inputs()))
            loss.backward()
            return loss

        for _ in range(2):
            loss = optimizer.step(closure)
        return whole(loss)

    both(act, tolerance=1e-7)


OPTIMIZERS = {
    "fused AdamW with weight decay": lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "foreach Adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, foreach=True, amsgrad=True),
    "fused SGD": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_and_schedulers(comm, name):
    def act(model):
        optimizer = OPTIMIZERS[name]([p for p in model.parameters() if p.requires_grad])
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

    both(act, tolerance=1e-7 if "Adagrad" in name or "RMS" in name else 1e-9)


def test_weight_and_spectral_norm(comm):
    def make():
        torch.manual_seed(3)
        return nn.Sequential(
            parametrizations.weight_norm(nn.Conv2d(3, 4, 3, padding=1)),
            nn.Tanh(),
            parametrizations.spectral_norm(nn.Conv2d(4, 4, 3)),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            parametrizations.weight_norm(nn.Linear(16, 3)),
        ).double()

    both(lambda model: loop(model, torch.optim.SGD(model.parameters(), lr=0.1)), make)


def test_functional_call(comm):
    def act(model):
        ours = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        y = torch.func.functional_call(model, {k: v * 2 for k, v in ours.items()}, (inputs(),))
        gradients = torch.autograd.grad(loss_of(y), list(ours.values()), allow_unused=True)
        return torch.stack([g.sum() for g in gradients if g is not None])

    # They are nobody's parameters, and torch.autograd.grad sums for them.
    alone = made()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    expected, found = act(alone), act(split)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    split.distributed.close()


def test_state_is_saved_and_loaded(comm):
    def act(model):
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

    both(act)


def test_several_losses_and_a_graph_that_is_kept(comm):
    def act(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            y = model(inputs(step))
            y.square().mean().backward(retain_graph=True)
            y.abs().mean().backward()
            torch.autograd.backward([model(inputs(step)).mean(), model(inputs(step + 1)).std()])
            optimizer.step()

    both(act)


def test_two_models_in_one_loss(comm, P_world):
    def made_pair():
        torch.manual_seed(4)
        return [made(), nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Tanh()).double()]

    alone = made_pair()
    split = [distribute(copy.deepcopy(model), {"H": -1}) for model in alone]
    for net, front in (alone, split):
        optimizer = torch.optim.SGD([*net.parameters(), *front.parameters()], lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            x = inputs(step)
            fake = front(x)
            # As of adversarial losses: through the other one, and detached.
            (loss_of(net(fake)) + loss_of(net(fake.detach())) + (fake - 0.1).abs().mean()).backward()
            optimizer.step()
    for one, other in zip(split, alone, strict=True):
        alike(one, other)
        one.distributed.close()


def test_inputs_that_need_gradients(comm, P_world):
    alone = made()
    split = distribute(copy.deepcopy(alone), {"W": -1})
    x, s = inputs().requires_grad_(), split.distributed.cut(inputs().requires_grad_())
    loss_of(alone(x)).backward()
    loss_of(split(s)).backward()
    torch.testing.assert_close(s.grad.full_tensor(), x.grad, atol=1e-9, rtol=1e-9)
    # And by torch.autograd.grad, under no_sync, since the parameters' gradients are not asked for.
    s = split.distributed.cut(inputs().requires_grad_())
    for p in split.parameters():
        p.requires_grad_(False)
    (gradient,) = torch.autograd.grad(loss_of(split(s)), s)
    torch.testing.assert_close(whole(gradient), x.grad, atol=1e-9, rtol=1e-9)
    split.distributed.close()


def test_hooks_on_modules_and_tensors(comm):
    def act(model):
        seen = []
        model.body.register_forward_hook(lambda m, args, y: y * 1.5)
        model.head.register_forward_pre_hook(lambda m, args: (args[0] + 1,))

        def half(_module, _args, y):
            y.register_hook(lambda g: g * 0.5)
            y.register_hook(lambda g: seen.append(whole(g.abs().sum())))

        model.norm.register_forward_hook(half)
        loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
        return torch.stack(seen)

    both(act)


def test_backward_hooks_of_modules_are_refused(comm):
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        split = distribute(made(), {"H": -1})
        getattr(split.body, register)(lambda *_: None)
        with pytest.raises(UnsupportedError, match=r"body.*backward hooks.*register_hook"):
            split(inputs())
        with torch.no_grad():
            split(inputs())
        split.distributed.close()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_evaluation_without_a_graph(comm, context):
    def act(model):
        loop(model, torch.optim.SGD(model.parameters(), lr=0.1))
        model.eval()
        with context():
            y = model(inputs(5))
            assert not y.requires_grad
        return whole(y)

    both(act)


def test_copies_of_a_distributed_model(comm):
    alone = made()
    split = distribute(copy.deepcopy(alone), {"H": -1})
    twin = copy.deepcopy(split)
    assert twin.distributed is not split.distributed
    assert twin.stem.weight is not split.stem.weight
    expected = alone(inputs())
    loss_of(expected).backward()
    y = twin(inputs())
    assert isinstance(y, SplitTensor)
    torch.testing.assert_close(whole(y), expected)
    loss_of(y).backward()
    for (name, p), other in zip(twin.named_parameters(), alone.parameters(), strict=True):
        if other.grad is not None:
            torch.testing.assert_close(p.grad, other.grad, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in split.parameters())
    loss_of(split(inputs())).backward()
    for model in (twin, split):
        model.distributed.close()


def test_replicas_of_split_models(comm, P_world):
    if comm.size != 4:
        return
    replica = comm.rank // 2
    ranks = [2 * replica, 2 * replica + 1]
    P_x = P_world.create_partition_inclusive(ranks).create_cartesian_topology_partition((1, 1, 2, 1))
    alone = made()
    alone.norm.eval()
    split = distribute(copy.deepcopy(alone), P_x, reduction="mean", replicas=2)
    split.norm.eval()
    both = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (alone, split)]
    for step in range(STEPS):
        samples = [inputs(2 * step + at) for at in range(2)]
        both[0][1].zero_grad()
        (sum(loss_of(alone(x)) for x in samples) / 2).backward()
        both[0][1].step()
        both[1][1].zero_grad()
        loss_of(split(samples[replica])).backward()
        both[1][1].step()
    alike(split, alone)
    split.distributed.close()


def test_compiled_models_are_refused(comm):
    split = distribute(made(), {"H": -1})
    with pytest.raises(UnsupportedError, match=r"torch\.compile: a distributed model"):
        torch.compile(split, backend="eager")(inputs())
    loss_of(split(inputs())).backward()
    split.distributed.close()
