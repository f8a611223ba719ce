"""Split tensors: every rank has a block, and a program sees one tensor of the global shape.

    SplitTensor          shape, dtype and layout of the whole; no memory of its own
      _local             this rank's block: a plain tensor, in torch's graph, with the gradient
      _layout            which box of the whole each rank has; equal on all ranks
      _strides           strides that the whole would have in torch, where these are not the usual ones
      _copy_of, _viewed  what this would be a view of in torch, see below

Three ways lead into this file:

- ``__torch_function__``: torch calls it in place of a function that got a split tensor. It finds the rule,
  and does what all rules need: autocast, the trace of the call, torch's errors, errors that peers must know.
- ``__torch_dispatch__``: kernels that torch calls below functions, mostly of autograd itself. Few have a
  meaning for blocks; the others are refused, since they would work on memory that is not here.
- Methods that no other tensor has: ``to_local``, ``full_tensor``, ``redistribute``.

Views. Torch's views share memory, blocks may not: a reshape may have had to move elements. Then the block is
a copy, right as long as nobody writes to either. So a copy knows its original (:class:`Original`), and is
refused once that has changed (``checked_block``); a write to the copy is refused at once (``begin_change``).

Plain tensors become split, and plain again, as the same object (``become_split``): ``buffer[:] = x`` has no
result that could be another object.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.autograd import forward_ad

from distdl_rma.errors import DistdlError, PartitionError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.checks.arguments import COMPARED, TENSORS, mark_compared
from distdl_rma.layers.checks.gradient_origin import note_reached_split, show_block, warn_of_mean
from distdl_rma.layers.ops.core.autograd import (
    ENOUGH,
    breaks_graph,
    compiles,
    hooks_of_saved,
    may_recompute,
    recomputed_by_all,
    run_eager,
)
from distdl_rma.layers.ops.core.tensors import AUTOCASTS, no_autocast, problem_with
from distdl_rma.layers.split import layout as lay
from distdl_rma.layers.split.calls.autocast import castable, dtype_for
from distdl_rma.layers.split.calls.loss_origin import LOSS_ORIGIN
from distdl_rma.layers.split.calls.signatures import first_by_place, mapped, tensors_in
from distdl_rma.layers.split.calls.site import CALL_TRACES, THREAD, module_path, note, site_of, user_place
from distdl_rma.layers.split.calls.table import OBSERVERS, RULES, WITHOUT_RULE, Rule, name_of
from distdl_rma.layers.split.calls.torch_errors import raise_as_torch
from distdl_rma.layers.split.entry import agree_on_layout
from distdl_rma.layers.split.function_nodes import OF_NO_BLOCK, enter_graph, runs
from distdl_rma.layers.split.plain_operands import gathered
from distdl_rma.layers.split.redistribution import redistributed
from distdl_rma.layers.staging import backward_in_this_thread, explain_memory
from distdl_rma.segments.machine import Machine
from distdl_rma.segments.waiting.error_texts import OF_SEVERAL_RANKS

_NO_SUBCLASS = torch._C.DisableTorchFunctionSubclass
# Kinds that need no other rank, so that one rank may call them alone.
_ONE_ALONE = frozenset({"query", "value", "refused"})
# Kinds whose ranks exchange data: with a checkpoint, all ranks recompute them, or none does.
_EXCHANGING = frozenset({"window", "norm", "reduction", "loss", "movement", "contraction"})
_NOTHING: dict[str, Any] = {}
# Shape queries that torch makes within its own code.
_QUERIES = "dim", "size", "sym_size", "numel", "sym_numel", "is_contiguous", "sym_is_contiguous"
_SHAPE_QUERIES = frozenset(getattr(torch.ops.aten, name) for name in _QUERIES)
_ITEM = torch.ops.aten._local_scalar_dense.default
# Reason for refusing access to the values of a cut tensor.
ON_MANY_RANKS = "the values are on many ranks; full_tensor() brings all of them, to_local() shows those here"
# Kinds for which a rank with an empty block raises the same errors as the others.
_NO_CHECK_WHEN_EMPTY = frozenset(
    {"query", "value", "gradient", "creation", "refused", "copies", "registered"}
)
# Kinds that get arguments unchanged; ``out=`` is allowed.
_AS_PASSED = frozenset({"copies", "registered"})
_ACCUMULATES: Any = vars(torch._C._functions)["AccumulateGrad"]
# Functions that autograd itself calls with the gradients that a function returns.
_OF_GRADIENTS = {
    "aten.add.Tensor": torch.add,
    "aten._to_copy.default": torch.Tensor.to,
    "aten.sum.dim_IntList": torch.sum,
}
# Use count of a storage that only one tensor uses, while it is counted.
_ALONE = 2


class _Changes:
    # Counts changes of memory whose tensors have no version.
    __slots__ = "__weakref__", "number"

    def __init__(self) -> None:
        self.number = 0


# By memory: that of originals which were made in inference mode, as long as there are copies of these.
_CHANGES: WeakValueDictionary[int, _Changes] = WeakValueDictionary()


class Original:
    """A block of which a copy was made where torch has a view; knows whether it has changed since.

    By torch's version of the memory, which counts changes in place. Tensors of inference mode have none, so
    their changes are counted here (``note_change``).
    """

    __slots__ = "_changes", "_version", "block"

    def __init__(self, block: torch.Tensor) -> None:
        # Of the same memory and version, without a graph.
        self.block = block.detach()
        self._changes: _Changes | None = None
        if block.is_inference():
            self._changes = _CHANGES.setdefault(_memory(block), _Changes())
        self._version = self._now

    @property
    def _now(self) -> int:
        return self.block._version if self._changes is None else self._changes.number

    @property
    def has_changed(self) -> bool:
        """Whether it was changed in place after the copy was made."""
        return self._now != self._version


def note_change(block: torch.Tensor) -> None:
    """Count a change in place of a block, if torch does not."""
    if block.is_inference() and (changes := _CHANGES.get(_memory(block))) is not None:
        changes.number += 1


class SplitTensor(torch.Tensor):
    """A tensor of which this rank has a block; functions of torch act on the whole, exactly, or are refused.

    ``shape``, ``size()``, ``dim()`` and ``numel()`` are those of the whole tensor. :func:`shard`,
    :meth:`from_local` and functions of split tensors make split tensors. All ranks of the partition call the
    same functions in the same order. A function without a rule raises ``UnsupportedError``, with advice.

    Plain tensors beside a split one, such as parameters and labels, are equal on all ranks; each rank uses
    its part of them. For gradients see ``docs/convert.md``. The split tensor owns its block;
    ``to_local`` returns the block without a copy.

    Examples
    --------
    >>> x = shard({"H": -1}, torch.arange(8.0).reshape(1, 1, 4, 2))
    >>> x.to_local().flatten()  # of the first of two ranks
    tensor([0., 1., 2., 3.])
    >>> y = F.max_pool2d(x - x.mean(), 2)  # as of the whole
    >>> y.shape, y.full_tensor().flatten()
    (torch.Size([1, 1, 2, 1]), tensor([-0.5000,  3.5000]))
    >>> SplitTensor.from_local(torch.ones(1, 1, 2, 2), x.partition).shape  # from blocks
    torch.Size([1, 1, 4, 2])
    """

    _local: torch.Tensor
    _layout: Decomposition
    # Torch would return a view of this; the block is a copy, invalid once the original changes.
    _copy_of: Original | None
    # Strides of the whole tensor in torch; None if it fills memory in the order of its dimensions.
    _strides: tuple[int, ...] | None = None
    # Whether it is a view of another tensor; of views outside of graphs, the tensor that is no view itself,
    # and that tensor's views.
    _is_seen = False
    # Whether ``become_split`` made a plain tensor this one.
    _was_plain = False
    _viewed: SplitTensor | None = None
    _views: set[weakref.ref[SplitTensor]] | None = None
    __hash__ = object.__hash__
    _shown = False
    # Hash of how it was computed outside of models, see ``LossOrigin``.
    _loss_hash = 1 << 40

    @staticmethod
    def __new__(
        cls: type[SplitTensor],
        local: torch.Tensor,
        layout: Decomposition,
        copy_of: torch.Tensor | None = None,
    ) -> SplitTensor:
        """For this package: ``local`` is this rank's block, with the shape of its box."""
        if not local.is_cpu:
            backward_in_this_thread()
        # ``_make_subclass`` shares the block's version, unlike a wrapper subclass; torch compares versions.
        make: Any = torch.Tensor._make_subclass
        made: SplitTensor = make(cls, local, local.requires_grad, dispatch_sizes_strides_policy="sizes")
        made._local, made._layout = local, layout
        made._copy_of = None if copy_of is None else Original(copy_of)
        return made

    @classmethod
    def from_local(
        cls, local: torch.Tensor, partition: Partition, shape: Sequence[int] | None = None
    ) -> SplitTensor:
        """The split tensor of which every rank passes its block; local, differentiable.

        Parameters
        ----------
        local
            This rank's block; its memory is used, not copied.
        partition
            Its grid has as many dimensions as the tensor.
        shape
            Global shape; every rank passes its balanced block. If None, the ranks exchange the shapes of
            their blocks, which may be any that form a grid: blocking, collective over the partition.

        Raises
        ------
        ShapeError
            If the blocks form no grid, or this block is not the balanced block of ``shape``.
        """
        refuse_tangents("SplitTensor.from_local", [local])
        problem = problem_with(local, "a block")
        if isinstance(local, SplitTensor):
            problem = "a block is of type SplitTensor, wanted a plain tensor, as of its to_local()"
        if not partition.active:
            raise PartitionError(f"SplitTensor.from_local: rank {partition.me} is not in {partition}")
        if shape is None:
            try:
                layout = agree_on_layout(local, partition, problem, SplitTensor.from_local)
            except OF_SEVERAL_RANKS as error:
                Machine.of(partition).settle(error, partition.ranks)
                raise
        elif problem:
            raise ShapeError(f"SplitTensor.from_local: {problem}")
        else:
            layout = lay.balanced(partition, shape)
        wanted = layout.own_box.shape
        if tuple(local.shape) != wanted:
            raise ShapeError(
                f"SplitTensor.from_local: rank {partition.me} passes {tuple(local.shape)}, its block of"
                f" {tuple(layout.shape)} is {wanted}"
            )
        return cls(local, layout)

    # Modules read these often. The overrides avoid a lookup in the table through torch.
    @property
    def shape(self) -> torch.Size:  # type: ignore[override]
        """Global shape."""
        return torch.Size(self._layout.shape)

    def dim(self) -> int:
        """Number of dimensions."""
        return len(self._layout.shape)

    def size(self, dim: int | None = None) -> Any:
        """Global shape, or the global extent of a dimension."""
        shape = self._layout.shape
        if dim is None:
            return torch.Size(shape)
        if -len(shape) <= dim < len(shape):
            return shape[dim]
        raise IndexError(f"Dimension out of range: the tensor has {len(shape)} dimensions, got {dim}")

    ndim = property(dim)

    def numel(self) -> int:
        """Number of elements of the whole tensor."""
        return prod(self._layout.shape)

    nelement = numel

    @property
    def decomposition(self) -> Decomposition:
        """Which box of the tensor each rank has."""
        return self._layout

    @property
    def partition(self) -> Partition:
        """The ranks that have blocks, on their grid."""
        return self._layout.partition

    @property
    def machine(self) -> Machine:
        """The machine of the partition's ranks."""
        return Machine.of(self._layout.partition)

    @property
    def is_split(self) -> bool:
        """Whether any dimension is cut; otherwise every rank has the whole tensor."""
        return bool(self._layout.cut_dims)

    def to_local(self) -> torch.Tensor:
        """This rank's block, in the graph; not a copy.

        A backward from results of the block is a backward of this rank's own loss. The gradient is that of
        the sum of all ranks' losses.
        """
        local = into_graph(self)._local
        show_block(local, self.is_split)
        if local.grad_fn is not None and not self._shown:
            self._shown = True
            with _NO_SUBCLASS():
                # One rank warns for all.
                warns = self.is_split and self.partition.me == self.partition.ranks[0]
                local.register_hook(warn_of_mean if warns else note_reached_split)
        return local

    # The protocol of torch.distributed.checkpoint, which saves and fills the block of each rank.

    def __create_write_items__(self, name: str, _: object) -> list[Any]:
        """What this rank writes: its block. Local."""
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(self._local)
        return [
            WriteItem(
                MetadataIndex(name, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        """Where this rank's block is in the tensor; empty if it has no elements. Local."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        box = self._layout.own_box
        return [] if box.empty else [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape))]

    def __get_tensor_shard__(self, _: object) -> torch.Tensor:
        """This rank's block. Local."""
        return self._local

    def full_tensor(self) -> torch.Tensor:
        """The whole tensor on every rank, as a plain tensor in the graph; blocking.

        All ranks must use the result in the same way: each rank takes the gradient from its own use. In a
        backward that begins behind it, parameters of a distributed model that are used there count once.
        """
        return gathered(self._moved(SplitTensor.full_tensor)._local, self.partition)

    def redistribute(self, *cut: int | None, layout: Decomposition | None = None) -> SplitTensor:
        """The same tensor with another layout; differentiable, blocking.

        Parameters
        ----------
        cut
            For each grid dimension of the partition: the tensor dimension that it cuts into balanced blocks,
            or None for copies. Without arguments every rank gets the whole tensor.
        layout
            The new layout, in place of ``cut``.
        """
        return self._moved(SplitTensor.redistribute, cut, layout)

    def _moved(
        self, function: Any, cut: Sequence[int | None] = (), layout: Decomposition | None = None
    ) -> SplitTensor:
        try:
            if layout is None:
                axes = tuple(cut) or (None,) * self.partition.dim
                layout = lay.balanced(self.partition, self._layout.shape, axes)
            elif layout.partition != self.partition or layout.shape != self._layout.shape:
                raise ShapeError(f"redistribute: {layout} does not fit a tensor of {self._layout.shape}")
            layout = lay.normal(layout)
            with _NO_SUBCLASS():
                THREAD.place = None
                block = checked_block(self)
                if layout is self._layout:
                    return self
                site = site_of(self.machine, function)
                found = SplitTensor(redistributed(site, block, self._layout, layout), layout)
                found._loss_hash = self._loss_hash
                return found
        except Exception as error:
            _report_to_peers(error, [self])
            raise

    @classmethod
    @breaks_graph
    def __torch_function__(  # noqa: C901, PLR0912 - runs for every function of a program
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called by torch in place of its functions."""
        if compiles() is not None:
            return run_eager(cls.__torch_function__, func, types, args, kwargs)
        with _NO_SUBCLASS():
            rule = RULES[func if func in RULES else WITHOUT_RULE]
            if rule.casts and AUTOCASTS():
                cast = _cast(rule.casts, (args, kwargs or _NOTHING))
                if cast is not None:
                    with no_autocast():
                        return cls.__torch_function__(func, types, *cast)
            THREAD.place = None
            if CALL_TRACES:
                note(func, rule.kind, args, kwargs or _NOTHING)
            try:
                if kwargs and "out" in kwargs and kwargs["out"] is not None and rule.kind not in _AS_PASSED:
                    raise refused(func, "out= is not supported; what it returns is to be assigned")
                if lay.LEAVING_OUT:
                    _check_empty_blocks(rule, func, args, kwargs or _NOTHING)
                if not args and rule.kind not in _AS_PASSED:
                    args, kwargs = first_by_place(func, kwargs or _NOTHING)
                if rule.errors == "first":
                    raise_as_torch(func, args, kwargs or _NOTHING)
                if OBSERVERS:
                    found = OBSERVERS[-1](rule, func, args, kwargs or {})
                else:
                    handler = (
                        rule.handler if forward_ad._current_level < 0 else partial(_without_tangents, rule)
                    )
                    found = handler(func, args, kwargs or {})
                    if rule.kind in _EXCHANGING and hooks_of_saved(False) is not None and may_recompute():
                        _recompute_by_all(found, args, kwargs)
                if LOSS_ORIGIN.on and not CALL_TRACES:
                    LOSS_ORIGIN.follow(rule.kind, func, args, kwargs or _NOTHING, found)
                return found
            except Exception as error:
                among = tensors_in(args, kwargs)
                refusal = _of_device(func, error, among)
                if rule.kind not in _ONE_ALONE:
                    _report_to_peers(refusal or error, among)
                if refusal is not None:
                    raise refusal from error
                raise

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls that bypass the table: queries of the shape are answered, most others are refused."""
        name, inside = str(func), runs()
        if func.overloadpacket in _SHAPE_QUERIES:
            return func(torch.empty(args[0]._layout.shape, device="meta"), *args[1:])
        if func is _ITEM and not args[0].is_split:
            # A number among the arguments of a function, such as an extent.
            return func(args[0]._local)
        # Whether torch is putting a gradient into .grad.
        accumulates = isinstance(torch._C._current_autograd_node(), _ACCUMULATES)
        if name == "aten.detach.default" and (inside or not accumulates):
            # Torch saves results of an autograd function, or arguments of a checkpoint. In a backward it only
            # unpacks those with a graph, which require a gradient again.
            in_backward = torch._C._current_graph_task_id() >= 0
            return SplitTensor(args[0]._local.detach().requires_grad_(in_backward), args[0]._layout)
        if name in _OF_GRADIENTS and inside:
            return composed(_OF_GRADIENTS[name], *args, **kwargs)
        # Torch asks this before it puts a gradient into .grad.
        ends = name == "aten.is_non_overlapping_and_dense.default" and torch._C._current_graph_task_id() >= 0
        if ends and not inside:
            raise refused("backward", OF_NO_BLOCK)
        raise refused(func, "it works on memory that is not all here")

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Called by numpy in place of its functions, which ask for an array or call a method."""
        try:
            return func._implementation(*args, **kwargs)
        except (TypeError, UnsupportedError):
            if not any_cut(args, kwargs):
                raise
        raise refused(func, ON_MANY_RANKS)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Shape, dtype and layout, without the elements."""
        with _NO_SUBCLASS():
            shape, dtype, needs = tuple(self._layout.shape), self._local.dtype, self._local.requires_grad
        graph = ", requires_grad=True" if needs else ""
        block = f"block {tuple(self._local.shape)}"
        return f"SplitTensor({shape}, {dtype}, {lay.described(self._layout)}, {block}{graph})"


TENSORS.add(SplitTensor)


def _cast(name: str, given: Any) -> Any:
    # Arguments with autocast's dtypes, or None if they keep theirs. Gradients have the dtypes from before.
    among = tensors_in(given)
    kind = next(x.device.type for x in among if isinstance(x, SplitTensor))
    dtype = dtype_for(name, [x for x in among if castable(x)], kind)
    if dtype is None:
        return None

    def cast(x: torch.Tensor) -> torch.Tensor:
        if x.dtype == dtype or not castable(x):
            return x
        if not isinstance(x, SplitTensor):
            weight = x.to(dtype)
            mark_compared(weight, COMPARED in x.__dict__)
            return weight
        found = SplitTensor(checked_block(x).to(dtype), x._layout)
        found._loss_hash = x._loss_hash
        return found

    return mapped(cast, given)


def _check_empty_blocks(rule: Rule, func: Any, args: Any, kwargs: Any) -> None:
    # Ranks with empty blocks find no errors in their blocks.
    if rule.errors or rule.kind in _NO_CHECK_WHEN_EMPTY:
        return
    if not (getattr(func, "__module__", None) or "torch").startswith("torch"):
        return
    if any(isinstance(x, SplitTensor) and x._layout.leaves_out for x in tensors_in(args, kwargs)):
        raise_as_torch(func, args, kwargs)


def _recompute_by_all(found: Any, args: Any, kwargs: Any) -> None:
    # Under a checkpoint: a recomputation exchanges data again, so all ranks must recompute, or none.
    given = {_memory(x._local if isinstance(x, SplitTensor) else x) for x in tensors_in(args, kwargs)}
    for x in tensors_in(found):
        if isinstance(x, SplitTensor):
            y = x._local
            # A view of an argument stays a view. No other tensor shares a result that was computed here.
            computed = y._is_view() and y.grad_fn is not None and _memory(y) not in given
            x._local = recomputed_by_all(y.clone() if computed else y)


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage()._cdata


def _of_device(func: Any, error: Exception, among: Sequence[Any]) -> UnsupportedError | None:
    # The refusal in place of torch's error about tensors on a device and on the host; None for other errors.
    there = next((x._local for x in among if isinstance(x, SplitTensor) and not x._local.is_cpu), None)
    explain_memory(error, name_of(func), among)
    known = isinstance(error, (DistdlError, torch.OutOfMemoryError, torch.AcceleratorError))
    if there is None or known or "device" not in str(error):
        return None
    tensors = [x for x in among if isinstance(x, torch.Tensor)]
    if len({x.device for x in tensors}) > 1:
        each = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in tensors)
        return UnsupportedError(
            f"{name_of(func)} at {user_place().location}: its tensors are {each}: move them to one device"
        )
    return refused(func, f"{error} (its rule computes on the CPU, and its tensors are on {there.device})")


def _report_to_peers(error: Exception, among: Sequence[Any]) -> None:
    # A distributed model reports errors itself. Within a rule, the outer call reports them.
    if CALL_TRACES or isinstance(error, ENOUGH):
        return
    partition = next((x._layout.partition for x in among if isinstance(x, SplitTensor)), None)
    home = None if partition is None else partition.home
    if partition is None or not isinstance(home, Machine) or home.closed:
        return
    if isinstance(error, OF_SEVERAL_RANKS):
        home.settle(error, partition.ranks)
    elif isinstance(error, torch.OutOfMemoryError):
        home.fail(error)
    else:
        home.segments.announce_error(error)


def composed(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function of split tensors within a rule, by its own rule; not noted as a call of the user.

    Within a handler torch does not dispatch, so that its functions act on blocks. Here it does again.
    """
    CALL_TRACES.append(None)
    try:
        with torch._C._EnableTorchFunction():
            return function(*args, **kwargs)
    finally:
        CALL_TRACES.pop()


def into_graph(x: SplitTensor, changed: bool = False) -> SplitTensor:
    """The same tensor; puts the block of an autograd function's result into the graph of blocks.

    ``changed`` says that the result is an argument that the function changed in place.
    """
    with _NO_SUBCLASS():
        if x.grad_fn is not None:
            name = x.grad_fn.name().removesuffix("Backward")
            try:
                enter_graph(x, changed)
            except TypeError as error:
                raise refused(name, f"this autograd function, called on split tensors, {error}") from None
    return x


def checked_block(x: SplitTensor) -> torch.Tensor:
    """The block of an argument; ``UnsupportedError`` if the tensor may not be used."""
    # Without a graph, as in the function's own forward and backward, the values suffice.
    if x.grad_fn is not None and torch.is_grad_enabled():
        into_graph(x)
    if x._copy_of is not None and x._copy_of.has_changed:
        raise refused(
            "in-place change",
            "a tensor was changed after another was made of it that torch would change with it",
        )
    return x._local


def become_split(func: Any, x: torch.Tensor, layout: Decomposition) -> None:
    """Make a plain tensor a split one, as the same object, since a function changes it by a split tensor.

    All references to it see the change.
    """
    if problem := must_stay_plain(x):
        raise refused(
            func, f"it would change a plain tensor, which every rank has, by a split one; {problem}"
        )
    made = SplitTensor(x.detach()[layout.slices()].clone(), layout)
    made._was_plain = True
    torch.utils.swap_tensors(x, made)


def become_plain(x: SplitTensor, whole: torch.Tensor) -> None:
    """Make a tensor that ``become_split`` made split a plain one again, as the same object."""
    try:
        torch.utils.swap_tensors(x, whole)
    except RuntimeError as error:
        raise UnsupportedError(
            f"a plain tensor of shape {tuple(whole.shape)} became a split one in a call of a model, and"
            f" cannot become plain again; write to its clone() ({error})"
        ) from None


def must_stay_plain(x: torch.Tensor) -> str:
    """Why a plain tensor cannot become a split one: another tensor shares its memory, or it is in a graph."""
    if type(x) is not torch.Tensor:
        return f"it is a {type(x).__name__}"
    if x.requires_grad:
        return "it has a gradient"
    shared = torch._C._storage_Use_Count(_memory(x)) > _ALONE
    if x._base is not None or not x.untyped_storage().resizable() or shared:
        return "another tensor shows the same memory; write to its clone()"
    return "a graph or a weak reference holds it" if _held(x) > 1 or weakref.getweakrefs(x) else ""


# Number of references from C++, such as those of graphs.
_held: Any = torch.Tensor._use_count  # type: ignore[attr-defined]


def any_cut(*arguments: Any) -> bool:
    """Whether any tensor among arguments is a cut split tensor."""
    return any(x.is_split for x in tensors_in(*arguments) if isinstance(x, SplitTensor))


def _without_tangents(rule: Rule, func: Any, args: Any, kwargs: Any) -> Any:
    if any_cut(args, kwargs):
        refuse_tangents(func, tensors_in(args, kwargs))
    return rule.handler(func, args, kwargs)


def refuse_tangents(func: Any, tensors: Sequence[Any]) -> None:
    """Refuse dual tensors, whose tangents a movement of data would lose; free outside of a dual level."""
    if forward_ad._current_level < 0:
        return
    with _NO_SUBCLASS():
        for x in tensors:
            block = x._local if isinstance(x, SplitTensor) else x
            if isinstance(block, torch.Tensor) and forward_ad.unpack_dual(block).tangent is not None:
                raise refused(func, "forward-mode derivatives are of tensors that every rank has all of")


def refused(func: Any, why: str) -> UnsupportedError:
    """Error for a call that cannot be exact; names the function, the module and the user's line.

    ``func`` is torch's function, or a text in its place. ``why`` is a clause that ends without a point: the
    advice that helps with every refusal follows.
    """
    path, line = module_path(), user_place().location
    function = func if isinstance(func, str) else name_of(func)
    module = f" in module {path!r}" if path else ""
    return UnsupportedError(
        f"{function}{module} at {line}: {why}. Give it a rule by distdl_rma.register(function, handler), or"
        " call .redistribute() first, so that every rank has all of the tensor"
    )
