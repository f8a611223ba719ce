"""Programs of infinite elements, NaN, numbers whose squares are too large, and of nothing.

Only of functions of which any kernel is infinite or NaN at the same places: a convolution may multiply
elements by the zeros around an image, or not, and a sum that is too large for its type depends on the order.
"""

from __future__ import annotations

import random

import torch

from tests.fuzz.scope import Scope, one_dim

# Of torch's samples: names of functions whose input may have such elements.
SAMPLED = """
sum nansum mean nanmean prod amax amin max min logsumexp softmax log_softmax cumsum cumprod logcumsumexp
std var sort topk argmax argmin median nanmedian linalg.vector_norm norm nn.functional.normalize
nn.functional.cosine_similarity nn.functional.cross_entropy nn.functional.nll_loss any all isnan where
nn.functional.mse_loss nn.functional.l1_loss nn.functional.max_pool2d nn.functional.softmin roll cat
"""
_ALONG = """
sum({d}) sum() mean({d}) nansum({d}) nanmean({d}) amax({d}) amin() amax() max() min({d})[0] max({d})[0]
prod({d}) prod() std({d}) std() var({d}) logsumexp({d}) logsumexp({all}) norm(2,{d}) norm(1,{d}) norm()
norm(3,{d}) norm(float('inf'),{d}) norm(float('-inf'),{d}) norm(0.5,{d}) median({d})[0] median() nanmedian()
cumsum({d}) cumprod({d}) logcumsumexp({d}) cummax({d})[0] softmax({d}) log_softmax({d}) sort({d})[0]
argmax({d}) argmax() isnan().any({d}) isfinite().all() renorm(2,{d},1.0) isinf().sum({d}) flip({d})
diff(dim={d})
"""
_OF_F = """
softmin({v},{d}); normalize({v},dim={d}); normalize({v},1.0,{d}); cosine_similarity({v},{v}.flip(0),{d});
mse_loss({v},{v}.detach()*0.5); l1_loss({v},torch.zeros_like({v}),reduction='sum'); glu({v},{d});
layer_norm({v},{last}); rms_norm({v},{last})
""".replace("\n", " ").strip()
_OF_IMAGES = """
interpolate({v},size={size},mode='bilinear'); interpolate({v},size={size},mode='bicubic');
interpolate({v},size={size},mode='bilinear',align_corners=True); interpolate({v},size={size});
interpolate({v},size={size},mode='bicubic',align_corners=True);
interpolate({v},scale_factor=2,mode='bilinear');
interpolate({v},scale_factor=2,mode='bicubic'); max_pool2d({v},2,1,1); avg_pool2d({v},2,1,1);
adaptive_avg_pool2d({v},{size}); adaptive_max_pool2d({v},{size}); instance_norm({v});
scaled_dot_product_attention({x},{x},{x},{mask}); softmax({x}@{x}.mT+{mask},-1)@{x};
softmax({x}@{x}.mT+{mask},-2)
""".replace("\n", " ").strip()
_LARGE = "norm({d}) norm() std({d}) var() softmax({d}) logsumexp({d}) amax() norm(3,{d})"


def values_in(rng: random.Random, x: torch.Tensor) -> torch.Tensor:
    """The tensor with a few elements, or some rows, that are infinite or NaN."""
    y, value = x.detach().clone(), rng.choice([-torch.inf, -torch.inf, torch.inf, torch.nan])
    if y.numel() and y.is_floating_point():
        if y.dim() and rng.random() < 0.5:
            d = rng.randrange(y.dim())
            start = rng.randrange(y.shape[d])
            y.narrow(d, start, rng.randint(1, y.shape[d] - start)).fill_(value)
        else:
            for _ in range(rng.randint(1, 3)):
                y.view(-1)[rng.randrange(y.numel())] = value
    return y.requires_grad_(x.requires_grad)


def _mask(s: Scope, rows: int, n: int) -> str:
    # An additive mask: of keys, of keys behind each row, or of all keys of some rows.
    hidden = s.rng.choice(
        [
            f"(torch.arange({n}) >= {s.rng.randint(0, n)}).expand({rows}, {n})",
            f"(torch.arange({n}) < {s.rng.randint(0, n)}).expand({rows}, {n})",
            f"torch.arange({n}) > torch.arange({rows})[:, None]",
            f"(torch.arange({rows}) >= {s.rng.randint(0, rows)})[:, None].expand({rows}, {n})",
        ]
    )
    return f"torch.zeros({rows}, {n}, dtype={s.dtype}).masked_fill({hidden}, float('-inf'))"


def _nothing(s: Scope, v: str, x: torch.Tensor) -> str:
    d = one_dim(s, x)
    return s.one_of(f"{v}[{v} > 99]; {v}[:0]; {v}.narrow({d}, 0, 0); {v}[{v}.flatten(1).sum(1) > 999]")


def lines_of(s: Scope, v: str, x: torch.Tensor, kind: str) -> list[str]:
    """A line that makes a tensor with such elements of one without, and one that calls a function of it."""
    d = one_dim(s, x)
    if kind == "nothing":
        lines = [f"v0 = {_nothing(s, v, x)}"]
        # What a mask selects has one dimension.
        d = 0 if s.rng.random() < 0.7 or "> 99]" in lines[0] else d
    elif kind == "large":
        lines = [f"v0 = {v} * {s.rng.choice(['1e200', '1e-200'])}"]
    else:
        n, value = x.shape[d], s.rng.choice(["float('-inf')"] * 3 + ["float('inf')", "float('nan')"])
        shape = [-1 if at == d % x.dim() else 1 for at in range(x.dim())]
        hidden = f"(torch.arange({n}) {s.rng.choice(['<', '>='])} {s.rng.randint(0, n)}).view({shape})"
        added = f"{v} + torch.zeros({n}, dtype={s.dtype}).view({shape}).masked_fill({hidden}, {value})"
        lines = [f"v0 = {s.rng.choice([f'{v}.masked_fill({hidden}, {value})', added, f'{v} * 1.0'])}"]
        if s.rng.random() < 0.3:
            d = one_dim(s, x)
    names = {
        "v": "v0", "x": v, "d": d, "all": tuple(range(x.dim())), "last": [*x.shape[-1:]],
        "size": (s.rng.randint(1, 9), s.rng.randint(1, 9)), "mask": _mask(s, *[int(x.shape[-2])] * 2)
        if x.dim() == 4 else "",
    }  # fmt: skip
    chance = s.rng.random()
    if kind == "large":
        call = f"v0.{s.rng.choice(_LARGE.split())}"
    elif chance < 0.5:
        call = f"v0.{s.rng.choice(_ALONG.split())}"
    elif chance < 0.65:
        call = f"F.{s.rng.choice(_OF_F.split('; '))}"
    elif chance < 0.85 and x.dim() > 1 and x.shape[1]:
        call = f"F.{_of_classes(s, x)}"
    elif x.dim() == 4:
        call = f"F.{s.rng.choice(_OF_IMAGES.split('; '))}"
    else:
        call = f"v0.{s.rng.choice(_ALONG.split())}"
    return [*lines, f"v1 = {call.format(**names)}"]


def _of_classes(s: Scope, x: torch.Tensor) -> str:
    classes, shape = int(x.shape[1]), [int(x.shape[0]), *map(int, x.shape[2:])]
    some = [s.rng.randrange(classes) for _ in range(torch.Size(shape).numel())]
    labels = f"torch.tensor({some}, dtype=torch.int64).reshape({shape})"
    weight = s.some(0.4, f", weight=torch.arange({classes}, dtype={s.dtype}).remainder(2)")
    more = weight + s.some(0.3, ", ignore_index=0") + f", reduction={s.rng.choice(['mean', 'sum', 'none'])!r}"
    smooth = s.some(0.2, ", label_smoothing=0.2")
    return s.one_of(
        f"cross_entropy({{v}}, {labels}{more}{smooth}); nll_loss({{v}}, {labels}{more}); "
        f"cross_entropy({{v}}, {{x}}.detach().softmax(1)); "
        f"kl_div({{v}}.log_softmax(1), {{x}}.detach().softmax(1)); "
        f"binary_cross_entropy_with_logits({{v}}, {{x}}.detach().sigmoid())"
    )
