"""Calls of random programs that choose, reshape and join."""

from __future__ import annotations

import torch

from tests.fuzz.scope import Scope, one_dim


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
    a, b = sorted((one_dim(s, x) % max(x.dim(), 1), one_dim(s, x) % max(x.dim(), 1)))
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
    texts += [
        f"{v}.transpose({a}, {-1 - s.rng.randrange(max(x.dim(), 1))})",
        f"{v}.unsqueeze({one_dim(s, x)})",
    ]
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
    d = one_dim(s, x)
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
