"""What a random program has so far, and numbers drawn for the next call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch


class Scope:
    """Names of the tensors of a program so far, and plain ones that its calls ask for."""

    def __init__(self, rng: random.Random, dtype: torch.dtype = torch.float64) -> None:
        self.rng, self.dtype = rng, dtype
        self.tensors: dict[str, torch.Tensor] = {}
        self.plain: dict[str, torch.Tensor] = {}
        self.split: dict[str, torch.Tensor] = {}
        # Names of what split tensors went into: of plain tensors alone every rank makes all.
        self.of_split: list[str] = []

    def parameter(self, *shape: int) -> str:
        """A plain tensor, that mostly needs a gradient."""
        name = f"p{len(self.plain)}"
        made = torch.randn(shape, dtype=torch.float64).mul_(0.7).to(self.dtype)
        self.tensors[name] = self.plain[name] = made.requires_grad_(self.rng.random() < 0.8)
        return name

    def input(self, *shape: int) -> str:
        """A tensor that is to be split."""
        name = f"x{len(self.split)}"
        made = torch.randn(shape, dtype=torch.float64).to(self.dtype)
        self.tensors[name] = self.split[name] = made.requires_grad_(self.rng.random() < 0.8)
        return name

    def like(self, *shape: int) -> str:
        """A tensor of this shape: one that is there, a split or a plain one."""
        there = [n for n, x in self.tensors.items() if tuple(x.shape) == shape and x.dtype == self.dtype]
        if there and self.rng.random() < 0.5:
            return self.rng.choice(there)
        return self.input(*shape) if self.rng.random() < 0.4 else self.parameter(*shape)

    def one_of(self, texts: str, between: str | None = "; ") -> str:
        """One of several texts in a row, or of several words if nothing is between them."""
        return self.rng.choice(texts.split(between))

    def some(self, chance: float, text: str) -> str:
        """A text or nothing."""
        return text if self.rng.random() < chance else ""


Draw = Callable[[Scope, str, torch.Tensor], str | None]


def one_dim(s: Scope, x: torch.Tensor) -> int:
    return s.rng.randint(-x.dim(), x.dim() - 1) if x.dim() else s.rng.choice([0, -1])


def some_dims(s: Scope, x: torch.Tensor) -> list[int]:
    some = s.rng.sample(range(x.dim()), s.rng.randint(min(1, x.dim()), x.dim()))
    return [d - x.dim() if s.rng.random() < 0.4 else d for d in some]


def numbers(s: Scope, low: int, high: int, count: int) -> Any:
    if s.rng.random() < 0.4:
        return s.rng.randint(low, high)
    return tuple(s.rng.randint(low, high) for _ in range(count))
