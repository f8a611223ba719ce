"""Layers in all their forms beside torch's, and what a step of both must have in common."""

from dataclasses import dataclass, field

import torch
from torch import nn

from distdl_rma import Partition, layers, load_global_state_dict, zero_volume_tensor
from tests.layers.partitioned.random_shards import cut, cut_balanced
from tests.layers.partitioned.sequential import agree

IMAGE = (4, 4, 8, 5)
MATRIX = (5, 4, 6)
# In grids: the number of ranks, and two factors of it, the larger one last.
N, LESS, MORE = "ranks", "less", "more"
rows, columns, channels, batches = (1, 1, N, 1), (1, 1, 1, N), (1, N, 1, 1), (N, 1, 1, 1)
features, lines, vectors, pair = (1, 1, N), (1, N, 1), (N, 1, 1), (LESS, 1, MORE)


def sized(grid, n):
    """A grid for so many ranks."""
    less = 2 if n % 2 == 0 else 1
    extents = {N: n, LESS: less, MORE: n // less}
    return tuple(extents.get(each, each) for each in grid)


@dataclass(frozen=True)
class Form:
    """A layer, what its constructor and torch's take, its grids, and the global shape of an input."""

    kind: str
    arguments: tuple = ()
    given: dict = field(default_factory=dict)
    grids: tuple = (rows,)
    named: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)
    shape: tuple = IMAGE
    torchs: str = ""
    # Dimensions whose extents the arguments fix.
    fixed: tuple = (1,)


def _conv(*grids, kind="Conv2d", options=None, **given):
    given = {"padding": 1} | given
    return Form(kind, (4, 4, 3), given, grids or (rows,), options=options or {})


def _linear(kind, *grids, named=None, **options):
    return Form(kind, (6, 5), {}, grids, named or {}, options, MATRIX, "Linear", (2,))


FORMS = {
    "conv": _conv(),
    "root": _conv(options={"weights": "root"}),
    "batches": _conv(batches, stride=2),
    "columns": _conv(columns, stride=(1, 2), dilation=(2, 1), groups=2),
    "circular": _conv(padding_mode="circular"),
    "in-channels": _conv(channels),
    "channel": _conv(channels, channels, (LESS, MORE, 1, 1)),
    "general": _conv(channels, columns, (1, LESS, MORE, 1)),
    "general root": _conv(channels, columns, (1, LESS, MORE, 1), options={"weights": "root"}),
    "grouped": _conv(batches, channels, batches, groups=2),
    "named padding": _conv(padding="same", bias=False),
    "transposed": _conv(kind="ConvTranspose2d"),
    "transposed general": _conv(channels, columns, (LESS, MORE, 1, 1), kind="ConvTranspose2d", stride=2),
    "line": Form("Conv1d", (4, 4, 5), {"padding": 2}, (features,), shape=(3, 4, 9)),
    "transposed line": Form(
        "ConvTranspose1d", (4, 6, 3, 2, 1, 1, 2, True, 2), {}, (features,), shape=(2, 4, 5)
    ),
    # Outputs with the bias only, between ranks too; whole blocks cropped away; outputs that all ranks add to.
    "transposed apart": Form("ConvTranspose1d", (2, 3, 1, 5, 0, 3), {}, (features,), shape=(2, 2, 7)),
    "transposed cropped": Form("ConvTranspose1d", (2, 3, 2, 1, 3), {}, (features,), shape=(2, 2, 8)),
    "transposed wide": Form("ConvTranspose1d", (2, 3, 9), {}, (features,), shape=(2, 2, 4)),
    "AvgPool2d": Form("AvgPool2d", (3, 2, 1)),
    "MaxPool2d": Form("MaxPool2d", (3, 2, 1)),
    "AdaptiveAvgPool2d": Form("AdaptiveAvgPool2d", ((3, 2),)),
    "AdaptiveMaxPool2d": Form("AdaptiveMaxPool2d", ((3, 2),), grids=(columns,)),
    "to other ranks": Form("AvgPool2d", (3, 2, 1), named={"P_y": columns}),
    "ZeroPad2d": Form("ZeroPad2d", ((1, 0, 3, 4),)),
    "ConstantPad2d": Form("ConstantPad2d", ((-1, -2, 2, 3), 2.5)),
    "ReflectionPad2d": Form("ReflectionPad2d", ((1, 0, 3, 2),)),
    "ReplicationPad2d": Form("ReplicationPad2d", ((4, 4, 6, 6),)),
    "CircularPad2d": Form("CircularPad2d", ((0, 1, 3, 2),)),
    "bilinear": Form("Upsample", (None, 2, "bilinear"), named={"P_y": columns}),
    "bicubic": Form("Upsample", ((11, 9), None, "bicubic"), grids=(columns,)),
    "trilinear": Form("Upsample", (None, 1.3, "trilinear"), grids=((1, 1, N, 1, 1),), shape=(2, 2, 5, 4, 3)),
    "linear samples": Form("Upsample", (11, None, "linear"), grids=(features,), shape=(2, 3, 8)),
    "nearest-exact": Form("Upsample", (None, 1.5, "nearest-exact")),
    "nearest": Form("Upsample", (None, 2, "nearest")),
    "batch norm": Form("BatchNorm2d", (4,), {"momentum": 0.3}),
    "batch norm of channels": Form("BatchNorm2d", (4,), {"momentum": None}, (channels,)),
    "instance norm": Form("InstanceNorm2d", (4,), {"affine": True, "track_running_stats": True}),
    "instance norm of lines": Form("InstanceNorm1d", (4,), {}, (features,), shape=(3, 4, 9)),
    "group norm": Form("GroupNorm", (2, 4)),
    "straddling groups": Form("GroupNorm", (1, 4), {}, (channels,)),
    "layer norm": Form("LayerNorm", ((8, 5),), {}, (rows,), fixed=(1, 2, 3)),
    "layer norm of a number": Form("LayerNorm", (5,), {}, (columns,), fixed=(1, 3)),
    "layer norm of batches": Form("LayerNorm", (IMAGE[1:],), {}, (batches,), fixed=(1, 2, 3)),
    "root mean square": Form("RMSNorm", ((8, 5),), {}, (columns,), fixed=(1, 2, 3)),
    "linear": _linear("Linear", pair, features, (LESS, MORE)),
    "linear root": _linear("Linear", features, pair, (MORE, LESS), weights="root"),
    "embedding": Form("Embedding", (7, 3), {"padding_idx": 2}, ((1, N),), shape=(4, 9), fixed=()),
    "embedding root": Form(
        "Embedding", (7, 3), {}, ((N, 1),), options={"weights": "root"}, shape=(4, 9), fixed=()
    ),
}
for _way, _named in (("AllGather", "P_x"), ("ReduceScatter", "P_y")):
    _kind = f"Linear{_way}"
    FORMS[_kind] = _linear(_kind, pair)
    FORMS[f"{_kind}, cut otherwise"] = _linear(_kind, lines, named={_named: features})
    FORMS[f"{_kind} root"] = _linear(_kind, vectors, weights="root")
FORMS |= {
    f"{key}, replicated": Form(
        form.kind, form.arguments, form.given, (channels,), {}, {"placement": "replicated"}
    )
    for key, form in FORMS.items()
    if key in ("batch norm", "instance norm", "group norm")
}
WITHOUT_WEIGHTS = ("Pool2d", "Pad2d", "Upsample")
WEIGHTED = [key for key, form in FORMS.items() if not form.kind.endswith(WITHOUT_WEIGHTS)]
FLOATING = [key for key in FORMS if not key.startswith("embedding")]


class Twins:
    """A layer of a form on some ranks, all of them by default, and torch's with the same weights."""

    def __init__(self, P_world, form, dtype=torch.float64, ranks=None, **options):
        form = FORMS[form] if isinstance(form, str) else form
        kept = not form.kind.endswith(WITHOUT_WEIGHTS)
        some = P_world.create_partition_inclusive(range(P_world.size) if ranks is None else ranks)

        def grid(of):
            """The partition that was given, or one of this shape for so many ranks."""
            partition = isinstance(of, Partition)
            return of if partition else some.create_cartesian_topology_partition(sized(of, some.size))

        self.form, self.dtype = form, dtype
        given = form.given | ({"dtype": dtype} if kept else {})
        named = {key: grid(shape) for key, shape in form.named.items()} | form.options | options
        torch.manual_seed(7)
        kind = getattr(layers, f"Distributed{form.kind}")
        self.layer = kind(*map(grid, form.grids), *form.arguments, **given, **named)
        self.P_x, self.P_y = self.layer.P_x, self.layer.P_y
        torch.manual_seed(7)
        self.twin = getattr(nn, form.torchs or form.kind)(*form.arguments, **given)
        if "Norm" in form.kind and any(True for _ in self.twin.parameters()):
            for parameter in self.twin.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5)
            load_global_state_dict(self.layer, self.twin.state_dict())

    def draw(self, shape=None):
        """A random global input."""
        shape = self.form.shape if shape is None else shape
        if self.form.kind == "Embedding":
            return torch.randint(7, shape)
        return torch.randn(shape, dtype=torch.float64).to(self.dtype)

    def shapes(self):
        """Shapes that may follow each other: another batch, other extents, and back again."""
        for longer in (0, 2, -1, 0):
            yield tuple(n if d in self.form.fixed else n + longer for d, n in enumerate(self.form.shape))

    def into(self, x):
        """This rank's part of a global input."""
        return cut_balanced(self.P_x, x) if self.P_x.active else zero_volume_tensor(len(x), x.dtype)

    def out(self, y):
        """This rank's part of a global output."""
        return cut_balanced(self.P_y, y) if self.P_y.active else y.new_empty(len(y), 0)

    def leaves(self, x):
        """The input of the layer and that of torch's."""
        learns = x.is_floating_point()
        return self.into(x).requires_grad_(learns), x.clone().requires_grad_(learns)

    def step(self, x, *more, same=agree):
        """Output, gradients and running statistics of one call of both, with more arguments."""
        step_of_both(self.layer, self.twin, [x], [self.into], self.out, *more, same=same)

    def compare(self, *leaves, same=agree):
        """Gradients and running statistics, as far as this rank has them."""
        for local, whole in leaves:
            if local.requires_grad and self.P_x.active:
                same(local.grad, self.into(whole.grad), "input gradient")
        compare_state(self.layer, self.twin, same)


def step_of_both(layer, twin, xs, parts, out, *more, needs=None, same=agree):
    """Output, gradients and buffers of one call of a layer, and of torch's with the same weights.

    ``parts`` gives this rank's part of each of the global inputs ``xs`` and of its gradient, ``out`` that of
    the output. ``needs`` says which inputs need a gradient on this rank.
    """
    layer.zero_grad()
    twin.zero_grad()
    needs = [x.is_floating_point() for x in xs] if needs is None else needs
    mine = [part(x).requires_grad_(need) for part, x, need in zip(parts, xs, needs, strict=True)]
    wholes = [x.clone().requires_grad_(x.is_floating_point()) for x in xs]
    y, expected = layer(*mine, *more), twin(*wholes, *more)
    if layer.P_y.active:
        same(y, out(expected), "output")
    assert layer.P_y.active or not y.numel()
    if not y.requires_grad:
        return y
    gradient = torch.randn(expected.shape, dtype=torch.float64).to(expected.dtype)
    expected.backward(gradient)
    y.backward(out(gradient) if layer.P_y.active else torch.zeros_like(y))
    for part, local, whole in zip(parts, mine, wholes, strict=True):
        assert local.requires_grad or local.grad is None, "a gradient that nobody asked for"
        # A rank outside of the partition need not get one.
        if local.grad is not None or (local.requires_grad and local.numel()):
            same(local.grad, part(whole.grad), "input gradient")
    compare_state(layer, twin, same)
    return y


def compare_state(layer, twin, same=agree):
    """Gradients of parameters and buffers, as far as this rank has them."""
    for key, parameter in twin.named_parameters():
        mine = getattr(layer, key)
        if parameter.grad is None:
            assert mine.grad is None or not mine.grad.any(), key
        elif mine.numel():
            same(mine.grad, cut(layer.layouts[key], parameter.grad), f"gradient of {key}")
    for key, buffer in twin.named_buffers():
        store = layer.layouts.get(key)
        same(getattr(layer, key), cut(store, buffer) if store else buffer, key)


class Cat(nn.Module):
    """What a concatenation is the twin of."""

    def forward(self, *xs):
        return torch.cat(xs, 1)
