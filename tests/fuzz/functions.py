"""Random calls of torch's functions as text: each kind draws one for a tensor of some shape."""

from __future__ import annotations

from typing import Any

import torch

from tests.fuzz.places import _index, index, joining, shape
from tests.fuzz.scope import Draw, Scope, numbers, one_dim, some_dims

POINTWISE = "sin tanh sigmoid exp abs neg square relu atan erf sign floor reciprocal"
ACTIVATIONS = "relu gelu silu elu leaky_relu softplus hardtanh softsign mish celu selu logsigmoid"
REDUCTIONS = (
    "sum mean amax amin prod var std logsumexp norm nansum count_nonzero any all max min median aminmax"
)
LOSSES = "mse_loss l1_loss smooth_l1_loss huber_loss"


def pointwise(s: Scope, v: str, x: torch.Tensor) -> str:
    if s.rng.random() < 0.4:
        return f"F.{s.one_of(ACTIVATIONS, None)}({v})"
    name = s.one_of(POINTWISE, None)
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
        bool_ = s.one_of(f"({v} > {other}); ({other} > 0)")
        return s.one_of(
            f"torch.where({bool_}, {v}, {other}); torch.where({bool_}, {v}, 0.5); "
            f"{v}.masked_fill({bool_}, 1.5); torch.lerp({v}, {other}, 0.3)"
        )
    one, two = s.rng.sample([v, other], 2)
    return s.one_of(
        f"{one} + {two}; {one} * {two}; {one} - {two}; {one} / ({two}.abs() + 1); "
        f"torch.maximum({one}, {two}); torch.add({one}, {two}, alpha=2); torch.hypot({one}, {two}); "
        f"torch.addcmul({v}, {one}, {two}, value=0.5); torch.atan2({one}, {two}); {one}.rsub({two}); "
        f"2 - {one}; {one} ** 2; 1.5 * {one}; {one} + True; 1 / (1 + {one} * {one})"
    )


def in_place(s: Scope, v: str, x: torch.Tensor) -> str:
    # Torch flattens what lies otherwise in memory to a copy, not to a view.
    made = s.one_of(f"({v}.contiguous() * 1.0); {v}.contiguous().clone()")
    other = s.like(*[1 if s.rng.random() < 0.3 else n for n in x.shape])
    index = s.rng.choice(["", "", f"[{_index(s, x)}]"])
    if index and s.rng.random() < 0.5:
        value = s.one_of(f"1.5; {made}{index} * 2; {s.like(*x.shape[1:])}")
        return f"wrote({made}, lambda t: t.__setitem__({index[1:-1]}, {value}))"
    change = s.one_of(
        f"mul_(2.); add_({other}); mul_({other}); relu_(); zero_(); sub_(1., alpha=2); tanh_(); fill_(0.5); "
        f"clamp_(-0.5, 0.5); copy_({other}); masked_fill_({other} > 0, 0.1); div_({other}.abs() + 1); "
        f"addcmul_({other}, {other}); neg_(); exp_()"
    )
    if s.rng.random() < 0.1:
        return f"F.{s.rng.choice(['relu', 'elu', 'hardtanh', 'leaky_relu'])}({made}, inplace=True)"
    view = s.rng.choice(["", "", ".view(-1)", ".transpose(0, -1)", ".unsqueeze(0)", ".flatten()", ".T"])
    return f"wrote({made}, lambda t: t{index}{view}.{change})"


def reduction(s: Scope, v: str, x: torch.Tensor) -> str:
    name = s.one_of(REDUCTIONS, None)
    keep = s.some(0.4, "keepdim=True")
    if name in ("max", "min", "median", "aminmax"):
        if s.rng.random() < 0.3 and name != "aminmax":
            return f"{v}.{name}()"
        dim = f"{'dim=' if name == 'aminmax' else ''}{one_dim(s, x)}"
        return f"torch.{name}({v}, {dim}{', ' + keep if keep else ''})[0]"
    if name in ("any", "all", "count_nonzero"):
        if name == "count_nonzero":
            return f"torch.count_nonzero({v} > 0, {one_dim(s, x)}).double()"
        return f"torch.{name}({v} > 0, {one_dim(s, x)}{', ' + keep if keep else ''}).double()"
    if name == "prod":
        return f"torch.prod({v}, {one_dim(s, x)}{', ' + keep if keep else ''})"
    extra = {"var": s.some(0.5, "correction=0"), "std": s.some(0.5, "unbiased=False")}.get(name, "")
    if name == "norm":
        order = s.rng.choice(["2", "1", "3.", "float('inf')"])
        dims = s.rng.choice([one_dim(s, x), None, tuple(some_dims(s, x)[:2])])
        return f"torch.linalg.vector_norm({v}, {order}, dim={dims}{', ' + keep if keep else ''})"
    if s.rng.random() < 0.25 and name != "logsumexp":
        return f"{v}.{name}()"
    dim = s.rng.choice([one_dim(s, x), tuple(some_dims(s, x))])
    return f"{v}.{name}(dim={dim}{''.join(f', {each}' for each in (keep, extra) if each)})"


def along(s: Scope, v: str, x: torch.Tensor) -> str:
    d = one_dim(s, x)
    return s.one_of(
        f"F.softmax({v}, {d}); {v}.log_softmax(dim={d}); F.softmin({v}, dim={d}); {v}.cumsum({d}); "
        f"torch.cumprod({v}.clamp(-1, 1), {d}); F.normalize({v}, dim={d}); {v}.sort(dim={d})[0]; "
        f"{v}.topk(min(2, {v}.shape[{d}]), {d})[0]; torch.logcumsumexp({v}, {d}); {v}.diff(dim={d}); "
        f"F.glu({v}, {d}); {v}.renorm(2, {d}, 1.); {v}.cummax({d})[0]"
    )


def norm(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if x.dim() < 2:
        return f"F.layer_norm({v}, {list(x.shape)})"
    c = x.shape[1]
    affine = f"weight={s.parameter(c)}, bias={s.parameter(c)}" if s.rng.random() < 0.5 else ""
    tail = list(x.shape[s.rng.randint(0, x.dim() - 1) :])
    groups = s.rng.choice([g for g in range(1, c + 1) if c % g == 0] or [1])
    weights = s.some(0.5, f", {s.parameter(*tail)}, {s.parameter(*tail)}")
    # Torch's own gradients of batch norms may be wrong elsewhere.
    batch = f"F.batch_norm({v}, None, None, {affine + ', ' if affine else ''}training=True); "
    return s.one_of(
        f"{batch * (x.shape[0] > 1 and x.shape[-1] > 1)}"
        f"F.instance_norm({v}{', ' + affine if affine else ''}); "
        f"F.group_norm({v}, {groups}{', ' + affine if affine else ''}); F.layer_norm({v}, {tail}{weights}); "
        f"F.rms_norm({v}, {tail}); F.local_response_norm({v}, {s.rng.randint(1, 4)})"
    )


def convolution(s: Scope, v: str, x: torch.Tensor) -> str | None:
    space = x.dim() - 2
    if not 1 <= space <= 3 or not x.shape[1]:
        return None
    c = x.shape[1]
    groups = s.rng.choice([1, 1, *(g for g in range(1, c + 1) if c % g == 0)])
    kernel = [s.rng.randint(1, 4) for _ in range(space)]
    stride, dilation = numbers(s, 1, 3, space), s.rng.choice([1, 1, numbers(s, 1, 2, space)])
    padding: Any = numbers(s, 0, 3, space)
    out = groups * s.rng.randint(1, 3)
    bias = s.some(0.5, f", bias={s.parameter(out)}")
    if s.rng.random() < 0.3:
        weight = s.like(c, out // groups, *kernel)
        output = s.some(0.3, f", output_padding={numbers(s, 0, 1, space)}")
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
    kernel = numbers(s, 1, 4, space)
    stride = s.some(0.7, f", stride={numbers(s, 1, 3, space)}")
    pad = s.some(0.5, f", padding={numbers(s, 0, 2, space)}")
    ceil = s.some(0.3, ", ceil_mode=True")
    sizes = s.rng.choice([numbers(s, 1, 5, space), s.rng.randint(1, 4)])
    return s.one_of(
        f"F.max_pool{space}d({v}, {kernel}{stride}{pad}{s.some(0.2, ', dilation=2')}{ceil}); "
        f"F.avg_pool{space}d({v}, {kernel}{stride}{pad}{ceil}{s.some(0.3, ', count_include_pad=False')}); "
        f"F.adaptive_avg_pool{space}d({v}, {sizes}); F.adaptive_max_pool{space}d({v}, {sizes}); "
        f"F.lp_pool{space}d({v}, 2., {kernel}{stride}{ceil})"
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
        size = f"size={numbers(s, 1, 9, space)}"
    else:
        size = f"scale_factor={s.rng.choice([2, 1.5, 0.5, 3, 0.7, 1])}"
    corners = s.some(0.4, ", align_corners=True") if "linear" in mode or mode == "bicubic" else ""
    return f"F.interpolate({v}, {size}, mode={mode!r}{corners})"


def contraction(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if not x.dim():
        return None
    n, k = int(x.shape[-1]), s.rng.randint(1, 5)
    batch = [1 if s.rng.random() < 0.3 else m for m in x.shape[:-2]] if s.rng.random() < 0.6 else []
    bias = s.some(0.5, f", {s.parameter(k)}")
    texts = f"F.linear({v}, {s.like(k, n)}{bias}); {v} @ {s.like(*batch, n, k)}; {v} @ {s.like(n)}; "
    texts += f"torch.einsum('...i,ij->...j', {v}, {s.like(n, k)}); {s.like(k, int(x.shape[-2:][0]))} @ {v}; "
    texts += f"torch.einsum('...i,...i->...', {v}, {v}); torch.einsum('i...->...', {v}); "
    texts += f"torch.tensordot({v}, {s.like(n, k)}, 1); {v} @ {v}.mT; torch.matmul({v}.mT, {v})"
    if x.dim() == 3:
        texts += f"; torch.bmm({v}, {s.like(int(x.shape[0]), n, k)}); torch.einsum('bij,bkj->bik', {v}, {v})"
        texts += f"; torch.baddbmm({s.like(k)}, {v}, {s.like(int(x.shape[0]), n, k)})"
    if x.dim() == 2:
        texts += f"; torch.addmm({s.like(k)}, {v}, {s.like(n, k)}); torch.cdist({v}, {s.like(k, n)})"
        texts += f"; F.bilinear({v}, {s.like(*x.shape)}, {s.parameter(k, n, n)})"
    if x.dim() in (3, 4):
        texts += f"; F.scaled_dot_product_attention({v}, {v}, {s.like(*x.shape[:-1], k)})"
    if x.dim() == 1:
        texts += f"; torch.dot({v}, {s.like(n)}); torch.outer({v}, {s.like(k)})"
    return s.one_of(texts)


def loss(s: Scope, v: str, x: torch.Tensor) -> str:
    how = s.rng.choice(["'mean'", "'sum'", "'none'"])
    target = s.like(*x.shape)
    texts = f"F.{s.one_of(LOSSES, None)}({v}, {target}, reduction={how}); "
    texts += f"F.binary_cross_entropy_with_logits({v}, torch.sigmoid({target}), reduction={how}); "
    texts += f"F.kl_div(F.log_softmax({v}, -1), torch.softmax({target}, -1), reduction={how})"
    if x.dim() >= 2 and x.shape[1]:
        classes = list(range(int(x.shape[1])))
        shape = [int(x.shape[0]), *x.shape[2:]]
        numbers = [s.rng.choice(classes) for _ in range(torch.Size(shape).numel())]
        labels = f"torch.tensor({numbers}, dtype=torch.int64).reshape({shape})"
        extra = s.some(0.3, f", weight={s.parameter(len(classes))}.detach().abs() + 0.1")
        extra += s.some(0.2, ", label_smoothing=0.2") + s.some(0.2, ", ignore_index=0")
        texts += f"; F.cross_entropy({v}, {labels}{extra}, reduction={how})" * 2
        texts += f"; F.cross_entropy({v}, torch.softmax({target}, 1), reduction={how})"
        texts += f"; F.cosine_similarity({v}, {target}, dim={one_dim(s, x)})"
        texts += f"; F.pairwise_distance({v}, {target})"
    return s.one_of(texts)


def fourier(s: Scope, v: str, x: torch.Tensor) -> str | None:
    if not x.dim():
        return None
    d, dims = one_dim(s, x), some_dims(s, x)
    real = s.one_of("real; imag; abs()")
    return s.one_of(
        f"torch.fft.fft({v}, dim={d}).{real}; torch.fft.rfft({v}, dim={d}).{real}; "
        f"torch.fft.irfft(torch.fft.rfft({v}, dim={d}), dim={d}); torch.fft.fftn({v}, dim={dims}).real; "
        f"torch.fft.fft({v}, n={s.rng.randint(1, 9)}, dim={d}, norm='ortho').real; "
        f"torch.fft.rfft2({v}).real; torch.fft.fftshift({v}, dim={d})"
    )


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
