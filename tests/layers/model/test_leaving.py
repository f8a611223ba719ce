"""What a call of a distributed model leaves in the caller's tensors and in buffers: as the model alone."""

import copy
import io
from collections import OrderedDict

import pytest
import torch
from torch import nn

from distdl_rma import MismatchError, UnsupportedError, gather_state_dict, shard
from tests.layers.split.against_whole import whole

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.sizes(1, 2, 3)]


class Net(nn.Module):
    """Changes what it gets by a function of the test, and convolves the first."""

    def __init__(self, act=None):
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.gain = nn.Conv2d(1, 2, 3, padding=1), nn.Parameter(torch.tensor(1.5))
        self.part = nn.Module()
        self.part.register_buffer("mean", torch.zeros(2))
        self.register_buffer("image", torch.zeros(2, 12, 8))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.act = act

    def forward(self, *args, **kwargs):
        return self.act(self, *args, **kwargs)


def agree(mine, theirs):
    """Types, values, and whether there is a graph."""
    assert type(mine) is type(theirs), (type(mine), type(theirs))
    if isinstance(mine, torch.Tensor):
        assert mine.requires_grad == theirs.requires_grad
        torch.testing.assert_close(mine.detach(), theirs.detach())
    elif isinstance(mine, dict):
        assert [*mine] == [*theirs]
        agree([*mine.values()], [*theirs.values()])
    elif isinstance(mine, (list, tuple)):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            agree(one, other)
    else:
        assert mine == theirs


def image(n=1, **options):
    return torch.randn(n, 1, 12, 8, generator=torch.Generator().manual_seed(n), **options)


def subtracts(net, x):
    x -= x.mean()
    x *= 2
    return net.conv(x)


def writes_rows(net, x):
    x[:, :, 0] = 0
    x[:, :, 1:].mul_(x.amax())
    x.flatten(1)[:, 3] = 5
    return net.conv(x)


def of_two(net, x, other):
    other.add_(x)
    return net.conv(x) + other


def learns(net, x):
    x.mul_(net.gain)
    return net.conv(x)


def nested(net, batch, *, more):
    batch["a"][0].neg_()
    more[0].add_(batch["a"][1][0])
    return net.conv(batch["a"][0]) * more[0]


def puts(net, batch, names):
    names.append(batch["x"].add_(1))
    batch["y"] = net.conv(batch["x"])
    batch["again"] = batch["x"]
    names.reverse()
    del batch["gone"]
    return batch["y"]


def small(net, x, mask):
    mask[2:] = x[0, 0, 2:]
    mask += 1
    return net.conv(x) * mask


# What the model does, and arguments of a call.
CASES = {
    "a function of the whole": (subtracts, lambda: ([image()], {})),
    "parts and views": (writes_rows, lambda: ([image()], {})),
    "a view of the caller's": (subtracts, lambda: ([image(3)[1:2]], {})),
    "transposed in memory": (subtracts, lambda: ([image().mT.contiguous().mT], {})),
    "one of two": (of_two, lambda: ([image(), image(2)[:1]], {})),
    "by name": (of_two, lambda: ([], {"other": image(2), "x": image()})),
    "the same twice": (of_two, lambda: ([x := image(), x], {})),
    "parts of one tensor": (of_two, lambda: ([*image(2).chunk(2)], {})),
    "by what learns": (learns, lambda: ([image()], {})),
    "in containers": (nested, lambda: ([{"a": [image(), (image(2)[:1],)]}], {"more": [image(4)[:1]]})),
    "the containers": (puts, lambda: ([OrderedDict(x=image(), gone=2), ["b"]], {})),
    "what is not cut": (small, lambda: ([image(), torch.ones(12, 8)], {})),
    "of a graph": (subtracts, lambda: ([image(requires_grad=True) * 2], {})),
}


def of_the_caller(args, kwargs):
    """All that the caller holds, also the tensors of which it passes views."""
    bases = [x._base for x in args if isinstance(x, torch.Tensor) and x._base is not None]
    return [*args, *kwargs.values(), *bases]


def told(given):
    """The same with whole tensors for results of the model."""
    if isinstance(given, dict):
        return type(given)((key, told(x)) for key, x in given.items())
    return type(given)(map(told, given)) if isinstance(given, (list, tuple)) else whole(given)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", CASES)
def test_changes_of_inputs_in_place_are_those_of_the_model_alone(split_of, name, mode):
    act, arguments = CASES[name]
    alone = Net(act)
    split = split_of(alone)
    (args, kwargs), (mine, my_kwargs) = arguments(), arguments()
    for _ in range(2):
        with mode():
            expected, y = alone(*args, **kwargs), split(*mine, **my_kwargs)
        torch.testing.assert_close(whole(y).detach(), expected.detach())
        agree(told(of_the_caller(mine, my_kwargs)), of_the_caller(args, kwargs))
        if name in ("the containers", "by what learns", "of a graph"):
            break
    if mode is torch.enable_grad and name != "what is not cut":
        expected.square().sum().backward()
        y.square().sum().backward()
        for one, other in zip(split.parameters(), alone.parameters(), strict=True):
            agree(one.grad, other.grad)


def test_the_caller_keeps_its_tensors_and_a_container_that_does_not_change(split_of):
    x, given = image(), {"a": [image(), (image(2)[:1],)]}
    kept, inner, more = given["a"], given["a"][0], [image()]
    split_of(Net(nested))(given, more=more)
    assert given["a"] is kept and kept[0] is inner and type(inner) is torch.Tensor
    names = ["b"]
    split_of(Net(puts))(given := {"x": x, "gone": 1}, names)
    assert given["x"] is x and given["again"] is x and names[0] is x


def test_memory_of_another_argument_or_a_buffer_that_changes_and_other_shapes_are_refused(split_of):
    x = image()
    net = split_of(Net(lambda net, x, rows: net.conv(x.add_(1)) * rows.sum()))
    with pytest.raises(UnsupportedError, match=r"changes an input of shape \(1, 1, 12, 8\) in place, and"):
        net(x, x[0, 0])
    with torch.no_grad(), pytest.raises(UnsupportedError, match="same memory; pass a clone"):
        net(x, x[:, :, :6])
    net(x, x[0, 0].clone())
    net.act = lambda net, x: net.conv(x.add_(net.image.sum()))
    with pytest.raises(UnsupportedError, match="input, parameter or buffer, of shape"):
        net(net.image[None, :1])
    net.act = lambda net, x: net.conv(x.squeeze_(0)[None])
    with pytest.raises(UnsupportedError):
        net(image())


def average(net, x):
    y = net.conv(x)
    with torch.no_grad():
        net.part.mean = 0.9 * net.part.mean + 0.1 * y.mean((0, 2, 3))
        net.image = 0.9 * net.image + 0.1 * y.mean(0)
        net.hidden = y.amax((0, 2, 3))
    return y - net.part.mean[:, None, None] - net.image


def in_place(net, x):
    y = net.conv(x).detach()
    net.image.mul_(0.5).add_(y[0])
    net.image[:, 1:3] = y[0, :, :2]
    net.part.mean.copy_(y.mean((0, 2, 3)))
    return net.conv(x) + net.image


def in_the_graph(net, x):
    y = net.conv(x)
    net.part.mean = 0.9 * net.part.mean.detach() + 0.1 * y.mean((0, 2, 3))
    net.image = y.mean(0) - net.image.detach()
    return y * net.part.mean[:, None, None] + net.image


def tied(net, x):
    y = net.conv(x)
    net.hidden = net.part.mean = y.detach().mean((0, 2, 3))
    net.image = y.detach()[0]
    return y


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("act", [average, in_place, in_the_graph, tied])
def test_buffers_are_plain_and_those_of_the_model_alone_after_a_call(split_of, act, checks):
    alone = Net(act)
    split = split_of(alone, check_copies=checks)
    for step in range(3):
        for net in (alone, split):
            net.train(step != 1).zero_grad()
        expected, y = alone(image(2)), split(image(2))
        agree(dict(split.named_buffers()), dict(alone.named_buffers()))
        agree(dict(split.state_dict()), dict(alone.state_dict()))
        expected.square().sum().backward()
        y.square().sum().backward()
        agree([p.grad for p in split.parameters()], [p.grad for p in alone.parameters()])
    file = io.BytesIO()
    torch.save(split.state_dict(), file)
    agree(gather_state_dict(split), dict(alone.state_dict()))
    assert (split.hidden is split.part.mean) == (alone.hidden is alone.part.mean)
    if act is not in_the_graph:
        agree(dict(copy.deepcopy(split).named_buffers()), dict(alone.named_buffers()))
    split.distributed.close()
    agree(split(image()), alone(image()))


def test_a_graph_through_buffers_of_several_calls_is_that_of_the_model_alone(split_of):
    def remembers(net, x):
        net.image = torch.tanh(net.conv(x)[0] + net.image)
        net.part.mean = net.image.mean((1, 2)) + net.part.mean
        return net.image * net.part.mean[:, None, None]

    alone = Net(remembers)
    split = split_of(alone)
    for net in (alone, split):
        for n in range(3):
            y = net(image(n + 1))
        whole(y).square().sum().backward()
    agree([p.grad for p in split.parameters()], [p.grad for p in alone.parameters()])


def test_a_buffer_that_is_assigned_outside_of_a_call_is_plain_in_the_state_or_refused(split_of):
    net = split_of(Net(average))
    rows = shard({"H": -1}, image())
    net.part.mean = rows.mean() * torch.ones(2)
    agree(net.state_dict()["part.mean"], image().mean() * torch.ones(2))
    net.image = rows[0].expand(2, -1, -1)
    if rows.is_split:
        with pytest.raises(UnsupportedError, match=r"buffer 'image' is a split tensor.* full_tensor\(\)"):
            net.state_dict()
        with pytest.raises(UnsupportedError, match="buffer 'image'"):
            net.distributed.close()
        assert not hasattr(net, "distributed")


@pytest.mark.mpi(min_size=2)
def test_a_buffer_that_one_rank_assigns_is_a_mismatch(split_of, odd):
    def act(net, x):
        y = net.conv(x)
        image = y[0].detach()
        if odd:
            net.image = image
        return y

    net = split_of(Net(act))
    with pytest.raises(MismatchError, match=r"a change of buffer 'image': \(2, 12, 8\) of torch.float32"):
        net(image())
    net.act, net.image = average, torch.zeros(2, 12, 8)
    net(image())
    assert type(net.image) is torch.Tensor


def test_ranks_may_call_the_model_in_different_lines(split_of, comm):
    net = split_of(Net(average))
    y = net(image()) if comm.rank else None
    y = net(image()) if y is None else y
    assert type(net.image) is torch.Tensor and y.shape == (1, 2, 12, 8)


def test_a_call_that_raises_leaves_buffers_to_the_next_one(split_of):
    def act(net, x):
        y = average(net, x)
        if net.training:
            raise ValueError("no")
        return y

    net = split_of(Net(act))
    with pytest.raises(ValueError, match="no"):
        net(image())
    net.eval()(image())
    assert type(net.image) is torch.Tensor and type(net.part.mean) is torch.Tensor
