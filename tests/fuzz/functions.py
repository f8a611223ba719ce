"""Random calls of torch's functions as text: each kind draws one for a tensor of some shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

POINTWISE = [
    "sin",
    "tanh",
    "sigmoid",
    "exp",
    "abs",
    "neg",
    "square",
    "relu",
    "atan",
    "erf",
    "sign",
    "floor",
    "reciprocal",
]
ACTIVATIONS = [
    "relu",
    "gelu",
    "silu",
    "elu",
    "leaky_relu",
    "softplus",
    "hardtanh",
    "softsign",
    "mish",
    "celu",
    "selu",
    "logsigmoid",
]
REDUCTIONS = [
    "sum",
    "mean",
    "amax",
    "amin",
    "prod",
    "var",
    "std",
    "logsumexp",
    "norm",
    "nansum",
    "count_nonzero",
    "any",
    "all",
    "max",
    "min",
    "median",
    "aminmax",
]
LOSSES = ["mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"]


class Scope:
    """Names of the tensors of a program so far, and plain ones that its calls ask for."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, torch.Tensor] = {}
        self.split: dict[str, torch.Tensor] = {}
        # Names of what split tensors went into: of plain tensors alone every rank makes all.
        self.of_split: list[str] = []

    def parameter(self, *shape: int) -> str:
        """A plain tensor, that mostly needs a gradient."""
        name = f"p{len(self.plain)}"
        made = torch.randn(shape, dtype=torch.float64).mul_(0.7)
        self.tensors[name] = self.plain[name] = made.requires_grad_(self.rng.random() < 0.8)
        return name

    def input(self, *shape: int) -> str:
        """A tensor that is to be split."""
        name = f"x{len(self.split)}"
        made = torch.randn(shape, dtype=torch.float64)
        self.tensors[name] = self.split[name] = made.requires_grad_(self.rng.random() < 0.8)
        return name

    def like(self, *shape: int) -> str:
        """A tensor of this shape: one that is there, a split or a plain one."""
        there = [n for n, x in self.tensors.items() if tuple(x.shape) == shape and x.dtype == torch.float64]
        if there and self.rng.random() < 0.5:
            return self.rng.choice(there)
        return self.input(*shape) if self.rng.random() < 0.4 else self.parameter(*shape)

    def some(self, chance: float, text: str) -> str:
        """A text or nothing."""
        return text if self.rng.random() < chance else ""


Draw = Callable[[Scope, str, torch.Tensor], str | None]


def _dim(s: Scope, x: torch.Tensor) -> int:
    return s.rng.randint(-x.dim(), x.dim() - 1) if x.dim() else s.rng.choice([0, -1])


def _dims(s: Scope, x: torch.Tensor) -> list[int]:
    some = s.rng.sample(range(x.dim()), s.rng.randint(min(1, x.dim()), x.dim()))
    return [d - x.dim() if s.rng.random() < 0.4 else d for d in some]


def _numbers(s: Scope, low: int, high: int, count: int) -> Any:
    if s.rng.random() < 0.4:
        return s.rng.randint(low, high)
    return tuple(s.rng.randint(low, high) for _ in range(count))


def pointwise(s: Scope, v: str, x: torch.Tensor) -> str:
    if s.rng.random() < 0.4:
        return f"F.{s.rng.choice(ACTIVATIONS)}({v})"
    name = s.rng.choice(POINTWISE)
    if name in ("exp", "reciprocal"):
        return f"torch.{name}({v}.clamp(-3, 3){'' if name == 'exp' else '.abs() + 0.5'})"
    return f"torch.{name}({v})" if s.rng.random() < 0.5 else f"{v}.{name}()"


def broadcast(s: Scope, v: str, x: torch.Tensor) -> str:
    shape = [1 if s.rng.random() < 0.4 else n for n in x.shape][s.rng.randint(0, x.dim()) :]
    if s.rng.random() < 0.2:
        shape = [s.rng.randint(1, 4), *x.shape][-5:]
    if s.rng.random() < 0.03:
        shape = [*shape, 4]
    other = s.like(*shape)
    if s.rng.random() < 0.25:
        bool_ = s.rng.choice([f"({v} > {other})", f"({other} > 0)"])
        return s.rng.choice(
            [
                f"torch.where({bool_}, {v}, {other})",
                f"torch.where({bool_}, {v}, 0.5)",
                f"{v}.masked_fill({bool_}, 1.5)",
                f"torch.lerp({v}, {other}, 0.3)",
            ]
        )
    one, two = s.rng.sample([v, other], 2)
    return s.rng.choice(
        [
            f"{one} + {two}",
            f"{one} * {two}",
            f"{one} - {two}",
            f"{one} / ({two}.abs() + 1)",
            f"torch.maximum({one}, {two})",
            f"torch.add({one}, {two}, alpha=2)",
            f"torch.hypot({one}, {two})",
            f"torch.addcmul({v}, {one}, {two}, value=0.5)",
            f"torch.atan2({one}, {two})",
            f"{one}.rsub({two})",
            f"2 - {one}",
            f"{one} ** 2",
            f"1.5 * {one}",
            f"{one} + True",
            f"1 / (1 + {one} * {one})",
        ]
    )


def in_place(s: Scope, v: str, x: torch.Tensor) -> str:
    made = s.rng.choice([f"({v} * 1.0)", f"{v}.clone()"])
    other = s.like(*[1 if s.rng.random() < 0.3 else n for n in x.shape])
    index = s.rng.choice(["", "", f"[{_index(s, x)}]"])
    if index and s.rng.random() < 0.5:
        value = s.rng.choice(["1.5", f"{made}{index} * 2", s.like(*x.shape[1:])])
        return f"wrote({made}, lambda t: t.__setitem__({index[1:-1]}, {value}))"
    change = s.rng.choice(
        [
            "mul_(2.)",
            f"add_({other})",
            f"mul_({other})",
            "relu_()",
            "zero_()",
            "sub_(1., alpha=2)",
            "tanh_()",
            "fill_(0.5)",
            "clamp_(-0.5, 0.5)",
            f"copy_({other})",
            f"masked_fill_({other} > 0, 0.1)",
            f"div_({other}.abs() + 1)",
            f"addcmul_({other}, {other})",
            "neg_()",
            "exp_()",
        ]
    )
    if s.rng.random() < 0.1:
        return f"F.{s.rng.choice(['relu', 'elu', 'hardtanh', 'leaky_relu'])}({made}, inplace=True)"
    view = s.rng.choice(["", "", ".view(-1)", ".transpose(0, -1)", ".unsqueeze(0)", ".flatten()", ".T"])
    return f"wrote({made}, lambda t: t{index}{view}.{change})"


def reduction(s: Scope, v: str, x: torch.Tensor) -> str:
    name = s.rng.choice(REDUCTIONS)
    keep = s.some(0.4, "keepdim=True")
    if name in ("max", "min", "median", "aminmax"):
        if s.rng.random() < 0.3 and name != "aminmax":
            return f"{v}.{name}()"
        dim = f"{'dim=' if name == 'aminmax' else ''}{_dim(s, x)}"
        return f"torch.{name}({v}, {dim}{', ' + keep if keep else ''})[0]"
    if name in ("any", "all", "count_nonzero"):
        if name == "count_nonzero":
            return f"torch.count_nonzero({v} > 0, {_dim(s, x)}).double()"
        return f"torch.{name}({v} > 0, {_dim(s, x)}{', ' + keep if keep else ''}).double()"
    if name == "prod":
        return f"torch.prod({v}, {_dim(s, x)}{', ' + keep if keep else ''})"
    extra = {"var": s.some(0.5, "correction=0"), "std": s.some(0.5, "unbiased=False")}.get(name, "")
    if name == "norm":
        order = s.rng.choice(["2", "1", "3.", "float('inf')"])
        dims = s.rng.choice([_dim(s, x), None, tuple(_dims(s, x)[:2])])
        return f"torch.linalg.vector_norm({v}, {order}, dim={dims}{', ' + keep if keep else ''})"
    if s.rng.random() < 0.25 and name != "logsumexp":
        return f"{v}.{name}()"
    dim = s.rng.choice([_dim(s, x), tuple(_dims(s, x))])
    return f"{v}.{name}(dim={dim}{''.join(f', {each}' for each in (keep, extra) if each)})"


def along(s: Scope, v: str, x: torch.Tensor) -> str:
    d = _dim(s, x)
    return s.rng.choice(
        [
            f"F.softmax({v}, {d})",
            f"{v}.log_softmax(dim={d})",
            f"F.softmin({v}, dim={d})",
            f"{v}.cumsum({d})",
            f"torch.cumprod({v}.clamp(-1, 1), {d})",
            f"F.normalize({v}, dim={d})",
            f"{v}.sort(dim={d})[0]",
            f"{v}.topk(min(2, {v}.shape[{d}]), {d})[0]",
            f"torch.logcumsumexp({v}, {d})",
            f"{v}.diff(dim={d})",
            f"F.glu({v}, {d})",
            f"{v}.renorm(2, {d}, 1.)",
            f"{v}.cummax({d})[0]",
        ]
    )


def norm(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if x.dim() < 2:
        return f"F.layer_norm({v}, {list(x.shape)})"
    c = x.shape[1]
    affine = f"weight={s.parameter(c)}, bias={s.parameter(c)}" if s.rng.random() < 0.5 else ""
    tail = list(x.shape[s.rng.randint(0, x.dim() - 1) :])
    groups = s.rng.choice([g for g in range(1, c + 1) if c % g == 0] or [1])
    weights = s.some(0.5, f", {s.parameter(*tail)}, {s.parameter(*tail)}")
    return s.rng.choice(
        [
            f"F.batch_norm({v}, None, None, {affine + ', ' if affine else ''}training=True)",
            f"F.instance_norm({v}{', ' + affine if affine else ''})",
            f"F.group_norm({v}, {groups}{', ' + affine if affine else ''})",
            f"F.layer_norm({v}, {tail}{weights})",
            f"F.rms_norm({v}, {tail})",
            f"F.local_response_norm({v}, {s.rng.randint(1, 4)})",
        ]
    )


def convolution(s: Scope, v: str, x: torch.Tensor) -> str | None:
    space = x.dim() - 2
    if not 1 <= space <= 3 or not x.shape[1]:
        return None
    c = x.shape[1]
    groups = s.rng.choice([1, 1, *(g for g in range(1, c + 1) if c % g == 0)])
    kernel = [s.rng.randint(1, 4) for _ in range(space)]
    stride, dilation = _numbers(s, 1, 3, space), s.rng.choice([1, 1, _numbers(s, 1, 2, space)])
    padding: Any = _numbers(s, 0, 3, space)
    out = groups * s.rng.randint(1, 3)
    bias = s.some(0.5, f", bias={s.parameter(out)}")
    if s.rng.random() < 0.3:
        weight = s.like(c, out // groups, *kernel)
        output = s.some(0.3, f", output_padding={_numbers(s, 0, 1, space)}")
        arguments = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}{output}"
        return f"F.conv_transpose{space}d({v}, {weight}{bias}, {arguments})"
    weight = s.parameter(out, c // groups, *kernel)
    if s.rng.random() < 0.15:
        stride, padding = 1, s.rng.choice(["'same'", "'valid'"])
    arguments = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}"
    return f"F.conv{space}d({v}, {weight}{bias}, {arguments})"


def pool(s: Scope, v: str, x: torch.Tensor) -> str | None:
    space = x.dim() - 2
    if x.dim() < 2 or space > 3:
        return None
    space = space or 1
    kernel = _numbers(s, 1, 4, space)
    stride = s.some(0.7, f", stride={_numbers(s, 1, 3, space)}")
    pad = s.some(0.5, f", padding={_numbers(s, 0, 2, space)}")
    ceil = s.some(0.3, ", ceil_mode=True")
    sizes = s.rng.choice([_numbers(s, 1, 5, space), s.rng.randint(1, 4)])
    return s.rng.choice(
        [
            f"F.max_pool{space}d({v}, {kernel}{stride}{pad}{s.some(0.2, ', dilation=2')}{ceil})",
            f"F.avg_pool{space}d({v}, {kernel}{stride}{pad}{ceil}{s.some(0.3, ', count_include_pad=False')})",
            f"F.adaptive_avg_pool{space}d({v}, {sizes})",
            f"F.adaptive_max_pool{space}d({v}, {sizes})",
            f"F.lp_pool{space}d({v}, 2., {kernel}{stride}{ceil})",
        ]
    )


def pad(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if not x.dim():
        return None
    mode = s.rng.choice(["constant", "constant", "reflect", "replicate", "circular"])
    count = (
        s.rng.randint(1, x.dim()) if mode == "constant" else min(3, max(1, x.dim() - s.rng.choice([1, 2])))
    )
    # Where torch cuts and pads in other modes it reads memory that is not the tensor's.
    low = -2 if mode == "constant" and s.rng.random() < 0.4 else 0
    widths = [s.rng.randint(low, 3) for _ in range(2 * count)]
    value = s.some(0.5, ", value=0.7") if mode == "constant" else ""
    return f"F.pad({v}, {widths}, mode={mode!r}{value})"


def interpolate(s: Scope, v: str, x: torch.Tensor) -> str | None:
    space = x.dim() - 2
    if not 1 <= space <= 3:
        return None
    modes = ["nearest", "nearest-exact", "area", ["linear", "bilinear", "trilinear"][space - 1]]
    mode = s.rng.choice(modes + (["bicubic"] if space == 2 else []))
    if s.rng.random() < 0.5:
        size = f"size={_numbers(s, 1, 9, space)}"
    else:
        size = f"scale_factor={s.rng.choice([2, 1.5, 0.5, 3, 0.7, 1])}"
    corners = s.some(0.4, ", align_corners=True") if "linear" in mode or mode == "bicubic" else ""
    return f"F.interpolate({v}, {size}, mode={mode!r}{corners})"


def _index(s: Scope, x: torch.Tensor) -> str:
    given = []
    dims = [int(n) for n in x.shape]
    count = s.rng.randint(0, len(dims))
    for n in dims[:count]:
        kind = s.rng.random()
        if kind < 0.25 and n:
            given.append(str(s.rng.randint(-n, n - 1)))
        elif kind < 0.9:
            one, two = (s.rng.choice(["", str(s.rng.randint(-n - 1, n + 1))]) for _ in range(2))
            given.append(f"{one}:{two}" + s.some(0.3, f":{s.rng.randint(1, 3)}"))
        else:
            given.append(":")
    if s.rng.random() < 0.3:
        given.insert(s.rng.randint(0, len(given)), "None")
    if s.rng.random() < 0.3:
        given.insert(s.rng.choice([0, len(given)]), "...")
    as_text = ", ".join(given or ["..."])
    parts = []
    for each in as_text.split(", "):
        if ":" in each:
            parts.append(f"slice({', '.join(part or 'None' for part in each.split(':'))})")
        else:
            parts.append(each)
    return f"({', '.join(parts)},)"


def index(s: Scope, v: str, x: torch.Tensor) -> str:
    if not x.dim() or s.rng.random() < 0.75:
        return f"{v}[{_index(s, x)}]"
    d = s.rng.randrange(x.dim())
    n = max(int(x.shape[d]), 1)
    chosen = [s.rng.randint(-n, n - 1) for _ in range(s.rng.randint(1, 4))]
    positive = [i % n for i in chosen]
    return s.rng.choice(
        [
            f"{v}.narrow({d}, {s.rng.randint(0, n - 1)}, 1)",
            f"{v}.select({d}, {chosen[0]})",
            f"{v}.index_select({d}, torch.tensor({positive}))",
            f"{v}[{':, ' * d}torch.tensor({chosen})]",
            f"{v}[{':, ' * d}{chosen}]",
            f"{v}.unbind({d})[{chosen[0]}]",
            f"[*{v}][{s.rng.randint(0, max(int(x.shape[0]) - 1, 0))}]",
            f"{v}.index_add({d}, torch.tensor({positive}), {v}.index_select({d}, torch.tensor({positive})))",
            f"torch.gather({v}, {d}, {v}.argsort({d}))",
            f"{v}.index_fill({d}, torch.tensor({positive}), 0.3)",
            f"torch.take_along_dim({v}, {v}.argmax({d}, keepdim=True), {d})",
        ]
    )


def _factors(s: Scope, n: int, count: int) -> list[int]:
    shape = []
    for _ in range(count - 1):
        found = s.rng.choice([f for f in range(1, max(n, 1) + 1) if n % f == 0]) if n else 1
        shape.append(found)
        n //= found
    shape.append(n)
    s.rng.shuffle(shape)
    return shape


def shape(s: Scope, v: str, x: torch.Tensor) -> str:
    order = s.rng.sample(range(x.dim()), x.dim())
    a, b = sorted((_dim(s, x) % max(x.dim(), 1), _dim(s, x) % max(x.dim(), 1)))
    new = _factors(s, x.numel(), s.rng.randint(1, 5))
    guessed = list(new)
    guessed[s.rng.randrange(len(new))] = -1
    wide = [s.rng.choice([2, 3, n]) if n == 1 else s.rng.choice([n, -1]) for n in x.shape]
    longer = [s.rng.randint(1, 3), *wide] if x.dim() < 5 else wide
    texts = [
        f"{v}.permute({order})",
        f"{v}.flatten({a}, {b})",
        f"{v}.reshape({new})",
        f"{v}.reshape({guessed})",
    ]
    texts += [f"{v}.view({guessed})", f"{v}.expand({longer})", f"{v}.squeeze()", f"{v}.movedim({a}, {b})"]
    texts += [f"{v}.transpose({a}, {-1 - s.rng.randrange(max(x.dim(), 1))})", f"{v}.unsqueeze({_dim(s, x)})"]
    texts += [f"{v}.repeat({[s.rng.randint(1, 2) for _ in range(max(x.dim(), 1))]})", f"{v}.squeeze({a})"]
    texts += [
        f"{v}.roll({s.rng.randint(-5, 5)}, {a})",
        f"{v}.roll({s.rng.randint(-5, 5)})",
        f"{v}.flip({[a]})",
    ]
    texts += [
        f"{v}.roll({(s.rng.randint(-4, 4), s.rng.randint(-4, 4))}, {(a, b)})",
        f"{v}.mT",
        f"{v}.ravel()",
    ]
    texts += [f"{v}.unfold({a}, {s.rng.randint(1, 3)}, {s.rng.randint(1, 2)})", f"torch.triu({v}, {a - b})"]
    texts += [f"{v}.diagonal({s.rng.randint(-1, 1)}, {a}, {b})", f"{v}.repeat_interleave({a + 1}, {a})"]
    texts += [f"{v}.unflatten({a}, {_factors(s, int(x.shape[a]) if x.dim() else 1, 2)})", f"torch.rot90({v})"]
    texts += [f"F.pixel_shuffle({v}, 2)", f"F.pixel_unshuffle({v}, 2)", f"{v}.contiguous()", f"{v}.detach()"]
    texts += [f"F.unfold({v}, {s.rng.randint(1, 3)}, padding={s.rng.randint(0, 1)})", f"{v}.float().double()"]
    texts += [f"F.channel_shuffle({v}, {a + 1})", f"{v}.tile(({s.rng.randint(1, 2)}, 2))"]
    return s.rng.choice(texts)


def joining(s: Scope, v: str, x: torch.Tensor) -> str:
    d = _dim(s, x)
    shape = list(x.shape)
    if shape and s.rng.random() < 0.7:
        shape[d] = s.rng.randint(0, 4)
    others = [s.like(*shape)] + ([v] if s.rng.random() < 0.4 else [])
    many = [v, *others]
    s.rng.shuffle(many)
    same = s.like(*x.shape)
    n = s.rng.randint(1, 4)
    texts = [f"torch.cat([{', '.join(many)}], {d})", f"torch.stack([{v}, {same}], dim={d})"]
    texts += [
        f"torch.chunk({v}, {n}, {d})[-1]",
        f"{v}.split({n}, dim={d})[0]",
        f"torch.hstack([{', '.join(many)}])",
    ]
    texts += [
        f"torch.cat({v}.chunk({n}, {d})[::-1], {d})",
        f"{v}.tensor_split({n}, {d})[{s.rng.randint(-1, 0)}]",
    ]
    texts += [f"sum({v}.unbind({d}))", f"torch.vstack(({v}, {same}))"]
    return s.rng.choice(texts)


def contraction(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if not x.dim():
        return None
    n, k = int(x.shape[-1]), s.rng.randint(1, 5)
    batch = [1 if s.rng.random() < 0.3 else m for m in x.shape[:-2]] if s.rng.random() < 0.6 else []
    bias = s.some(0.5, f", {s.parameter(k)}")
    texts = [f"F.linear({v}, {s.like(k, n)}{bias})", f"{v} @ {s.like(*batch, n, k)}", f"{v} @ {s.like(n)}"]
    texts += [
        f"torch.einsum('...i,ij->...j', {v}, {s.like(n, k)})",
        f"{s.like(k, int(x.shape[-2:][0]))} @ {v}",
    ]
    texts += [f"torch.einsum('...i,...i->...', {v}, {v})", f"torch.einsum('i...->...', {v})"]
    texts += [f"torch.tensordot({v}, {s.like(n, k)}, 1)", f"{v} @ {v}.mT", f"torch.matmul({v}.mT, {v})"]
    if x.dim() == 3:
        texts += [
            f"torch.bmm({v}, {s.like(int(x.shape[0]), n, k)})",
            f"torch.einsum('bij,bkj->bik', {v}, {v})",
        ]
        texts += [f"torch.baddbmm({s.like(k)}, {v}, {s.like(int(x.shape[0]), n, k)})"]
    if x.dim() == 2:
        texts += [f"torch.addmm({s.like(k)}, {v}, {s.like(n, k)})", f"torch.cdist({v}, {s.like(k, n)})"]
        texts += [f"F.bilinear({v}, {s.like(*x.shape)}, {s.parameter(k, n, n)})"]
    if x.dim() in (3, 4):
        texts += [f"F.scaled_dot_product_attention({v}, {v}, {s.like(*x.shape[:-1], k)})"]
    if x.dim() == 1:
        texts += [f"torch.dot({v}, {s.like(n)})", f"torch.outer({v}, {s.like(k)})"]
    return s.rng.choice(texts)


def loss(s: Scope, v: str, x: torch.Tensor) -> str:
    how = s.rng.choice(["'mean'", "'sum'", "'none'"])
    target = s.like(*x.shape)
    texts = [f"F.{s.rng.choice(LOSSES)}({v}, {target}, reduction={how})"]
    texts += [f"F.binary_cross_entropy_with_logits({v}, torch.sigmoid({target}), reduction={how})"]
    texts += [f"F.kl_div(F.log_softmax({v}, -1), torch.softmax({target}, -1), reduction={how})"]
    if x.dim() >= 2 and x.shape[1]:
        classes = list(range(int(x.shape[1])))
        shape = [int(x.shape[0]), *x.shape[2:]]
        numbers = [s.rng.choice(classes) for _ in range(torch.Size(shape).numel())]
        labels = f"torch.tensor({numbers}, dtype=torch.int64).reshape({shape})"
        extra = s.some(0.3, f", weight={s.parameter(len(classes))}.detach().abs() + 0.1")
        extra += s.some(0.2, ", label_smoothing=0.2") + s.some(0.2, ", ignore_index=0")
        texts += [f"F.cross_entropy({v}, {labels}{extra}, reduction={how})"] * 2
        texts += [f"F.cross_entropy({v}, torch.softmax({target}, 1), reduction={how})"]
        texts += [
            f"F.cosine_similarity({v}, {target}, dim={_dim(s, x)})",
            f"F.pairwise_distance({v}, {target})",
        ]
    return s.rng.choice(texts)


def fourier(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if not x.dim():
        return None
    d, dims = _dim(s, x), _dims(s, x)
    real = s.rng.choice(["real", "imag", "abs()"])
    texts = [f"torch.fft.fft({v}, dim={d}).{real}", f"torch.fft.rfft({v}, dim={d}).{real}"]
    texts += [
        f"torch.fft.irfft(torch.fft.rfft({v}, dim={d}), dim={d})",
        f"torch.fft.fftn({v}, dim={dims}).real",
    ]
    texts += [f"torch.fft.fft({v}, n={s.rng.randint(1, 9)}, dim={d}, norm='ortho').real"]
    texts += [f"torch.fft.rfft2({v}).real", f"torch.fft.fftshift({v}, dim={d})"]
    return s.rng.choice(texts)


def drawn(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if x.dim() not in (3, 4, 5):
        return None
    return f"seeded({s.rng.randint(0, 99)}) or F.dropout{x.dim() - 2}d({v}, 0.5)"


def moved(s: Scope, v: str, x: torch.Tensor) -> str:
    chosen = s.rng.sample([*range(x.dim()), *[None] * 3], 3)
    return f"moved({v}, {chosen})"


KINDS: dict[Draw, int] = {
    pointwise: 3, broadcast: 4, in_place: 3, reduction: 3, along: 2, norm: 2, convolution: 3, pool: 2, pad: 2,
    interpolate: 2, index: 4, shape: 5, joining: 3, contraction: 3, loss: 1, fourier: 1, drawn: 1, moved: 1,
}  # fmt: skip


def call(s: Scope, v: str) -> str | None:
    """A random call on the tensor of a name; None where the kind that was drawn has none for its shape."""
    (kind,) = s.rng.choices(list(KINDS), list(KINDS.values()))
    return kind(s, v, s.tensors[v])
