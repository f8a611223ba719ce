"""Distributed instance normalisation."""

from __future__ import annotations

import weakref
from math import prod
from typing import Any

import numpy as np
import torch
from torch import nn

from distdl_rma.errors import PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.agreement import Facts, Plans, common_dtype
from distdl_rma.layers.autograd import anchor, first_derivative, tells_peers
from distdl_rma.layers.replica import Replica, idle
from distdl_rma.layers.tensors import as_array, as_tensor
from distdl_rma.machine import Machine
from distdl_rma.segments.allreduce import Allreduce

__all__ = [
    "DistributedInstanceNorm",
    "DistributedInstanceNorm1d",
    "DistributedInstanceNorm2d",
    "DistributedInstanceNorm3d",
]

_TORCH_LAYERS: dict[int, type[nn.Module]] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
# Statistics travel in float64, whatever the dtype of the data.
_NORM_DTYPE = np.float64
_SUMS = 2


class _NormPlan:
    """The two norm allreduces for one number of instances and channels."""

    def __init__(self, layer: DistributedInstanceNorm, source: Decomposition) -> None:
        self.instances, self.count = source.shape[0], prod(source.shape[2:])
        if self.count < 2:
            raise ShapeError(f"more than 1 spatial element is needed, the global input is {source.shape}")
        elements = _SUMS * source.shape[0] * source.shape[1]
        segments, ranks = layer.machine.segments, layer.group.ranks
        name = layer.name
        self.forward_sums, self.backward_sums = (
            Allreduce(segments, ranks, elements, _NORM_DTYPE, name=f"{name} ({what})", one_round=True)
            for what in ("norm", "norm, adjoint")
        )
        for sums in (self.forward_sums, self.backward_sums):
            weakref.finalize(self, sums.close)

    def void(self) -> None:
        # Nothing is started before all ranks agree.
        pass


class DistributedInstanceNorm(nn.Module):
    """Instance normalisation of a tensor whose batch and spatial dimensions are split over ranks.

    Mean and variance are those of the whole image. Local input and output: the shard of this rank.
    Forward: local sums, one allreduce, scale; backward: one allreduce. Statistics are accumulated in
    float64. Collective to construct over the machine; a call involves the ranks of P_x that share a
    batch block, and with ``track_running_stats`` all ranks of P_x.

    Parameters
    ----------
    P_x
        Partition of input and output, as many dimensions as the tensor, 1 for channels.
    num_features, eps, momentum, affine, track_running_stats, device, dtype
        As in torch.
    name
        For messages.

    Raises
    ------
    PartitionError
        If P_x does not fit the dimensions.
    UnsupportedError
        If P_x splits channels.

    Notes
    -----
    Interface document, chapter 4; requirement A19.
    """

    _dims = 0

    def __init__(
        self,
        P_x: Partition,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = False,
        track_running_stats: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__()
        kind = type(self).__name__
        if P_x.dim != self._dims + 2:
            raise PartitionError(
                f"{kind}: P_x has {P_x.dim} dimensions {P_x.shape}, the tensor has {self._dims + 2}"
            )
        if P_x.shape[1] != 1:
            raise UnsupportedError(f"{kind}: P_x {P_x.shape} splits channels, which is not supported yet")
        like: Any = _TORCH_LAYERS[self._dims](
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        self.P_x, self.machine = P_x, Machine.of(P_x)
        self.name = name or self.machine.layer_name(kind)
        self.weight: nn.Parameter | None = like.weight
        self.bias: nn.Parameter | None = like.bias
        self.running_mean: torch.Tensor
        self.running_var: torch.Tensor
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(key, getattr(like, key))
        parameters = dict(self.named_parameters())
        self.replica = Replica(self.machine, self.machine.ranks, parameters, self.name)
        self.group = P_x.slab({0: P_x.index_of(self.machine.rank)[0]}) if P_x.active else P_x
        self._plans = (
            Plans(self.machine, self.group.ranks, self.name, self._plan, self.extra_repr())
            if P_x.active
            else None
        )
        self._running: Allreduce | None = None
        if track_running_stats:
            count = 1 + 2 * num_features
            name_ = f"{self.name} (running statistics)"
            self._running = Allreduce(
                self.machine.segments, self.machine.ranks, count, _NORM_DTYPE, name=name_
            )
            weakref.finalize(self, self._running.close)

    def get_ranks_synch_weights(self) -> list[int]:
        """Rank ids that hold copies of the weights, this one included; empty if none is needed."""
        return list(self.replica.ranks) if self.affine and len(self.replica.ranks) > 1 else []

    def get_sizeof_gradients(self) -> int:
        """Bytes of all parameter gradients of this layer."""
        return sum(p.numel() * p.element_size() for p in self.parameters())

    def get_ranks_synch_norm(self) -> list[int]:
        """Rank ids that share the instances of this rank, itself included; empty if they are whole."""
        return list(self.group.ranks) if self.P_x.active and self.group.size > 1 else []

    def get_sizeof_norm(self) -> int:
        """Bytes of one norm message in the forward of the last input seen; 0 before."""
        plan = self._plans.last if self._plans is not None else None
        return 0 if plan is None else plan.forward_sums.count * plan.forward_sums.dtype.itemsize

    def extra_repr(self) -> str:
        """One line for ``print(model)``."""
        return (
            f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine},"
            f" track_running_stats={self.track_running_stats}, P_x={self.P_x.shape}"
        )

    @tells_peers
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise; ``x`` is the local shard, or a tensor without elements on ranks outside of P_x."""
        use_running = self.track_running_stats and not self.training
        weight, bias = self.replica.tie(self.weight, self.bias)
        if self._plans is None:
            self._update_running(None, 0)
            return idle(x, (weight, bias))
        plan, needs = self._plans.agree(x)
        if use_running:
            mean, variance = (
                t.to(torch.float64).expand(x.shape[0], -1) for t in (self.running_mean, self.running_var)
            )
            return _scale(x, mean, variance, self.eps, weight, bias)
        sums = _local_sums(x.detach())
        plan.forward_sums.active[:] = as_array(sums.reshape(-1))
        plan.forward_sums.start()
        total = as_tensor(plan.forward_sums.wait()).clone().view(sums.shape)
        mean = total[0] / plan.count
        variance = (total[1] / plan.count - mean.square()).clamp_(min=0.0)
        self._update_running((mean, variance * (plan.count / (plan.count - 1))), plan.instances)
        y: torch.Tensor = _InstanceNorm.apply(
            x, weight, bias, anchor(needs.input), mean, variance, plan, self
        )  # type: ignore[no-untyped-call]
        return y

    def _update_running(self, statistics: tuple[torch.Tensor, torch.Tensor] | None, instances: int) -> None:
        # Each instance counts once, however many ranks share it.
        if self._running is None or not self.training:
            return
        row = self._running.active
        row[:] = 0
        if statistics is not None:
            row[0] = instances
            row[1:] = as_array(torch.cat([s.sum(0) for s in statistics]))
            row /= self.group.size
        self._running.start()
        total = as_tensor(self._running.wait())
        means = torch.split(total[1:] / total[0], [self.num_features] * 2)
        for running, mean in zip((self.running_mean, self.running_var), means, strict=True):
            running.lerp_(mean.to(running.dtype), self.momentum or 0.0)

    def _plan(self, facts: dict[int, Facts]) -> _NormPlan:
        common_dtype(facts)
        source = Decomposition.from_local_shapes(self.group, {r: f.shape for r, f in facts.items()})
        if source.shape[1] != self.num_features:
            raise ShapeError(f"input has {source.shape[1]} channels, the layer takes {self.num_features}")
        return _NormPlan(self, source)


def _spatial(x: torch.Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.dim()))


def _column(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    # Per-channel or per-instance values in the dtype of x, shaped to broadcast over its space.
    rows = values if values.dim() == 2 else values[None]
    return rows.to(x.dtype).view(*rows.shape, *(1,) * (x.dim() - 2))


def _local_sums(x: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares per instance and channel, as (2, batch, channel) in float64."""
    count = prod(x.shape[2:])
    sums = torch.zeros(_SUMS, *x.shape[:2], dtype=torch.float64)
    if x.numel():
        # About the local mean first: a large mean does not swallow a small variance.
        variance, mean = torch.var_mean(x, dim=_spatial(x), correction=0)
        residual = variance.to(torch.float64) * count
        mean = mean.to(torch.float64)
        sums[0], sums[1] = mean * count, residual + mean.square() * count
    return sums


def _scale(
    x: torch.Tensor,
    mean: torch.Tensor,
    variance: torch.Tensor,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    # The mean is taken off before anything is multiplied; its rounding error is made up for afterwards.
    scale = (variance + eps).rsqrt()
    if weight is not None:
        scale = scale * weight.to(torch.float64)
    shift = -(mean - mean.to(x.dtype)) * scale
    if bias is not None:
        shift = shift + bias.to(torch.float64)
    return torch.addcmul(_column(shift, x), x - _column(mean, x), _column(scale, x))


class _InstanceNorm(torch.autograd.Function):
    """Scale by given global statistics; the backward knows that they depend on the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        _anchor: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        plan: _NormPlan,
        layer: DistributedInstanceNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mean, ctx.inverse, ctx.plan, ctx.layer = mean, (variance + layer.eps).rsqrt(), plan, layer
        ctx.machine = layer.machine
        return _scale(x, mean, variance, layer.eps, weight, bias)

    @staticmethod
    @first_derivative
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        layer, plan, inverse = ctx.layer, ctx.plan, ctx.inverse
        rows, space = x.shape[0] * x.shape[1], prod(x.shape[2:])
        centred = x - _column(ctx.mean, x)
        flat = gradient.reshape(rows, 1, space)
        total = flat.sum((1, 2), dtype=torch.float64).view(x.shape[:2])
        product = torch.bmm(flat, centred.reshape(rows, space, 1)).view(x.shape[:2]).to(torch.float64)
        # The mean was rounded to the dtype of x: take the rest off its projection.
        projection = (product - (ctx.mean - ctx.mean.to(x.dtype)) * total) * inverse
        d_weight = (
            layer.replica.fill("weight", projection.sum(0).to(x.dtype)) if ctx.needs_input_grad[1] else None
        )
        d_bias = layer.replica.fill("bias", total.sum(0).to(x.dtype)) if ctx.needs_input_grad[2] else None
        factor = inverse if weight is None else inverse * weight.to(torch.float64)
        plan.backward_sums.active[:] = as_array(torch.stack((total, projection)).reshape(-1))
        plan.backward_sums.start()
        scaled = gradient * _column(factor, x)
        means = as_tensor(plan.backward_sums.wait()).clone().view(2, *x.shape[:2]) / plan.count
        d_x = scaled.addcmul_(centred, _column(-factor * inverse * means[1], x))
        d_x.sub_(_column(factor * means[0], x))
        return d_x if ctx.needs_input_grad[0] else None, d_weight, d_bias, None, None, None, None, None


class DistributedInstanceNorm1d(DistributedInstanceNorm):
    """Distributed ``torch.nn.InstanceNorm1d``; tensors are (batch, channel, width)."""

    _dims = 1


class DistributedInstanceNorm2d(DistributedInstanceNorm):
    """Distributed ``torch.nn.InstanceNorm2d``; tensors are (batch, channel, height, width)."""

    _dims = 2


class DistributedInstanceNorm3d(DistributedInstanceNorm):
    """Distributed ``torch.nn.InstanceNorm3d``; tensors are (batch, channel, depth, height, width)."""

    _dims = 3
