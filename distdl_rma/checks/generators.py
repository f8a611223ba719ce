"""States of torch's generators of random numbers: whether ranks that were seeded alike have drifted apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


class RandomDraw:
    """Step of a trace: a call has drawn random numbers, from this state of torch's generator."""

    def __init__(self, state: torch.Tensor) -> None:
        self.word = crc32(bytes(state.numpy()))

    @property
    def described(self) -> str:
        """Text for messages."""
        return (
            f"for random numbers of torch's generator, in state {self.word:08x} when it began; seed it alike"
            " on all ranks, and draw what is of one rank from a generator of its own"
        )
