"""The base of all distributed layers: construction, names, parameters, copies, ranks that stand aside."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple, Self, Unpack

import torch
from torch import nn
from torch.autograd import profiler
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from distdl_rma.errors import ConfigurationError, PartitionError, ProtocolError, ShapeError, UnsupportedError
from distdl_rma.geometry.decomposition import Decomposition
from distdl_rma.geometry.partition import Partition
from distdl_rma.layers.core.arguments import NAMES, AnsweringModule, Callbacks, answer
from distdl_rma.layers.core.parameters import Parameters, stated_ranks
from distdl_rma.layers.core.placement import InitialValues, Placement, as_whole, lasting, register
from distdl_rma.layers.core.refusals import CallOutcome
from distdl_rma.machine import Machine
from distdl_rma.ops.core.autograd import anchored, idle, uncompiled
from distdl_rma.ops.core.movement import CallSite
from distdl_rma.ops.core.tensors import trouble_with
from distdl_rma.split import layout as lay
from distdl_rma.split.tensor import SplitTensor, checked_block, mapped

# The modules that a module was put into, the first one first, and by which key. By id, since the modules
# of a program may compare as they like; without a hold on any.
_parents: WeakIdKeyDictionary = WeakIdKeyDictionary()


def path_of(module: nn.Module) -> str:
    """Keys that lead to a module from the outermost one that it is in; empty if it is in none.

    Of several models that it is in the first counts that is still there. What is put into a module other
    than by torch's own functions, as ``copy.deepcopy`` does, is not found.
    """
    keys: list[str] = []
    passed = {id(module)}
    while True:
        found = _parent_of(module)
        if found is None or id(found[0]) in passed:
            return ".".join(reversed(keys))
        module, key = found
        passed.add(id(module))
        keys.append(key)


def _parent_of(module: nn.Module) -> tuple[nn.Module, str] | None:
    for parent, key in _living(module):
        if parent._modules.get(key) is module:
            return parent, key
        # Containers may have numbered theirs anew since.
        for other, child in parent._modules.items():
            if child is module:
                return parent, other
    return None


def _living(module: nn.Module) -> list[tuple[nn.Module, str]]:
    entries = ((parent(), key) for parent, key in _parents.get(module, ()))
    return [(parent, key) for parent, key in entries if parent is not None]


def _remember(parent: nn.Module, key: str, module: nn.Module | None) -> None:
    # Called by torch whenever a module is put into another one.
    if module is not None:
        entries = [(weakref.ref(other), old) for other, old in _living(module)]
        _parents[module] = [*entries, (weakref.ref(parent), key)]


register_module_module_registration_hook(_remember)


def call_on_blocks(
    label: str,
    partitions: Sequence[Partition],
    call: Callable[..., Any],
    output: Callable[[], Decomposition | None],
    inputs: tuple[Any, ...],
) -> Any:
    """Result of a layer for split tensors, cut as its output is.

    ``partitions`` are those of its inputs, the last for all that follow; ``output`` says after the call how
    its output is cut. Plain tensors among the inputs are blocks, as the layer takes them.

    Raises ``PartitionError`` if an input is cut over other ranks, or otherwise.
    """
    blocks = []
    for at, x in enumerate(inputs):
        if not isinstance(x, SplitTensor):
            blocks.append(x)
            continue
        wanted, grid = partitions[min(at, len(partitions) - 1)], lay.on_grid(x.decomposition).partition
        if grid != wanted:
            raise PartitionError(
                f"{label!r}: input {at} is split over {grid}, the layer takes {wanted}: build the layer on"
                " the partition of the model, or move the tensor by redistribute() or Repartition"
            )
        with torch._C.DisableTorchFunctionSubclass():
            blocks.append(checked_block(x))
    result = call(*blocks)
    found = output()
    if found is None:
        raise UnsupportedError(
            f"{label!r}: what it returns are no blocks of one tensor; call it with plain ones"
        )
    layout, rank = lay.normal(found), found.partition.me
    # A rank without a part of the output gets a tensor without elements, of any shape.
    return mapped(lambda y: SplitTensor(y.reshape(layout.box(rank).shape), layout), result)


_COPY = " (copy "


class DeclaredTensors(NamedTuple):
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


class DistributedLayer(AnsweringModule):
    """Base of the distributed layers: what holds for all of them; their own pages say what differs.

    **Construction** is collective over the machine: all its ranks build the same layers in the same order,
    with the same arguments. What a layer opens on the machine it opens when that is first needed.

    **Tensors** are local shards. The partition ``P_x`` has the input and ``P_y`` the output, with a
    dimension for each dimension of the tensor. Shards may be of any size, as long as they form a grid;
    those of the output are balanced where data is moved to ``P_y``, and otherwise where the input puts
    them. Ranks outside of ``P_x`` pass a tensor without elements, and ranks outside of ``P_y`` receive one,
    of shape (b, 0) if they passed b rows. Shapes and types may change from call to call, on some ranks
    only: the ranks agree on them.

    **Calls** are blocking, forward and backward, and involve the ranks of the partitions. While gradients
    are recorded, ranks that only hold copies of the weights take part, too: they receive success or the
    error of a call, and raise the same error. If any rank needs a gradient, all of them take part in the
    backward.

    **Parameters** hold the values that the layer of torch starts with if all ranks are seeded alike. Copies
    on several ranks start as those of the first one, and their gradients are summed in every backward,
    unless a :class:`GradientSync` does it. ``state_dict()`` has this rank's part by torch's keys.

    **Copies.** ``copy.deepcopy`` gives a layer of its own, local: it has copies of parameters and buffers,
    opens anew what it needs, and belongs to no ``GradientSync``. Use it on all ranks alike, as any other
    layer.

    **The twin of a layer of torch** takes torch's arguments, by torch's names and in torch's order, after
    its partitions. It is an instance of torch's class, for what looks for layers by ``isinstance``.

    Parameters
    ----------
    partitions
        The partitions that the layer works on; all of one machine.
    placement
        Of layers with parameters: where these are kept. ``"replicated"``: every rank of the machine, or
        that uses a part of them, has a copy. ``"root"``: one rank has them, they travel in every forward,
        and their gradients back in every backward. ``"cut"``: every rank has the part that its shard needs.
        ``weights=`` is another name for it.
    name
        What messages and recordings call the layer, alike on all ranks. If None its path in the model, as
        ``down2.conv.0``, and before it is in one its kind and a number.
    callbacks
        Any of the callbacks of this layer, answered by its user instead; see :class:`Callbacks`.

    Raises
    ------
    PartitionError
        If the partitions belong to different machines or to none, or do not fit together.
    ArgumentError
        If an argument is invalid, as torch's layers raise it or earlier.
    UnsupportedError
        If a device other than the CPU, or a type that does not move between ranks, is asked for.
    ShapeError
        In a call, on all its ranks alike: if shards form no grid, differ in type, or do not fit the layer;
        if a rank outside of ``P_x`` passes elements, or what is passed is no dense tensor on the CPU.
    MismatchError
        In the first call, if the ranks built the layer with different arguments.
    """

    P_x: Partition

    def __init__(
        self, *partitions: Partition, name: str | None = None, **callbacks: Unpack[Callbacks]
    ) -> None:
        # Not super(): the twin of a torch layer inherits from that one too, and is not built by it.
        nn.Module.__init__(self)
        kind = type(self).__name__
        self.machine = Machine.of(partitions[0])
        for partition in partitions:
            if Machine.of(partition) is not self.machine:
                raise PartitionError(
                    f"{kind}: the partitions of a layer must belong to one machine, {partitions[0]} and"
                    f" {partition} do not"
                )
        # What ranks know the layer by; its label is for people.
        self.name = name or self.machine.labels.new_name(kind)
        self._named, self._label_alone = bool(name), self.name
        self.machine.labels.register(self.name, self)
        self.machine.lasting = True
        # Rank ids of all partitions, each once: those that take part in a call.
        self.members = tuple(dict.fromkeys(rank for p in partitions for rank in p.ranks))
        # Shared with its copies, which are counted together.
        self._copies = count(1)
        self.placements: dict[str, Placement] | None = None
        # Which box of a buffer a rank keeps, by key, for those that are cut.
        self.buffer_layouts: dict[str, Decomposition] = {}
        self.announced: DeclaredTensors | None = None
        answer(self, kind, callbacks)

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
        # A name of its own: no rank's copy shall be taken for the layer itself, or for another copy.
        copy_of = f"{_COPY}{next(self._copies)})"
        twin.name = self.name.partition(_COPY)[0] + copy_of
        twin._label_alone = self.label.partition(_COPY)[0] + copy_of
        twin.machine.labels.register(twin.name, twin)
        return twin

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        reset: Any = getattr(cls, "reset_parameters", None)
        if reset is not None and reset.__module__.startswith("torch."):
            # torch's own would look at this rank's part only, and draw other numbers on each rank.
            cls.reset_parameters = _on_whole_parameters(reset)  # type: ignore[attr-defined]

    @property
    def label(self) -> str:
        """What messages call the layer: the given name, its path in the model, or its kind and number.

        The path begins at the outermost module that the layer is in, of the first model that it was put
        into. A copy has the label of the layer that it was made from, with ``(copy 1)`` behind it, unless
        it was put into a model by itself.
        """
        return self.name if self._named else path_of(self) or self._label_alone

    @uncompiled
    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Call ``forward``, and remember the sizes of the local shards.

        ``ConfigurationError``, of which the other ranks hear, if the user's callbacks say what does not hold.
        """
        for x in inputs:
            if isinstance(x, SplitTensor):
                return call_on_blocks(self.label, self.input_partitions, self, self.output_layout, inputs)
        before = self.nbytes_in((*inputs, *named.values()))
        # In every call, since the user may give a callback at any time: one look for all of them.
        stated = not NAMES.isdisjoint(vars(self))
        if stated:
            self._check_stated(get_sizeof_input_tensor=before, get_sizeof_tensor=before)
        if profiler._is_profiler_enabled:
            with profiler.record_function(self.label):
                y = super().__call__(*inputs, **named)
        else:
            y = super().__call__(*inputs, **named)
        behind = nbytes_of(y)
        # By torch's way an attribute takes longer than all else here.
        self.__dict__["shard_nbytes"] = before, behind
        if stated:
            self._check_stated(get_sizeof_output_tensor=behind)
        return y

    @property
    def input_partitions(self) -> tuple[Partition, ...]:
        """Partitions of the inputs of a call; the last one is that of all that follow."""
        return (self.P_x,)

    def output_layout(self) -> Decomposition | None:
        """How the output of the last call is cut; None if that are no blocks of one tensor. Local."""
        return None

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """As of every module; training can use the buffer, wherever the layer is built."""
        super().register_buffer(name, None if tensor is None else lasting(tensor), persistent)

    def _check_stated(self, **sizes: int) -> None:
        if self.placed is None:
            # Without weights any ranks of the machine will do; those that have some ask in their forward.
            stated_ranks(self, self.site, self.machine.ranks)
        names = () if self.statistics_told else ("get_ranks_synch_norm", "get_sizeof_norm")
        who = f"{self.label!r} on rank {self.machine.rank}"
        try:
            self.check_answers(who, ("get_sizeof_gradients", *names), **sizes)
        except ConfigurationError as error:
            if not self.machine.closed:
                self.machine.fail(error)
            raise

    @property
    def statistics_told(self) -> bool:
        """Whether the ranks tell each other in each call what their users say of statistics."""
        return False

    @property
    def site(self) -> CallSite:
        """Where the operators of this layer are called."""
        return CallSite(self.machine, self.name)

    def nbytes_in(self, inputs: tuple[Any, ...]) -> int:
        """Bytes of the input among the arguments of a call."""
        return nbytes_of(inputs[:1])

    def announce(self, inputs: Sequence[Decomposition], output: Decomposition, dtype: torch.dtype) -> None:
        """Say what the tensors will be, whose sizes are then known before the first call; local."""
        self.announced = DeclaredTensors(tuple(inputs), output, dtype)
        self.shard_nbytes = self.announced.nbytes(self.machine.rank)

    def built_with(self) -> str:
        """What the layer was built with, and for what inputs: alike on all ranks that it works on."""
        return f"{type(self).__name__}({self.extra_repr()}) for {self.announced and self.announced.shapes}"

    def expected(
        self, P_x: Partition, shape: Sequence[int] | None, dtype: torch.dtype | None, at: int = 0
    ) -> torch.Tensor:
        """Tensor that looks like this rank's part of an input: as announced, unless it is said here."""
        known = self.announced
        if shape is None:
            if known is None:
                raise ProtocolError(
                    f"{self.name!r}: the shape of its input is not known: connect(shape) with the global one,"
                    " or build the layer from global parameters"
                )
            shape = known.inputs[at].shape
        kinds = (None if known is None else known.dtype, *(p.dtype for p in self.parameters()))
        kind = dtype or next(filter(None, kinds), torch.get_default_dtype())
        return placeholder_shard(self.expected_blocks(P_x, shape), kind)

    def expected_blocks(self, P_x: Partition, shape: Sequence[int]) -> Decomposition:
        """How an input of which only the shape is known is taken to be cut."""
        return Decomposition.balanced(P_x, shape)

    def place(
        self, values: Mapping[str, nn.Parameter | InitialValues | None], placements: Mapping[str, Placement]
    ) -> None:
        """Register the layer's parameters, cut and placed; collective over the machine."""
        self.placements = dict(placements)
        register(self, values, placements)
        if self.placed is not None:
            self.placed.equalise()

    @cached_property
    def placed(self) -> Parameters | None:
        """The layer's parameters, for use where they are needed; None without any."""
        return None if self.placements is None else Parameters(self, self.site, self.placements)

    def agreeing(self) -> tuple[int, ...]:
        """Ranks that take part in a call, and so hear of what is refused in it."""
        return self.members

    @cached_property
    def _outcomes(self) -> dict[tuple[int, ...], CallOutcome | None] | None:
        # By the ranks that gradients are summed over; None where all that keep copies take part in calls.
        placed = self.placed
        return None if placed is None or set(placed.holders) <= set(self.agreeing()) else {}

    def outcome(self) -> CallOutcome | None:
        """How ranks outside are told what becomes of a call; None if nobody there waits for its backward.

        Those outside that keep copies of the weights wait in the sum of gradients. They hear in calls that a
        backward may follow: while gradients are recorded, in ``train()`` and ``eval()`` alike, but not again
        in a recomputation.
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
        """Output of a rank that takes no part in a call: ``x`` without elements, in the graph of ``others``.

        Raises what the ranks of the layer refuse, if this one would wait for their backward.
        """
        outcome = self.outcome()
        if outcome is not None:
            outcome.hear()
        problem = trouble_with(x)
        if problem:
            raise ShapeError(f"{self.name!r}: rank {self.machine.rank}: {problem}")
        # As on the ranks that have work, a backward may start here; it does nothing.
        return anchored(idle(x, others))

    @property
    def layouts(self) -> dict[str, Decomposition]:
        """Which box of each parameter, and of each buffer that is cut, a rank keeps, by key."""
        placements = self.placements or {}
        return {key: place.store for key, place in placements.items()} | self.buffer_layouts

    @property
    def scattered(self) -> dict[str, Decomposition]:
        """Those of the layouts that are not whole on every rank of the machine."""
        everyone = self.machine.size
        return {
            key: layout
            for key, layout in self.layouts.items()
            if layout.partition.size < everyone or any(axis is not None for axis in layout.axes)
        }

    def apply(self, fn: Callable[[nn.Module], Any]) -> Self:
        """Apply ``fn`` as torch does, to the layer as it is on one machine: with whole parameters.

        So what initialises them draws the same random numbers on every rank, those of the sequential layer,
        and sees the global shape. Each rank keeps its part.
        """
        for child in self.children():
            child.apply(fn)
        with as_whole(self, self.scattered):
            fn(self)
        return self

    def get_ranks_synch_weights(self) -> list[int]:
        """Rank ids that hold copies of this rank's weights, itself included; empty if none is needed."""
        ranks = () if self.placed is None else self.placed.holders
        return list(ranks) if len(ranks) > 1 else []


def _on_whole_parameters(reset: Callable[[Any], object]) -> Callable[[DistributedLayer], None]:
    # ``reset_parameters`` of torch that draws, on every rank, what it draws on one machine.

    def reset_whole(layer: DistributedLayer) -> None:
        with as_whole(layer, layer.scattered):
            reset(layer)

    return reset_whole


def nbytes_of(tensors: Any) -> int:
    """Bytes of a tensor, or of the first of several; 0 of anything else."""
    first = tensors[0] if isinstance(tensors, tuple) and tensors else tensors
    return first.numel() * first.element_size() if isinstance(first, torch.Tensor) else 0


def placeholder_shard(blocks: Decomposition, dtype: torch.dtype) -> torch.Tensor:
    """Tensor of the shape and type of this rank's shard that takes no memory; nothing on idle ranks."""
    P_x = blocks.partition
    return torch.empty(1, dtype=dtype).expand(blocks.box(P_x.me).shape if P_x.active else (0,))
