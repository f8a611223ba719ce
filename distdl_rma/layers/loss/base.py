"""The mechanism of all losses: local sums by torch, one allreduce, the local gradient."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from distdl_rma.errors import ShapeError, UnsupportedError
from distdl_rma.geometry.exchange import fingerprint
from distdl_rma.geometry.partition import Partition
from distdl_rma.geometry.split import Balanced
from distdl_rma.layers.core.callbacks import callbacks_among
from distdl_rma.layers.core.error_exchange import ErrorExchange
from distdl_rma.layers.core.layer import DistributedLayer
from distdl_rma.ops.autograd import tells_peers
from distdl_rma.ops.tensors import trouble_with
from distdl_rma.ops.uncompiled import uncompiled
from distdl_rma.segments.collectives.allreduce import Allreduce

# Sums of 16-bit floats are taken in float32.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
# How torch complains of a tensor that does not fit; all ranks hear of it.
_MISFITS = (RuntimeError, ValueError, IndexError, TypeError)
_LEGACY = ("size_average", "reduce")
# Sum of the terms, their number, ranks that complain, sum and sum of squares of the codes; then batch sizes.
_TOTALS = 5
# Bits of a code: squares of codes add up exactly in float64 on thousands of ranks.
_CODES = (1 << 20) - 1


class DistributedLoss(DistributedLayer):
    """Loss over all elements of tensors that are split over ranks, evenly or not; base of all losses.

    A subclass is a row of a table: which function of torch, with which arguments. Each rank has torch sum
    over its shard; one allreduce in float64 adds up these sums, what a mean divides by, and whether some
    rank cannot form them.

    Parameters
    ----------
    P_x
        Partition of the input, with as many dimensions.
    reduction
        As in torch.
    name
        For messages.
    arguments
        The other arguments of the loss by name, and no others.
    legacy
        :class:`Callbacks`, and arguments that torch takes for the sake of old programs; these are refused.

    Raises
    ------
    ShapeError
        If an argument has a value that torch refuses.
    UnsupportedError
        If a legacy argument is given, or a weight requires a gradient.

    Notes
    -----
    Requirement B11.
    """

    _function: ClassVar[Callable[..., torch.Tensor]]
    _options: ClassVar[tuple[str, ...]] = ()
    _weights: ClassVar[tuple[str, ...]] = ()
    _reductions: ClassVar[tuple[str, ...]] = ("mean", "sum", "none")

    def __init__(
        self,
        P_x: Partition,
        reduction: str,
        name: str | None,
        legacy: dict[str, Any],
        **arguments: Any,
    ) -> None:
        kind = type(self).__name__
        callbacks = callbacks_among(legacy)
        _refuse_legacy(kind, legacy)
        if reduction not in self._reductions:
            raise ShapeError(f"{kind}: reduction is one of {self._reductions}, got {reduction!r}")
        super().__init__(P_x, name=name, **callbacks)
        self.P_x, self.reduction = P_x, reduction
        for key in self._options:
            setattr(self, key, arguments[key])
        for key in self._weights:
            self._check_weight(kind, key, arguments[key])
            self.register_buffer(key, arguments[key])
        self._check_options(kind)

    @cached_property
    def _sums(self) -> Allreduce | None:
        if not self.P_x.active:
            return None
        count = _TOTALS + (self.P_x.size if self.reduction == "batchmean" else 0)
        title = f"{self.name}, {fingerprint(self.extra_repr()):014x}"
        sums = Allreduce(self.machine.segments, self.P_x.ranks, count, np.float64, name=title)
        weakref.finalize(self, sums.close)
        return sums

    @cached_property
    def _complaints(self) -> ErrorExchange:
        return ErrorExchange(self.machine, self.P_x.ranks, self.name)

    def extra_repr(self) -> str:
        """One line for ``print(loss)``."""
        options = {"reduction": self.reduction} | {key: getattr(self, key) for key in self._options}
        weights = {key: getattr(self, key) for key in self._weights}
        shapes = {key: tuple(weight.shape) for key, weight in weights.items() if weight is not None}
        words = [f"{key}={value}" for key, value in (options | shapes).items()]
        return ", ".join([*words, f"P_x={self.P_x.shape}"])

    @tells_peers
    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Global loss of the local shards ``input`` and ``target``; blocking.

        Parameters
        ----------
        input, target
            Local shards; tensors without elements on ranks outside of P_x.

        Returns
        -------
        torch.Tensor
            A number, the same on all ranks of P_x and 0 elsewhere; for ``"none"`` the loss of each local
            element.

        Raises
        ------
        ShapeError
            On every rank of P_x with the same words, if the tensors of one of them do not fit each other
            or the layer, or those of two ranks differ in dtype.
        """
        if not self.P_x.active:
            return self._idle(input, target)
        local, count, problem = self._local(input, target, self._trouble(input, target))
        total, count, batches = self._agree(input, target, local, count, problem)
        if self.reduction == "none":
            return local.to(_result_dtype(input))
        if self.reduction == "batchmean":
            count = self._global_batch(batches)
        value, scale = _divided(total, count) if self.reduction != "sum" else (total, 1.0)
        loss: torch.Tensor = _GlobalValue.apply(  # type: ignore[no-untyped-call]
            local, value, scale, _result_dtype(input), self.name
        )
        return loss

    def _agree(
        self, input: torch.Tensor, target: torch.Tensor, local: torch.Tensor, count: float, problem: str
    ) -> tuple[float, float, list[float]]:
        # The sums over all ranks, if every rank could form them.
        if self._sums is None:
            return 0.0, 0.0, []
        facts = "" if problem else self._facts(input, target)
        code = fingerprint(facts) & _CODES
        row = self._sums.active
        row[:] = 0
        part = 0.0 if problem or self.reduction == "none" else float(local.detach())
        row[:_TOTALS] = (part, count, bool(problem), code, code**2)
        if self.reduction == "batchmean" and not problem and input.dim():
            row[_TOTALS + (self.P_x.rank or 0)] = input.shape[0]
        self._sums.start()
        total, count, misfits, codes, squares, *batches = self._sums.wait().tolist()
        if misfits or int(squares) * self.P_x.size != int(codes) ** 2:
            raise self._complaints.refuse(problem, facts)
        return total, count, batches

    def _trouble(self, input: torch.Tensor, target: torch.Tensor) -> str:
        # What is wrong with the tensors themselves, or with each other; empty if nothing is.
        problem = trouble_with(input) or trouble_with(target, "target")
        if not problem:
            try:
                self._check(input, target)
            except ShapeError as error:
                problem = str(error)
        return problem

    def _local(
        self, input: torch.Tensor, target: torch.Tensor, problem: str
    ) -> tuple[torch.Tensor, float, str]:
        """Local terms, what they count in a mean, and what is wrong with the tensors, if anything is."""
        if problem:
            return torch.zeros(()), 0.0, problem
        try:
            terms = self._terms(input, target, "none" if self.reduction == "none" else "sum")
            return terms, self._count(input, target), ""
        except _MISFITS as error:
            return torch.zeros(()), 0.0, str(error) or repr(error)

    def _terms(self, input: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
        arguments = {key: getattr(self, key) for key in self._options}
        for key in self._weights:
            weight = getattr(self, key)
            arguments[key] = None if weight is None else wide(self._part(key, weight, input))
        with torch.autocast(input.device.type, enabled=False):
            return type(self)._function(wide(input), wide(target), reduction=reduction, **arguments)

    def _count(self, input: torch.Tensor, target: torch.Tensor) -> float:
        """What the local terms count in a mean."""
        return float(input.numel())

    def _facts(self, input: torch.Tensor, target: torch.Tensor) -> str:
        """What has to be alike on all ranks."""
        return f"{autocast_dtype(input)} and {autocast_dtype(target)}"

    def _check(self, input: torch.Tensor, target: torch.Tensor) -> None:
        """Refuse local tensors that do not fit each other or the layer."""
        self._check_input(input)
        if input.shape != target.shape or autocast_dtype(input) != autocast_dtype(target):
            raise ShapeError(
                f"input has shape {tuple(input.shape)} and {input.dtype} but target"
                f" {tuple(target.shape)} and {target.dtype}"
            )

    def _check_input(self, input: torch.Tensor) -> None:
        if input.dim() != self.P_x.dim:
            raise ShapeError(
                f"input of shape {tuple(input.shape)} has {input.dim()} dimensions but P_x"
                f" {self.P_x.shape} has {self.P_x.dim}"
            )
        if not (input.is_floating_point() or input.is_complex()):
            raise ShapeError(f"input is {input.dtype} but a loss needs floating point")
        for key in self._weights:
            weight = getattr(self, key)
            if weight is not None and autocast_dtype(weight) != autocast_dtype(input):
                raise ShapeError(f"{key} is {weight.dtype} but input {input.dtype}")

    def _check_weight(self, kind: str, key: str, weight: Any) -> None:
        if weight is None:
            return
        if not isinstance(weight, torch.Tensor):
            raise ShapeError(f"{kind}: {key} is a tensor, got {weight!r}")
        if weight.requires_grad:
            raise UnsupportedError(f"{kind}: {key} requires a gradient, which a loss does not give it")
        if weight.dim() > self.P_x.dim:
            raise ShapeError(
                f"{kind}: {key} of shape {tuple(weight.shape)} has more dimensions than P_x {self.P_x.shape}"
            )

    def _check_options(self, kind: str) -> None:
        # Torch knows which values are legal, and says so when it is called.
        x = torch.full((1,), 0.5)
        self._try(kind, x, x)

    def _try(self, kind: str, input: torch.Tensor, target: torch.Tensor) -> None:
        options = {key: getattr(self, key) for key in self._options}
        try:
            type(self)._function(input, target, reduction="sum", **options)
        except _MISFITS as error:
            raise ShapeError(f"{kind}: {error}") from None

    def _part(self, key: str, weight: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
        """This rank's part of a weight that is given for the global input, right-aligned."""
        shape, index = tuple(weight.shape), self.P_x.index or ()
        first = self.P_x.dim - len(shape)
        for d, extent in enumerate(shape):
            if extent == 1:
                continue
            parts, here = self.P_x.shape[first + d], input.shape[first + d]
            start, stop = Balanced(extent, parts).interval(index[first + d])
            if stop - start != here:
                raise ShapeError(
                    f"{key} has global shape {shape}, of which {stop - start} belong here in dimension {d},"
                    f" but input has shape {tuple(input.shape)}: shards must be balanced"
                )
            weight = weight.narrow(d, start, here)
        return weight

    def _global_batch(self, batches: list[float]) -> float:
        """Sum of the batch sizes, each batch block counted once."""
        if not self.P_x.dim:
            return 1.0
        per_block = self.P_x.size // self.P_x.shape[0]
        for at, size in enumerate(batches):
            first = at - at % per_block
            if size != batches[first]:
                ranks = self.P_x.ranks
                raise ShapeError(
                    f"{self.name!r}: ranks {ranks[first]} and {ranks[at]} share a batch block of P_x"
                    f" {self.P_x.shape} but have batch sizes {batches[first]:g} and {size:g}"
                )
        return sum(batches[::per_block])

    def _idle(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        problem = trouble_with(input) or trouble_with(target, "target")
        if problem:
            raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        if input.numel():
            raise ShapeError(
                f"{self.name!r}: rank {self.machine.rank} is not in P_x but passes a tensor of shape"
                f" {tuple(input.shape)}; pass one without elements"
            )
        result = input.clone() if self.reduction == "none" else input.sum()
        if target.requires_grad:
            # So that a backward reaches what made it, on this rank too.
            result = result + target.reshape(-1)[:0].sum()
        return (result.real if result.is_complex() else result).to(_result_dtype(input))


class _GlobalValue(torch.autograd.Function):
    # The value is global, the gradient that of the local terms.
    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, value: float, scale: float, dtype: torch.dtype, name: str
    ) -> torch.Tensor:
        ctx.dtype, ctx.scale, ctx.name = local.dtype, scale, name
        return local.new_tensor(value, dtype=dtype)

    @staticmethod
    @uncompiled
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        # A factor that depends on the input would bring in terms of two ranks.
        if gradient.requires_grad:
            raise UnsupportedError(
                f"{ctx.name!r}: second derivatives of a nonlinear function of the loss are not supported;"
                " those of the loss itself are"
            )
        return gradient.to(ctx.dtype) * ctx.scale, None, None, None, None


def _refuse_legacy(kind: str, legacy: Mapping[str, object]) -> None:
    for key, value in legacy.items():
        if key not in _LEGACY:
            raise TypeError(f"{kind}: unexpected argument {key!r}")
        if value is not None:
            raise UnsupportedError(f"{kind}: {key} is not supported; say reduction='mean', 'sum' or 'none'")


def _divided(total: float, count: float) -> tuple[float, float]:
    # As torch: a mean over nothing is not a number.
    with np.errstate(all="ignore"):
        return float(np.float64(total) / count), float(np.float64(1.0) / count)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Tensor in the dtype that its sums are taken in."""
    return tensor.to(_WIDE.get(tensor.dtype, tensor.dtype))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Dtype in which torch would take the loss of a tensor: losses are in float32 under autocast."""
    autocast = torch.is_autocast_enabled(tensor.device.type)
    return _WIDE.get(tensor.dtype, tensor.dtype) if autocast else tensor.dtype


def _result_dtype(input: torch.Tensor) -> torch.dtype:
    dtype = autocast_dtype(input)
    return dtype.to_real() if dtype.is_complex else dtype
