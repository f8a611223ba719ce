"""The base of all distributed layers: construction, names, parameters, copies, idle ranks.

A twin has two bases. The first one, a family, makes it distributed; the last one, torch's layer, makes it an
instance of torch's class, for programs that look for ``nn.Conv2d``. Every method that acts on data is one of
the first: torch's would compute with this rank's shard alone, and be wrong in silence::

    DistributedConv2d  ->  DistributedConv  ->  ...  ->  DistributedLayer  ->  nn.Conv2d  ->  nn.Module
                           operation, placements         this file             the class alone

What identifies a layer among ranks is its name: every rank builds the same layers in the same order, so that
the third ``DistributedConv2d`` of each is the same one. The label, a path in the model, is for people.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from inspect import cleandoc
from itertools import chain, count
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import nn

from distdl_rma.errors import ArgumentError, PartitionError, ProtocolError, ShapeError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.ops.core.autograd import anchored, idle
from distdl_rma.layers.ops.core.movement import CallSite
from distdl_rma.layers.ops.core.tensors import problem_with
from distdl_rma.layers.partitioned.core.arguments import shown_signature, torchs_class
from distdl_rma.layers.partitioned.core.callbacks import CallbackModule, Callbacks, set_callbacks
from distdl_rma.layers.partitioned.core.module_paths import path_of
from distdl_rma.layers.partitioned.core.parameters import Parameters, stated_ranks
from distdl_rma.layers.partitioned.core.placement import InitialValues, Placement, as_whole, lasting, part_of
from distdl_rma.layers.partitioned.core.refusals import CallOutcome
from distdl_rma.layers.staging import backward_in_this_thread
from distdl_rma.segments.machine import Machine

_COPY = " (copy "


class DistributedLayer(CallbackModule):
    """Base of the distributed layers.

    **Construction** is collective over the machine: all its ranks build the same layers in the same order,
    with the same arguments. A layer reserves memory in the segment when it is first needed.

    **Tensors** are local shards. The partition ``P_x`` has the input and ``P_y`` the output, with a
    dimension for each dimension of the tensor. Input shards may be of any size, as long as they form a grid.
    Output shards are balanced if data is moved to ``P_y``; otherwise they are cut as the input. Ranks outside
    of ``P_x`` pass a tensor without elements, and ranks outside of ``P_y`` receive one, of shape (b, 0) if
    they passed b rows. Shapes and types may change from call to call, also on some ranks only.

    **Calls** are blocking, forward and backward, and involve the ranks of the partitions. While gradients
    are recorded, ranks that only hold replicas of the weights also take part: they receive success or the
    error of a call, and raise the same error. If any rank needs a gradient, all of them take part in the
    backward.

    **Parameters** have torch's initial values if all ranks have the same seed. Replicas start with the values
    of their first rank, and their gradients are summed in every backward, unless a :class:`GradientSync` does
    it. ``state_dict()`` has this rank's part by torch's keys.

    **Copies.** ``copy.deepcopy`` returns an independent layer, local: it has copies of parameters and
    buffers, reserves its own memory, and belongs to no ``GradientSync``. Call it on all ranks in the same
    order, as any other layer.

    **The twin of a layer of torch** takes its partitions, then torch's arguments by torch's names and in
    torch's order. It is an instance of torch's class, for programs that use ``isinstance``.

    Parameters
    ----------
    partitions
        The partitions of the layer's tensors; all of one machine.
    placement
        Where a layer keeps its parameters. ``"replicated"``: every rank of the machine, or every rank that
        uses a block, has a copy. ``"root"``: one rank has them, sends them in every forward, and receives
        their gradients in every backward. ``"cut"``: every rank has the part that its shard needs.
        ``weights=`` is another name for it.
    name
        Name of the layer in messages and recordings, equal on all ranks. If None, its path in the model, such
        as ``down2.conv.0``; outside of a model, its class and a number.
    callbacks
        Functions that replace callbacks of this layer; see :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If the partitions belong to different machines or to none, or do not fit together.
    ArgumentError
        If an argument is invalid; at construction also where torch raises in the first call. If an argument
        that operations are derived from, such as a stride, is changed later.
    UnsupportedError
        If the argument ``device`` is not the CPU, or the type cannot be sent between ranks.
    ShapeError
        In a call, on all its ranks: if shards form no grid, differ in type, or do not fit the layer; if a
        rank outside of ``P_x`` passes elements; if an input is not a dense tensor on the device of the
        layer's parameters, or on a device of another type than those of other ranks.
    MismatchError
        In the first call, if the ranks built the layer with different arguments.
    """

    # Attributes that are printed, and those of them that may change; and where parameters may be kept, the
    # usual place first.
    _shown: tuple[str, ...] = ()
    _changeable: tuple[str, ...] = ()
    _allowed: ClassVar[tuple[str, ...]] = ()
    __signature__: ClassVar[inspect.Signature | None]
    # For ``help``, if the constructor does not name torch's arguments: keyword arguments beside these.
    _by_name: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, *partitions: Partition, name: str | None = None, **callbacks: Unpack[Callbacks]
    ) -> None:
        # Not super(): a twin also inherits from its torch layer, whose constructor must not run.
        nn.Module.__init__(self)
        kind = type(self).__name__
        self.machine = Machine.of(partitions[0])
        for partition in partitions:
            if Machine.of(partition) is not self.machine:
                raise PartitionError(
                    f"{kind}: the partitions of a layer must belong to one machine, {partitions[0]} and"
                    f" {partition} do not"
                )
        # Ranks identify the layer by its name; its label is for people.
        self.name = name or self.machine.labels.new_name(kind)
        self._named, self._label_alone = bool(name), self.name
        self.machine.labels.register(self.name, self)
        self.machine.lasting = True
        # Ranks that take part in a call, each once.
        self.members = tuple(dict.fromkeys(rank for p in partitions for rank in p.ranks))
        # Shared with copies of the layer, so that each copy has its own number.
        self._copies = count(1)
        self.placements: dict[str, Placement] | None = None
        # Decompositions of the buffers that are cut, by key.
        self.buffer_layouts: dict[str, Decomposition] = {}
        # Expected decompositions of the inputs, and their type; calls with others remain possible.
        self.announced: tuple[Decomposition, ...] = ()
        self.announced_dtype: torch.dtype | None = None
        set_callbacks(self, kind, callbacks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        kept = {
            key: value
            for key, value in vars(self).items()
            if key != "_copies" and not isinstance(getattr(type(self), key, None), cached_property)
        }
        vars(twin).update(copy.deepcopy(kept, memo))
        twin._copies = self._copies
        # Its own name distinguishes the copy from the layer, and from other copies, on all ranks.
        copy_of = f"{_COPY}{next(self._copies)})"
        twin.name = self.name.partition(_COPY)[0] + copy_of
        twin._label_alone = self.label.partition(_COPY)[0] + copy_of
        twin.machine.labels.register(twin.name, twin)
        return twin

    def __setattr__(self, name: str, value: Any) -> None:
        """As in torch; ``ArgumentError`` if an argument changes that operations are derived from.

        An operation is kept for each shape of input. A stride that changed later would hold for new shapes,
        and not for old ones.
        """
        if name in self._shown and name not in self._changeable:
            old = vars(self).get(name, value)
            if old is not value and old != value:
                raise ArgumentError(
                    f"{self.label!r}: its {name} is {old!r}, and cannot become {value!r} later: build a new"
                    " layer"
                )
        super().__setattr__(name, value)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        twin = torchs_class(cls)
        shown = cls._by_name and cls.__name__ == f"Distributed{twin.__name__}"
        # Not inherited: a user's subclass may have a constructor of its own.
        cls.__signature__ = shown_signature(cls, cls._by_name) if shown else None
        reset: Any = getattr(cls, "reset_parameters", None)
        if reset is not None and reset.__module__.startswith("torch."):
            # torch's method would use the shape of this rank's part, and draw other numbers on each rank.
            cls.reset_parameters = _on_whole_parameters(reset)  # type: ignore[attr-defined]
        if cls.__name__ == f"Distributed{cls.__bases__[-1].__name__}":
            _show_example(cls)

    def take_over(self, like: nn.Module) -> None:
        """Get the arguments that torch's layer has checked; if none are listed, all are shown and kept.

        They go straight into the instance: ``__setattr__`` refuses later changes of these names.
        """
        found = {key: it for key, it in vars(like).items() if key[0] != "_" and key not in vars(self)}
        vars(self).update(found)
        self._shown = self._shown or tuple(found)

    @property
    def label(self) -> str:
        """Name in messages: the given name, else the path in the model, else the class and a number.

        The path begins at the outermost module of the first model that contains the layer. A copy has the
        label of the original with ``(copy 1)`` behind it, unless it has a path itself.
        """
        return self.name if self._named else path_of(self) or self._label_alone

    def refuse(self, problem: str) -> None:
        """Raise ``ShapeError`` on all ranks of a call for wrong arguments of this rank; blocking.

        Layers whose ranks agree in each call take part in this agreement first, with the problem.
        """
        raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")

    def extra_repr(self) -> str:
        """Arguments and partitions in one line, for ``print(model)``."""
        shown = {key: getattr(self, key) for key in self._shown}
        shown = {key: value is not None if key == "bias" else value for key, value in shown.items()}
        if (placement := vars(self).get("placement")) not in (None, *self._allowed[:1]):
            shown["placement"] = placement
        grids = {key: vars(self).get(key) for key in ("P_x", "P_y", "P_W", "P_w")}
        shown |= {key: grid.shape for key, grid in grids.items() if grid is not None}
        return ", ".join(f"{key}={value!r}" for key, value in shown.items())

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """As in torch; a buffer that was made in inference mode is copied, so that training can use it."""
        super().register_buffer(name, None if tensor is None else lasting(tensor), persistent)

    def _check_callbacks(self, **sizes: int) -> None:
        if self.placed is None:
            # Without weights any ranks of the machine are valid; layers with weights check in their forward.
            stated_ranks(self, self.site, self.machine.ranks)
        self.check_callbacks(("get_sizeof_gradients", "get_ranks_synch_norm", "get_sizeof_norm"), **sizes)

    @property
    def site(self) -> CallSite:
        """Machine and name, for the operators of this layer."""
        return CallSite(self.machine, self.name)

    def announce(self, inputs: Sequence[Decomposition], output: Decomposition, dtype: torch.dtype) -> None:
        """Declare the tensors, so that their sizes are known before the first call; local."""
        self.announced, self.announced_dtype = tuple(inputs), dtype
        before, behind = (sum(blocks.own_box.volume for blocks in some) for some in (inputs, [output]))
        self.shard_nbytes = dtype.itemsize * before, dtype.itemsize * behind

    def arguments_text(self) -> str:
        """Arguments of the layer and its announced shapes as text; must be equal on all its ranks."""
        shapes = [blocks.shape for blocks in self.announced]
        return f"{type(self).__name__}({self.extra_repr()}) for {shapes}"

    def expected(
        self, P_x: Partition, shape: Sequence[int] | None, dtype: torch.dtype | None, at: int = 0
    ) -> torch.Tensor:
        """Placeholder for this rank's part of an input, by default the announced one.

        It takes the memory of one element, and has no elements on idle ranks. ``connect`` plans for it as for
        a tensor of a user, so that no other path can differ from that of a call.
        """
        if shape is None:
            if not self.announced:
                raise ProtocolError(
                    f"{self.name!r}: the shape of its input is not known: connect(shape) with the global one,"
                    " or build the layer from global parameters"
                )
            shape = self.announced[at].shape
        kinds = self.announced_dtype, *(p.dtype for p in self.parameters())
        kind = dtype or next(filter(None, kinds), torch.get_default_dtype())
        extents = self.expected_blocks(P_x, shape).own_box.shape if P_x.active else (0,)
        # A layer may check the values of its input, such as indices: zero is valid everywhere.
        like = next(chain(self.parameters(), self.buffers()), torch.empty(0))
        return torch.zeros(1, dtype=kind, device=like.device).expand(extents)

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """Decomposition to expect of an input of which only the global shape is known."""
        return Decomposition.balanced(P_x, shape)

    def place(
        self, values: Mapping[str, nn.Parameter | InitialValues | None], placement: Callable[[str], Placement]
    ) -> None:
        """Register the layer's parameters, cut and placed by name; collective over the machine."""
        # A layer whose parameters are all None is one without parameters: its calls look for none.
        found = {key: placement(key) for key, value in values.items() if value is not None}
        self.placements = found or None
        # Training can use the parameters, even if this runs in inference mode.
        with torch.inference_mode(False):
            for key, value in values.items():
                self.register_parameter(key, None if value is None else part_of(value, found[key].store))
        if self.placed is not None:
            self.placed.equalise()

    @cached_property
    def placed(self) -> Parameters | None:
        """The layer's parameters; None without any."""
        return None if self.placements is None else Parameters(self, self.site, self.placements)

    def agreeing(self) -> tuple[int, ...]:
        """Ranks that take part in a call, and receive its errors in it."""
        return self.members

    @cached_property
    def _outcomes(self) -> dict[tuple[int, ...], CallOutcome | None] | None:
        # By the ranks that gradients are summed over; None if all holders of replicas take part in calls.
        placed = self.placed
        return None if placed is None or set(placed.holders) <= set(self.agreeing()) else {}

    def outcome(self) -> CallOutcome | None:
        """Notification of ranks outside about a call; None if none of them waits for its backward.

        Ranks outside that hold replicas of the weights wait in the sum of gradients. They receive the outcome
        of each call that records gradients, in ``train()`` and in ``eval()``, but not of a recomputation.
        Those run within a backward, in which ranks outside may recompute nothing.
        """
        placed, outcomes = self.placed, self._outcomes
        if placed is None or outcomes is None or not torch.is_grad_enabled():
            return None
        learns = any(p.requires_grad and p.numel() for p in self.parameters())
        if not learns or torch._C._current_graph_task_id() >= 0:
            return None
        ranks = tuple(placed.summed_over())
        if ranks not in outcomes:
            outcomes[ranks] = CallOutcome.among(self.machine, self.agreeing(), ranks, self.name)
        return outcomes[ranks]

    def idle_output(self, x: torch.Tensor, others: Iterable[torch.Tensor] = ()) -> torch.Tensor:
        """Output of a rank outside of a call: ``x`` without elements, in the graph of ``others``.

        Raises the error of the layer's ranks if this rank would wait for their backward; then blocking.
        """
        outcome = self.outcome()
        if outcome is not None:
            outcome.receive()
        if problem := problem_with(x):
            DistributedLayer.refuse(self, problem)
        # A backward may start here, as on the other ranks; it does nothing.
        y = anchored(idle(x, others))
        if not y.is_cpu:
            backward_in_this_thread()
        return y

    @property
    def layouts(self) -> dict[str, Decomposition]:
        """Decompositions of the parameters, and of the buffers that are cut, by key."""
        placements = self.placements or {}
        return {key: place.store for key, place in placements.items()} | self.buffer_layouts

    @property
    def scattered(self) -> dict[str, Decomposition]:
        """The layouts of tensors that are not whole on every rank of the machine."""
        return {
            key: layout
            for key, layout in self.layouts.items()
            if layout.partition.size < self.machine.size or layout.cut_dims
        }

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply ``fn`` as torch does, while the parameters have their global shape.

        So an initialisation draws the random numbers of the sequential layer on every rank. Each rank keeps
        its part of the result. An initialisation that reads the shape, such as Kaiming's, sees that of the
        sequential layer too.
        """
        for child in self.children():
            child.apply(fn)
        with as_whole(self, self.scattered):
            fn(self)
        return self

    def get_ranks_synch_weights(self) -> list[int]:
        """Rank ids that hold replicas of this rank's weights, itself included; empty if no other does."""
        ranks = () if self.placed is None else self.placed.holders
        return list(ranks) if len(ranks) > 1 else []


def _on_whole_parameters(reset: Callable[[Any], object]) -> Callable[[DistributedLayer], None]:
    # torch's method in the place of itself: a user calls ``layer.reset_parameters()`` as ever.
    def reset_whole(layer: DistributedLayer) -> None:
        """Draw the parameters anew; every rank draws those of one machine, and keeps its part."""
        with as_whole(layer, layer.scattered):
            reset(layer)

    return reset_whole


def _show_example(twin: type) -> None:
    # The docstring of a twin without an example gets that of its family, with its name and dimensions.
    families = (cleandoc(base.__doc__ or "").partition("\n\nExamples\n") for base in twin.__mro__[1:])
    _, heading, example = next((found for found in families if found[1]), ("", "", ""))
    if twin.__doc__ is None or "Examples\n" in twin.__doc__:
        return
    # The last extent of a shape, or of a grid, of an image is that of all spatial dimensions but one.
    behind = r"\2" * ({"1d": 1, "3d": 3}.get(twin.__name__[-2:], 2) - 1)
    example = re.sub(r"([(\[]\w+, \w+, [\w.]+)(, \w+)(?=[)\]])", rf"\1{behind}", example)
    example = re.sub(r"\bDistributed\w+(?=\()", twin.__name__, example)
    twin.__doc__ = cleandoc(twin.__doc__) + heading + example


def nbytes_of(tensors: Any) -> int:
    """Bytes of a tensor, or of the first tensor of a tuple; 0 for anything else."""
    first = tensors[0] if isinstance(tensors, tuple) and tensors else tensors
    return first.numel() * first.element_size() if isinstance(first, torch.Tensor) else 0
