"""Distributed convolutions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.stencil import Stencil
from distdl_rma.layers.agreement import Facts, Plans, common_dtype
from distdl_rma.layers.autograd import anchor, tells_peers
from distdl_rma.layers.convolution import LocalConvolution, SplitConvolution
from distdl_rma.layers.halo import HaloPlan
from distdl_rma.layers.movement import Flight, Movement, broadcast
from distdl_rma.layers.replica import Replica, idle
from distdl_rma.machine import Machine

__all__ = ["DistributedConv", "DistributedConv1d", "DistributedConv2d", "DistributedConv3d"]

_WEIGHTS = ("replicated", "root")
_TORCH_LAYERS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}


class DistributedConv(nn.Module):
    """Convolution of a tensor whose batch and spatial dimensions are split over ranks.

    Local input: the shard of this rank, of any size that forms a grid with the others' (balanced blocks
    if all follow the library). Local output: the balanced shard of the global output. The numbers are
    those of the sequential torch layer on the global tensor, for every stride, dilation, kernel, padding
    and group, with uneven, too small and empty shards. Collective to construct over the machine; a call
    involves the ranks of P_x with the same batch block, and talks to those that share data.

    Parameters
    ----------
    P_x
        Partition of the input and of the output, as many dimensions as the tensor, 1 for channels.
    in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias
        As in torch.
    padding_mode, device, dtype
        As in torch. ``padding_mode`` must be ``"zeros"``.
    weights
        ``"replicated"``: on all ranks of the machine, gradients summed. ``"root"``: on the first rank of
        P_x only, broadcast in each forward, gradients summed there; other ranks hold empty parameters.
    name
        For messages.

    Raises
    ------
    PartitionError
        If P_x does not fit the dimensions or splits channels.
    UnsupportedError
        If ``padding_mode`` is not ``"zeros"``.

    Notes
    -----
    Interface document, chapter 3; convolution document, feature-distributed convolution; requirements
    A17, A18, B7, B8.
    """

    _dims = 0

    def __init__(
        self,
        P_x: Partition,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        weights: str = "replicated",
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._check(P_x, in_channels, padding_mode, weights)
        # The torch layer checks its arguments and makes the same initial weights from the same seed.
        like: Any = _TORCH_LAYERS[self._dims](
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            device=device,
            dtype=dtype,
        )
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, groups
        self.kernel_size, self.stride, self.dilation = like.kernel_size, like.stride, like.dilation
        self.padding, self.padding_mode = like.padding, padding_mode
        # torch keeps (left, right) per dimension, last dimension first.
        sides = like._reversed_padding_repeated_twice
        stencil = Stencil.of(
            like.kernel_size,
            like.stride,
            like.dilation,
            tuple(zip(sides[::2], sides[1::2], strict=True))[::-1],
        )
        self.local = LocalConvolution(stencil, groups)
        self.P_x = P_x
        self.machine = Machine.of(P_x)
        self.name = name or self.machine.layer_name(type(self).__name__)
        self.weights = weights
        self.weight: nn.Parameter = like.weight
        self.bias: nn.Parameter | None = like.bias
        self._place_weights()
        self.group = P_x.slab({0: P_x.index_of(self.machine.rank)[0]}) if P_x.active else P_x
        self.plans = (
            Plans(self.machine, self.group.ranks, self.name, self._plan, self.extra_repr())
            if P_x.active
            else None
        )

    def _check(self, P_x: Partition, in_channels: object, padding_mode: str, weights: str) -> None:
        kind = type(self).__name__
        if isinstance(in_channels, Partition):
            raise UnsupportedError(f"{kind}: separate P_y and P_W (channel splits) are not supported yet")
        if P_x.dim != self._dims + 2:
            raise PartitionError(
                f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, the tensor has {self._dims + 2}"
            )
        if P_x.shape[1] != 1:
            raise UnsupportedError(f"{kind}: P_x {P_x.shape} splits channels, which is not supported yet")
        if padding_mode != "zeros":
            raise UnsupportedError(
                f"{kind}: padding_mode {padding_mode!r} is not supported yet, only 'zeros'"
            )
        if weights not in _WEIGHTS:
            raise ShapeError(f"{kind}: weights is one of {_WEIGHTS}, got {weights!r}")

    def _place_weights(self) -> None:
        parameters = {"weight": self.weight}
        if self.bias is not None:
            parameters["bias"] = self.bias
        # Made when first used: the dtype of a layer may change.
        self._broadcasts: dict[tuple[str, torch.dtype], Movement] = {}
        if self.weights == "replicated":
            self.replica = Replica(self.machine, self.machine.ranks, parameters, self.name)
            return
        self.replica = Replica(self.machine, (self.machine.rank,), parameters, self.name)
        self._shapes = {key: parameter.shape for key, parameter in parameters.items()}
        if self.machine.rank != self.P_x.ranks[0]:
            for key, parameter in parameters.items():
                setattr(self, key, nn.Parameter(parameter.new_empty(0), parameter.requires_grad))

    def get_ranks_synch_weights(self) -> list[int]:
        """Rank ids that hold copies of the weights, this one included; empty if none is needed."""
        ranks = self.replica.ranks
        return list(ranks) if len(ranks) > 1 else []

    def get_sizeof_gradients(self) -> int:
        """Bytes of all parameter gradients of this layer on this rank."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride},"
            f" padding={self.padding}, dilation={self.dilation}, groups={self.groups}, P_x={self.P_x.shape}"
        )

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Convolve; ``x`` is the local shard, or a tensor without elements on ranks outside of P_x."""
        if self.plans is None:
            return idle(x, self.replica.tie(self.weight, self.bias))
        weight, bias = self._weights_for_use()
        if weight is None:
            raise ShapeError(f"{self.name!r}: has no weight")
        # Outside of the autograd function, inside of which grad mode is off.
        guess = self.plans.begin(x, weight)
        y: torch.Tensor = SplitConvolution.apply(x, weight, bias, anchor(True), self, guess)  # type: ignore[no-untyped-call]
        return y

    def _weights_for_use(self) -> tuple[torch.Tensor | None, ...]:
        if self.weights == "replicated":
            return self.replica.tie(self.weight, self.bias)
        flights = {key: self._broadcast(key, parameter) for key, parameter in self.named_parameters()}
        used = {key: flight.movement.wait(flight).view(self._shapes[key]) for key, flight in flights.items()}
        return used["weight"], used.get("bias")

    def _broadcast(self, key: str, parameter: torch.Tensor) -> Flight:
        movement = self._broadcasts.get((key, parameter.dtype))
        if movement is None:
            shape, name = self._shapes[key], f"{self.name} ({key})"
            movement = broadcast(self.machine, self.P_x.ranks, shape, parameter.dtype, name)
            self._broadcasts[key, parameter.dtype] = movement
        return movement.start(parameter.flatten(), parameter.requires_grad)

    def _plan(self, facts: dict[int, Facts]) -> HaloPlan:
        dtype = common_dtype(facts)
        source = Decomposition.from_local_shapes(self.group, {r: f.shape for r, f in facts.items()})
        if source.shape[1] != self.in_channels:
            raise ShapeError(f"input has {source.shape[1]} channels, the layer takes {self.in_channels}")
        for rank, fact in facts.items():
            if fact.weights != dtype:
                raise ShapeError(f"input is {dtype}, the weights of rank {rank} are {fact.weights}")
        return HaloPlan(self.machine, self.local.stencil, source, dtype, self.name)


class DistributedConv1d(DistributedConv):
    """Distributed ``torch.nn.Conv1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedConv2d(DistributedConv):
    """Distributed ``torch.nn.Conv2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedConv3d(DistributedConv):
    """Distributed ``torch.nn.Conv3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
