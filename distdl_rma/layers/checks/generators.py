"""States of torch's generators of random numbers: whether ranks that were seeded alike have drifted apart.

Ranks with different seeds may mean it, for data of their own. Ranks with one seed and different states have
drawn a different count of numbers since, mostly by filling parts of weights of different sizes: their next
dropout would differ. That is what is looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple
from zlib import crc32

import torch

from distdl_rma.geometry.exchange import fingerprint


def generator_state() -> list[int]:
    """Seed of torch's generator of random numbers, and a fingerprint of its state; local."""
    return [torch.initial_seed(), fingerprint(torch.get_rng_state().numpy().tobytes())]


def have_drifted(states: Iterable[Sequence[int]]) -> bool:
    """Whether the ranks' generators, as of ``generator_state``, have one seed and different states."""
    different = {*map(tuple, states)}
    return len(different) > 1 and len({seed for seed, _ in different}) == 1


class Noted(NamedTuple):
    """Step of a trace of a call that is no function: ranks compare the text, which is for messages too."""

    described: str

    @property
    def word(self) -> int:
        """Hash, equal on ranks with equal texts."""
        return crc32(self.described.encode())


def random_draw(state: torch.Tensor) -> Noted:
    """Step of a call that has drawn random numbers, from this state of torch's generator."""
    return Noted(
        f"for random numbers of torch's generator, in state {crc32(bytes(state.numpy())):08x} when it began;"
        " seed it alike on all ranks, and draw what is of one rank from a generator of its own"
    )
