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
    return s.one_of(
        f"{v}.narrow({d}, {s.rng.randint(0, n - 1)}, 1); {v}.select({d}, {chosen[0]}); "
        f"{v}.index_select({d}, torch.tensor({positive})); {v}[{':, ' * d}torch.tensor({chosen})]; "
        f"{v}[{':, ' * d}{chosen}]; {v}.unbind({d})[{chosen[0]}]; "
        f"[*{v}][{s.rng.randint(0, max(int(x.shape[0]) - 1, 0))}]; "
        f"{v}.index_add({d}, torch.tensor({positive}), {v}.index_select({d}, torch.tensor({positive}))); "
        f"torch.gather({v}, {d}, {v}.argsort({d})); {v}.index_fill({d}, torch.tensor({positive}), 0.3); "
        f"torch.take_along_dim({v}, {v}.argmax({d}, keepdim=True), {d})"
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
    return s.one_of(
        f"{v}.permute({order}); {v}.flatten({a}, {b}); {v}.reshape({new}); {v}.reshape({guessed}); "
        f"{v}.view({guessed}); {v}.expand({longer}); {v}.squeeze(); {v}.movedim({a}, {b}); "
        f"{v}.transpose({a}, {-1 - s.rng.randrange(max(x.dim(), 1))}); {v}.unsqueeze({one_dim(s, x)}); "
        f"{v}.repeat({[s.rng.randint(1, 2) for _ in range(max(x.dim(), 1))]}); {v}.squeeze({a}); "
        f"{v}.roll({s.rng.randint(-5, 5)}, {a}); {v}.roll({s.rng.randint(-5, 5)}); {v}.flip({[a]}); "
        f"{v}.roll({(s.rng.randint(-4, 4), s.rng.randint(-4, 4))}, {(a, b)}); {v}.mT; {v}.ravel(); "
        f"{v}.unfold({a}, {s.rng.randint(1, 3)}, {s.rng.randint(1, 2)}); torch.triu({v}, {a - b}); "
        f"{v}.diagonal({s.rng.randint(-1, 1)}, {a}, {b}); {v}.repeat_interleave({a + 1}, {a}); "
        f"{v}.unflatten({a}, {_factors(s, int(x.shape[a]) if x.dim() else 1, 2)}); torch.rot90({v}); "
        f"F.pixel_shuffle({v}, 2); F.pixel_unshuffle({v}, 2); {v}.contiguous(); {v}.detach(); "
        f"F.unfold({v}, {s.rng.randint(1, 3)}, padding={s.rng.randint(0, 1)}); {v}.float().double(); "
        f"F.channel_shuffle({v}, {a + 1}); {v}.tile(({s.rng.randint(1, 2)}, 2))"
    )


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
    return s.one_of(
        f"torch.cat([{', '.join(many)}], {d}); torch.stack([{v}, {same}], dim={d}); "
        f"torch.chunk({v}, {n}, {d})[-1]; {v}.split({n}, dim={d})[0]; torch.hstack([{', '.join(many)}]); "
        f"torch.cat({v}.chunk({n}, {d})[::-1], {d}); {v}.tensor_split({n}, {d})[{s.rng.randint(-1, 0)}]; "
        f"sum({v}.unbind({d})); torch.vstack(({v}, {same}))"
    )
