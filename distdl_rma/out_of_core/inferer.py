"""The interface of MONAI's inferers on :func:`predict`, without MONAI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, ConfigurationError
from distdl_rma.out_of_core.predict import Post, predict


@dataclass(frozen=True)
class Predictor:
    """An inferer: ``inferer(inputs, network)``, in place of a sliding window, exact and without seams.

    Parameters
    ----------
    memory, post, grid, scratch, progress, comm
        As of :func:`predict`. Inputs and result are in memory beside this.

    Examples
    --------
    ``SupervisedEvaluator(..., inferer=Predictor(memory="8GiB"))``
    """

    memory: int | str = "8GiB"
    post: Post = None
    grid: Any = None
    scratch: str | os.PathLike[str] | None = None
    progress: bool = False
    comm: Any = None

    def __call__(self, inputs: torch.Tensor, network: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The result of a network for inputs (batch, channels, *spatial) in memory; blocking.

        ``ConfigurationError`` if the network is no module, ``ArgumentError`` if it gets further arguments;
        other errors as :func:`predict`.
        """
        if args or kwargs:
            raise ArgumentError(
                f"Predictor: the network gets one tensor; {len(args) + len(kwargs)} further arguments were"
                " passed: wrap it in a module that has them"
            )
        if not isinstance(network, nn.Module):
            raise ConfigurationError(
                f"Predictor: the network is a torch.nn.Module, got {type(network).__name__!r}; a module's own"
                " method cannot be split"
            )
        # Tensors of MONAI have rules of their own.
        source = inputs.detach().as_subclass(torch.Tensor)
        y = predict(
            network, source, memory=self.memory, post=self.post, grid=self.grid, scratch=self.scratch,
            progress=self.progress,
            comm=self.comm,
        )  # fmt: skip
        return torch.empty(0) if y is None else y
