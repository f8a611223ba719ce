"""Initial values of parameters, of which a rank only ever holds its own part."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

import torch

from distdl_rma.geometry.box import Box
from distdl_rma.geometry.decomposition import Decomposition

_DRAWN_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Uniform:
    """Uniformly random numbers in [-bound, bound], drawn as torch draws them for the whole parameter."""

    shape: tuple[int, ...]  # of the whole parameter
    bound: float
    dtype: torch.dtype

    @property
    def requires_grad(self) -> bool:
        """As of every parameter at first."""
        return True

    def cut(self, store: Decomposition) -> torch.Tensor:
        """This rank's box; without elements on ranks outside.

        Torch's generator gives one number after the other, so rows drawn in turn are those of the whole
        tensor, and leave the generator where the whole tensor leaves it: on every rank, whatever it keeps.
        """
        partition = store.partition
        box = store.box(partition.me) if partition.active else None
        kept = torch.empty(box.shape if box else (0,), dtype=self.dtype, device="cpu")
        rows, width = self.shape[0], Box.of_shape(self.shape[1:]).volume
        step = min(rows, max(1, _DRAWN_AT_ONCE // max(width, 1)))
        buffer = torch.empty((step, *self.shape[1:]), dtype=self.dtype, device="cpu")
        for first in range(0, rows if width else 0, max(step, 1)):
            drawn = Box.of_shape(self.shape).replace(0, first, min(first + step, rows))
            numbers = buffer[: drawn.shape[0]].uniform_(-self.bound, self.bound)
            common = drawn & box if box else None
            if box and common and not common.empty:
                kept[common.slices(box)] = numbers[common.slices(drawn)]
        return kept


def linear_values(
    in_features: int, out_features: int, bias: bool, dtype: torch.dtype | None
) -> dict[str, Uniform | None]:
    """What ``torch.nn.Linear`` starts with, by the name of the parameter."""
    kind = torch.get_default_dtype() if dtype is None else dtype
    # torch's Kaiming initialisation with a = sqrt(5), rounding by rounding.
    gain = sqrt(2.0 / (1 + sqrt(5) ** 2))
    bound = sqrt(3.0) * (gain / sqrt(in_features)) if in_features else 0.0
    offset = 1 / sqrt(in_features) if in_features else 0.0
    return {
        "weight": Uniform((out_features, in_features), bound, kind),
        "bias": Uniform((out_features,), offset, kind) if bias else None,
    }
