"""What is known of the tensors of a layer before its first call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from distdl_rma.geometry.decomposition import Decomposition


@dataclass(frozen=True)
class DeclaredTensors:
    """Who owns what of the inputs and the output of a layer; calls with others remain possible."""

    inputs: tuple[Decomposition, ...]
    output: Decomposition
    dtype: torch.dtype

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Global shapes of the inputs."""
        return tuple(blocks.shape for blocks in self.inputs)

    def nbytes(self, rank: int) -> tuple[int, int]:
        """Bytes of a rank's shards of all inputs, and of its shard of the output; 0 on idle ranks."""
        before = sum(blocks.box(rank).volume for blocks in self.inputs)
        return self.dtype.itemsize * before, self.dtype.itemsize * self.output.box(rank).volume


def placeholder_shard(blocks: Decomposition, dtype: torch.dtype) -> torch.Tensor:
    """Tensor of the shape and type of this rank's shard that takes no memory; nothing on idle ranks."""
    P_x = blocks.partition
    return torch.empty(1, dtype=dtype).expand(blocks.box(P_x.me).shape if P_x.active else (0,))
